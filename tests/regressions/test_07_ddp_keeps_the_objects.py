"""`plan="ddp"` returns the objects that were passed; torch's DDP is underneath, and `close` ends it."""

import os
from pathlib import Path

import pytest

from paceline.train.launch import run

HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
#: those with "=" go as `Plan` objects
PLANS = [
    "ddp",
    "ddp:find_unused_parameters=true",
    "allreduce",
    "=ddp fp32",
    "=ddp overlap fp32",
    "=zero1 fp32",
]


@pytest.fixture(scope="module")
def found():
    """What two ranks found; one start of Python for all of it."""
    calls = [*(("objects", {"plan": plan}) for plan in PLANS), ("by_part", {})]
    ranks = run("workers_07:several", world=2, arguments={"calls": calls}, environment=HERE, timeout_s=99)
    return list(zip(*ranks, strict=True))


@pytest.mark.parametrize("plan", PLANS)
def test_the_objects_stay(found, plan):
    for rank in found[PLANS.index(plan)]:
        assert rank.pop("apart") < 1e-5
        assert all(rank.values()), rank


def test_gradients_that_ddp_never_saw_are_refused(found):
    for said in found[-1]:
        assert said.startswith("RunError: there are gradients, but no forward pass went through the model")
        assert "allreduce" in said
