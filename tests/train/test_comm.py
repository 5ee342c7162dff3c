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


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_closing_gives_back_threads_and_sockets():
    arguments = {"rounds": 30, "strategies": ["terngrad", "overlap"]}
    for found in run("workers:opened_and_closed", world=2, arguments=arguments, environment=HERE, timeout_s=200):
        assert found["steps"]
        threads, files = zip(*found["held"], strict=True)
        assert max(threads[1:]) <= threads[0] + 1 and max(files[1:]) <= files[0] + 1, found["held"]  # one more, for a moment


@pytest.mark.parametrize(("how", "strategy", "said"), [
    ("hangs", "allreduce", None), ("hangs", "overlap", "all-gather of state of"), ("busy", "overlap", "all-to-all"), ("dies", "allreduce", None),
    ("dies", "overlap", "all-gather of state of"),
])
def test_a_rank_that_is_gone_does_not_hold_up_the_others_close(how, strategy, said):
    first, _ = run("workers:closes_without", world=2, arguments={"how": how, "strategy": strategy}, environment=HERE, timeout_s=60)
    assert first["seconds"] < 7, first  # its limit is 2 s; the first two of the time-out's own message
    assert not any("/" in line for line in first["said"])  # no places in a backend's source
    if said is None:
        assert not first["said"]
    else:
        assert first["said"] and all(said in line for line in first["said"])
