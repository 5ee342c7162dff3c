"""A run that goes on from its checkpoint ends with the bits of one that was never interrupted."""

import os
from pathlib import Path

import pytest

from paceline.train.launch import run

HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
SMALL = {"least_bytes": 4000, "most_bytes": 20000}


def gone_on(folder, world, runs):
    """Of each run, and each of its ranks, two ends: left alone, and from the checkpoint on."""
    ranks = run(
        "workers:interrupted_all",
        world=world,
        arguments={"folder": str(folder), "runs": runs},
        environment=HERE,
        timeout_s=280,
    )
    for i, one in enumerate(runs):
        for end in range(2):
            apart = one["strategy"] in ("local", "post-local", "diloco")  # each has momentum of its own
            assert len({rank[i][end]["bits"] for rank in ranks}) == (world if apart else 1), one
    return [[rank[i] for rank in ranks] for i in range(len(runs))]


@pytest.mark.parametrize("world", [2, 3])
def test_sums_keep_their_order_over_a_restart(tmp_path, world):
    runs = [
        {"strategy": "overlap"},
        {"strategy": "overlap", "optimizer": "adam", "options": {"clip_norm": 0.5}},
        {"strategy": "overlap", "options": {**SMALL, "fc": "rows"}},
        {"strategy": "overlap", "options": {"fc": "factors"}, "kind": "cnn"},
        {"strategy": "overlap", "options": {**SMALL, "fc": "gradient"}, "optimizer": "lars"},
        {"strategy": "overlap", "kind": "tied"},
        {"strategy": "priority", "options": SMALL, "optimizer": "adam"},
        {"strategy": "priority", "kind": "tied"},
        {"strategy": "lazy", "options": {**SMALL, "share": 0.6, "interval": 3}, "at": 3},
        {"strategy": "lazy", "options": {**SMALL, "adapt": False}},
        {"strategy": "allreduce", "options": {"bucket_bytes": 30000}, "kind": "tied"},
        {"strategy": "terngrad"},
        {"strategy": "dgc:ratio=0.1"},
        {"strategy": "local", "options": {"period": 3}},
        {"strategy": "post-local", "options": {"period": 3, "after": 3}},
        {"strategy": "diloco", "options": {"period": 3}},
    ]
    for request, ranks in zip(runs, gone_on(tmp_path, world, runs), strict=True):
        for whole, again in ranks:
            assert again["start"] and again["found"], request
            assert again["bits"] == whole["bits"], request
            assert again["arranged"] == whole["arranged"], request


def test_what_is_asked_for_now_counts(tmp_path):
    """Other options, or a larger batch, in the run that goes on."""
    runs = [
        {"strategy": "overlap", "options": {"fc": "factors"}, "options_then": {"fc": "gradient"}},
        {"strategy": "overlap", "options": {"fc": "factors"}, "size_then": 12},
        {"strategy": "overlap", "options": {"fc": "rows"}, "size_then": 6},
    ]
    (_, asked), (before, larger), (_, smaller) = (ranks[0] for ranks in gone_on(tmp_path, 2, runs))
    assert not asked["found"] and asked["arranged"] == []
    assert {rows for _, rows in before["arranged"]} == {8}
    assert larger["found"] and {rows for _, rows in larger["arranged"]} == {12}
    assert smaller["found"] and {rows for _, rows in smaller["arranged"]} == {8}
    assert asked["finite"] and larger["finite"] and smaller["finite"]
