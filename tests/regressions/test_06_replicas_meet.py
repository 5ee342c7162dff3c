"""Replicas that drift apart are one call away from being one model, after any step; `close` leaves it."""

import os
from pathlib import Path

import pytest

from paceline.train.launch import run

HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
PLANS = [
    ("local", {"period": 4}, 6),
    ("post-local", {"period": 4, "after": 2}, 5),
    ("diloco", {"period": 4}, 6),
]


@pytest.fixture(scope="module")
def found():
    """What two ranks found; one start of Python for all of it."""
    calls = [
        ("drifted", {"plan": plan, "options": options, "steps": steps}) for plan, options, steps in PLANS
    ]
    calls += [("left_over", {}), ("alone", {})]
    ranks = run("workers_06:several", world=2, arguments={"calls": calls}, environment=HERE, timeout_s=99)
    return list(zip(*ranks, strict=True))


@pytest.mark.parametrize("at", range(len(PLANS)))
def test_replicas_are_averaged_by_synchronize_and_by_close(found, at):
    for rank in found[at]:
        assert rank == {"apart": True, "synchronize": True, "once": True, "goes on": True, "close": True}


def test_close_applies_what_lazy_has_added_up(found):
    for held, all_of_it, same in found[len(PLANS)]:
        assert held == pytest.approx(5) and all_of_it == pytest.approx(7) and same


def test_one_rank_that_averages_alone_is_told(found):
    for said in found[-1]:
        assert said.startswith("RunError: rank ") and "after step 2 of one rank and step 4 of another" in said
