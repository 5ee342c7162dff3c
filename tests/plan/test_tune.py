"""The best plans run for real, and what that teaches."""

import dataclasses
import json
import math
import textwrap

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from paceline import cli
from paceline.bench import tune
from paceline.bench.real import build
from paceline.catalog import clusters
from paceline.errors import SpecError
from paceline.plan.general import Captured
from paceline.plan.request import Request
from paceline.predict import simulated
from paceline.spec.plan import Plan
from paceline.spec.planned import Question

PLANS = [Plan.parse(f"{words} mbs=8 gbs=16 fp32") for words in ("ddp", "fsdp")]


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    path = tmp_path_factory.mktemp("net") / "net.py"
    path.write_text(
        textwrap.dedent("""
        import torch
        from torch import nn

        def build(batch=8):
            net = nn.Sequential(
                nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
            )
            return net, torch.randn(batch, 64)
    """)
    )
    return f"{path}:build"


def test_a_described_model_is_allocated_and_learns(net):
    module, forward, optimizer = build(net, 8, {"optimizer": "sgd"})
    assert not any(p.is_meta for p in module.parameters())
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = forward(module)
        loss.backward()
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_both_factors_are_found_again(net):
    where, captured = clusters.get("2x1xhaswell-cori@100Mb/s"), Captured(net, {})
    slower = tune.calibrated(where, 3.0, 0.5)
    truth = tune.MeasuredPlans(
        steps={plan: simulated.predict(captured.get(plan), slower, plan).step_s for plan in PLANS},
        alone={(8, "none"): tune.predict(captured.get(PLANS[0]), slower.device).step_s},
        refused={},
    )
    compute, network = tune.factors(captured, where, truth)
    assert compute == pytest.approx(3.0, rel=0.01) and network == pytest.approx(0.5, rel=0.05)
    # a plan that runs in another way than it is predicted does not move the factor that the others agree on
    odd = Plan.parse("ddp overlap mbs=8 gbs=16 fp32")
    steps = {**truth.steps, odd: 0.1 * simulated.predict(captured.get(odd), slower, odd).step_s}
    assert tune.factors(captured, where, dataclasses.replace(truth, steps=steps))[1] == pytest.approx(
        0.5, rel=0.05
    )


def test_what_ran_is_worth_what_it_took(net):
    where, captured = clusters.get("2x1xhaswell-cori@100Mb/s"), Captured(net, {})
    found = tune.plan_module(captured, Request(where=(where,), gbs=16, top=100)).top
    best, second = found[0], found[1]
    truth = tune.MeasuredPlans(steps={best.plan: 3 * best.prediction.step_s}, alone={}, refused={})
    ranked = tune._ranked(found, truth, {best.plan: 1.0})
    assert (
        ranked[0].plan == best.plan
        and ranked[0].value == pytest.approx(3 * best.value)
        and ranked[0].first_s == 1.0
    )
    truth = dataclasses.replace(truth, steps={**truth.steps, second.plan: 0.5 * second.prediction.step_s})
    assert tune._ranked(found, truth, {})[0].plan == second.plan


def test_plans_run_here(net, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(
            [
                "plan",
                net,
                "--cluster",
                "2xhaswell-cori",
                "--gbs",
                "16",
                "--fix",
                "mbs=8",
                "--forbid",
                "zero1",
                "zero2",
                "fsdp",
                "--measure",
                "3",
                "--json",
            ]
        )
    answer = json.loads(capsys.readouterr().out)
    assert stop.value.code == 0 and answer["calibration"].keys() == {"compute", "communication"}
    assert all(value > 0 and math.isfinite(value) for value in answer["calibration"].values())
    ran = [one for one in answer["top"] if one["measured_s"] is not None]
    assert len(ran) == 3 and all(one["measured_s"] > 0 and one["first_s"] > 0 for one in ran)
    assert [one["value"] for one in answer["top"]] == sorted(one["value"] for one in answer["top"])


@pytest.mark.parametrize(
    ("model", "cluster", "count", "message"),
    [
        ("gpt3-1.3b", "2xhaswell-cori", 1, "is known by its sizes; give FILE.py:FUNCTION"),
        ("alexnet", "1xdgx-a100", 1, "has a100-sxm-80gb"),
        ("alexnet", "64xhaswell-cori", 1, "2 to 16 ranks"),
        ("alexnet", "2xhaswell-cori", 0, "at least 1; got 0"),
        ("alexnet", None, 1, "at hand"),
    ],
)
def test_what_cannot_be_measured(model, cluster, count, message):
    with pytest.raises(SpecError, match=message):
        tune.tune(Question(model=model, cluster=cluster), count)
