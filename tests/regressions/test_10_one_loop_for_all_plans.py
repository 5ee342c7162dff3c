"""A loop is written once: `pt.of(model)` has the same calls for all plans, `Scaler` those of `GradScaler`."""

import os
from pathlib import Path

import pytest
import torch

import paceline.train as pt
from paceline.errors import RunError
from paceline.train.launch import run

HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
TOGETHER = [
    "ddp",
    "allreduce",
    "overlap",
    "priority",
    "terngrad",
    "local",
    "post-local",
    "diloco",
    "auto",
    "fsdp fp32",
]
#: each is a run of its own
APART = ["ps-async", "ps-sync", "easgd", "gossip", "hogwild"]
SCALED = [
    ("overlap", {"fc": "gradient"}),
    ("overlap", {"fc": "rows"}),
    ("priority", {}),
    ("allreduce", {}),
    ("ddp", {}),
]
KEYS = ["param_groups", "state"]


def check_portable(name, ranks):
    for rank in ranks:
        assert rank["finite"] and rank["state"] == KEYS and rank["after"] == "SpecError", (name, rank)


@pytest.fixture(scope="module")
def found():
    """What two ranks found; one start of Python for all of it."""
    calls = {plan: ("portable", {"plan": plan, "options": {}}) for plan in TOGETHER}
    for plan, options in SCALED:
        for how in ("torch", "unscaled", "plain"):
            arguments = {"plan": plan, "options": options, "how": how}
            calls[f"{plan} {options} {how}"] = ("scaled", arguments)
    arguments = {"calls": list(calls.values())}
    ranks = run("workers_10:several", world=2, arguments=arguments, environment=HERE, timeout_s=99)
    return dict(zip(calls, zip(*ranks, strict=True), strict=True))


@pytest.mark.parametrize("plan", TOGETHER)
def test_every_plan_has_the_calls_of_a_strategy(found, plan):
    check_portable(plan, found[plan])
    assert all(rank["learns"] for rank in found[plan])


@pytest.mark.parametrize("plan", APART)
def test_those_that_do_not_wait_have_them_too(plan):
    check_portable(
        plan,
        run(
            "workers_10:portable",
            world=2,
            arguments={"plan": plan, "options": {}},
            environment=HERE,
            timeout_s=99,
        ),
    )


@pytest.mark.parametrize(("plan", "options"), SCALED)
def test_a_scaler_does_what_that_of_torch_does(found, plan, options):
    expected = found["ddp {} torch"][0]
    for how in ("torch", "unscaled", "plain"):
        for scale, same, values in found[f"{plan} {options} {how}"]:
            assert scale == 32 and same
            if how != "plain":
                assert values == pytest.approx(expected[2], abs=1e-5)


def test_the_scale_changes_once_for_several_optimizers():
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizers = [torch.optim.SGD([p], lr=0.5) for p in (first, second)]
    scaler = pt.Scaler(8.0, growth=1)
    scaler.scale((first * second).sum()).backward()
    assert all(scaler.step(optimizer) for optimizer in optimizers) and scaler.get_scale() == 8
    scaler.update()
    assert scaler.get_scale() == 16 and first.tolist() == second.tolist() == [0.5, 0.5]
    for optimizer in optimizers:
        optimizer.zero_grad()
    scaler.scale((first * float("inf")).sum() + second.sum()).backward()
    assert [scaler.step(optimizer) for optimizer in optimizers] == [False, True]
    scaler.update()
    assert scaler.get_scale() == 8 and scaler.skipped == 1
    other = pt.Scaler()
    other.load_state_dict(scaler.state_dict())
    assert other.get_scale() == 8 and other.skipped == 1
    scaler.unscale_(optimizers[0])
    with pytest.raises(RunError, match="called twice"):
        scaler.unscale_(optimizers[0])
