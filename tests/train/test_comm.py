"""The communication engine: one order on all ranks, no hang, failures that name what failed."""

from pathlib import Path

import pytest

from paceline.train.launch import run

HERE = {"PYTHONPATH": str(Path(__file__).parent)}


@pytest.mark.parametrize("world", [2, 3])
def test_same_order_on_all_ranks_whatever_the_timing(world):
    orders = run("workers:ordered", world=world, environment=HERE, timeout_s=60)
    assert len(set(orders)) == 1
    assert orders[0].startswith("120:")


def test_a_rank_that_hangs_is_named_with_operation_and_parameter():
    first, _ = run("workers:stalls", world=2, arguments={"how": "hangs"}, environment=HERE, timeout_s=60)
    assert first == "RunError: rank 0 of 2: all-reduce of conv1.weight (4 kB) has waited 2 s for the other ranks; no sign of rank 1"
