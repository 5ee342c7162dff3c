"""The communication engine: one order on all ranks, no hang, failures that name what failed."""

import os
from pathlib import Path

import pytest

from paceline.train.launch import run

HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.parametrize("world", [2, 3])
def test_same_order_on_all_ranks_whatever_the_timing(world):
    orders = run("workers:ordered", world=world, environment=HERE, timeout_s=150)
    assert len(set(orders)) == 1
    assert orders[0].startswith("120:")


def test_a_rank_that_hangs_is_named_with_operation_and_parameter():
    first, _ = run("workers:stalls", world=2, arguments={"how": "hangs"}, environment=HERE, timeout_s=150)
    assert (
        first
        == "RunError: rank 0 of 2: all-reduce of conv1.weight (4 kB) has waited 2 s for the other ranks; no"
        " sign of rank 1"
    )


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_closing_gives_back_threads_and_sockets():
    arguments = {"rounds": 30, "strategies": ["terngrad", "overlap"]}
    for found in run(
        "workers:opened_and_closed", world=2, arguments=arguments, environment=HERE, timeout_s=200
    ):
        assert found["steps"]
        threads, files = zip(*found["held"], strict=True)
        assert max(threads) == threads[0] and max(files) == files[0], found["held"]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
@pytest.mark.parametrize(
    ("world", "rounds", "plans"),
    [
        (2, 8, ["fsdp fp32", "tp=2 fp32", "pp=2 1f1b mbs=2 gbs=8 fp32"]),
        (
            4,
            4,
            [
                "hsdp shard=2 fp32",
                "fsdp tp=2 fp32",
                "pp=2 fsdp 1f1b mbs=2 gbs=8 fp32",
                "pp=2 tp=2 vpp=2 interleaved mbs=4 gbs=8 fp32",
            ],
        ),
    ],
)
def test_closing_makes_split_models_whole_and_gives_their_groups_back(world, rounds, plans):
    arguments = {"rounds": rounds, "plans": plans}
    for found in run(
        "workers:split_and_whole", world=world, arguments=arguments, environment=HERE, timeout_s=280
    ):
        threads, files = zip(*found["held"], strict=True)
        assert max(threads) == threads[0] and max(files) == files[0], found["held"]
        for one in found["found"]:
            assert one["plain"] and one["state"] and one["kinds"] and not one["hooks"], one
            if one["losses"] is None:
                assert one["said"] == "this pipeline was closed; make another one"
            else:  # momentum and weights are those of one process after two steps
                assert one["losses"] == pytest.approx(found["alone"], rel=2e-3), one


@pytest.mark.parametrize(
    ("how", "strategy", "said"),
    [
        ("hangs", "allreduce", None),
        ("hangs", "overlap", "all-gather of state of"),
        ("busy", "overlap", "all-to-all"),
        ("dies", "allreduce", None),
        ("dies", "overlap", "all-gather of state of"),
    ],
)
def test_a_rank_that_is_gone_does_not_hold_up_the_others_close(how, strategy, said):
    first, _ = run(
        "workers:closes_without",
        world=2,
        arguments={"how": how, "strategy": strategy},
        environment=HERE,
        timeout_s=250,
    )
    # its limit is 6 s, and 2 for a time-out's own message; the other rank would keep it for 90
    assert first["seconds"] < 40, first
    assert not any("/" in line for line in first["said"])  # no places in a backend's source
    if said is None:
        assert not first["said"]
    else:
        assert first["said"] and all(said in line for line in first["said"])
