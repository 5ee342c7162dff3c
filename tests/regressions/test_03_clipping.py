"""What reads or changes `p.grad` between `backward()` and `step()`: as under all-reduce, or refused."""

import os
from pathlib import Path

import pytest

from paceline.train.launch import run

HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
PLANS = [
    ("overlap", {"fc": "gradient"}),
    ("overlap", {"fc": "rows"}),
    ("overlap", {"fc": "factors"}),
    ("priority", {}),
]


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_are_there_for_whoever_looks(world):
    plans = PLANS if world == 2 else PLANS[:1]
    ranks = run("workers_03:against", world=world, arguments={"plans": plans}, environment=HERE, timeout_s=99)
    for rank in ranks:
        for what, (said, values) in rank.items():
            assert said < 1e-4 and values < 3e-6, (what, said, values)


def test_lazy_refuses_in_the_first_step():
    for rank in run("workers_03:lazily_all", world=2, environment=HERE, timeout_s=100):
        for said in rank.values():
            assert said.startswith("RunError: lazy adds gradients"), said
            assert "clip_norm=" in said and "\n" not in said


def test_a_rank_that_reads_alone_is_told():
    first, _ = run("workers_03:alone", world=2, environment=HERE, timeout_s=100)
    assert first.startswith("RunError: rank 0 of 2 reads or changes p.grad") and "\n" not in first
