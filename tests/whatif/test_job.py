"""Whole jobs: goodput against a simulation of failures, samples at large batches, money and energy."""

import random
from dataclasses import replace

import pytest

from paceline.catalog import clusters, devices, transformers
from paceline.cost import failures
from paceline.cost.energy import power
from paceline.cost.money import price
from paceline.errors import SpecError
from paceline.predict import simulated
from paceline.spec.plan import Plan
from paceline.whatif.job import Budget, job

DGX = clusters.get("4xdgx-h100")


@pytest.fixture(scope="module")
def step():
    return simulated.predict(transformers.get("llama3-8b"), DGX, Plan.parse("fsdp mbs=1 seq=4096"))


def played(interval, write, restart, between, seed=1):
    """The share of progress in a job that fails at random."""
    draw = random.Random(seed)
    clock = progress = 0.0
    while clock < 4000 * between:
        left = draw.expovariate(1 / between)
        while left > interval + write:
            left -= interval + write
            clock += interval + write
            progress += interval
        clock += left
        repair = restart
        while (again := draw.expovariate(1 / between)) < repair:  # it may fail while it restarts
            clock += again
        clock += repair
    return progress / clock


@pytest.mark.parametrize(
    ("interval", "write", "restart", "between"),
    [(3600, 60, 600, 86400), (600, 30, 300, 3600), (100, 50, 10, 400)],
)
def test_goodput_is_that_of_a_job_that_fails(interval, write, restart, between):
    formula = failures.goodput(interval, write_s=write, restart_s=restart, interrupted_s=between)
    assert formula == pytest.approx(played(interval, write, restart, between), rel=0.02)


@pytest.mark.parametrize("between", [1e3, 1e4, 1e6])
def test_the_best_interval_is_the_best(between):
    best = failures.best_interval_s(20.0, between)

    def rate(interval):
        return failures.goodput(interval, write_s=20.0, restart_s=300.0, interrupted_s=between)

    assert rate(best) >= max(rate(best * f) for f in (0.3, 0.5, 2, 3)) and rate(best) > 0.995 * max(
        rate(best * 1.1**i) for i in range(-20, 20)
    )


def test_a_job_is_its_steps_and_what_failures_cost(step):
    j = job(step, DGX, Budget(tokens=1e12))
    assert j.steps == -(-(10**12) // (step.batch * step.seq)) and j.training_s.value == j.steps * step.step_s
    assert (
        j.time_s.value == pytest.approx(j.training_s.value / j.goodput.value)
        and j.time_s.low < j.time_s.value < j.time_s.high
    )
    assert j.device_hours.value == pytest.approx(j.time_s.value * 32 / 3600)
    assert j.money.value == pytest.approx(j.device_hours.value * 12.29, rel=1e-3)


def test_more_failures_cost_more(step):
    times = [
        job(step, DGX, Budget(tokens=1e12, mtbf_s=hours * 3600)).time_s.value for hours in (1e6, 1e4, 1e3)
    ]
    assert times == sorted(times)
    with pytest.raises(SpecError, match="no checkpoint"):
        job(step, DGX, Budget(tokens=1e12, mtbf_s=1.0))


def test_large_batches_need_more_samples(step):
    plain, critical = (
        job(step, DGX, Budget(tokens=1e12, critical_batch=size))
        for size in (0.0, float(step.batch * step.seq))
    )
    assert critical.extra == pytest.approx(1) and critical.steps == pytest.approx(2 * plain.steps, rel=1e-3)


def test_epochs(step):
    images = replace(step, unit="images")
    j = job(images, DGX, Budget(epochs=90))
    assert j.units == 90 * 1_281_167 and j.evaluation_s > 0
    own = job(images, DGX, Budget(epochs=2, samples=1000))
    assert own.units == 2000 and own.evaluation_s == 0


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (Budget(), "--tokens or by --epochs"),
        (Budget(tokens=1, epochs=1), "one of them"),
        (Budget(epochs=1), "no usual size"),
    ],
)
def test_budgets_that_say_too_little(step, budget, message):
    with pytest.raises(SpecError, match=message):
        job(step, DGX, budget)


def test_power_lies_between_idle_and_the_limit():
    h100 = devices.get("h100-sxm")
    idle, full = power(h100, 0.0, 0.0, "bf16"), power(h100, 600e12, 1.0, "bf16")
    assert 0.1 * 700 < idle.watts < 0.2 * 700 and full.watts == 700 and full.low < full.watts <= full.high
    assert (
        power(h100, 300e12, 0.8, "bf16").kind == "fitted"
        and power(devices.get("k80"), 1e12, 0.5, "fp32").kind == "guessed"
    )
    assert power(replace(h100, tdp_w=None), 1e12, 0.5, "bf16") is None


def test_prices_are_given_or_known():
    assert (
        price(devices.get("h100-sxm")).source.startswith("AWS")
        and price(devices.get("h100-sxm"), 1.0).kind == "declared"
    )
    assert price(replace(devices.get("h100-sxm"), price_per_s=None)) is None
