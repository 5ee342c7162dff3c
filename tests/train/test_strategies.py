"""Strategies on real processes: replicas stay one, exact ones follow DDP, all ranks issue the same
collectives in the same order.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.train.launch import run

HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
SMALL = {"least_bytes": 4000, "most_bytes": 20000}
BUCKETS = {"bucket_bytes": 30000}
LOSSY = ("terngrad", "dgc", "powersgd", "qsgd", "signsgd", "onebit", "topk", "randomk", "fp16", "bf16")
EXACT = (
    ("allreduce", BUCKETS),
    ("overlap", {**SMALL, "fc": "gradient"}),
    ("overlap", {**SMALL, "fc": "rows"}),
    ("overlap", {"fc": "factors"}),
    ("overlap", SMALL),
    ("priority", SMALL),
    ("auto", {"loss": "none"}),
)


def trained(world, runs):
    """Results of all runs, each a list over ranks; one start of Python for all of them."""
    ranks = run("workers:follow_all", world=world, arguments={"runs": runs}, environment=HERE, timeout_s=280)
    return [[rank[i] for rank in ranks] for i in range(len(runs))]


def check_together(results, runs):
    for request, ranks in zip(runs, results, strict=True):
        assert all(rank["same"] for rank in ranks), request
        assert len({rank["order"] for rank in ranks}) == 1, request


@pytest.mark.parametrize(
    ("world", "kind", "optimizer"),
    [(2, "mlp", "sgd"), (3, "mlp", "adam"), (2, "cnn", "adam"), (4, "mlp", "sgd")],
)
def test_exact_strategies_follow_ddp(world, kind, optimizer):
    runs = [
        {"strategy": name, "options": options, "kind": kind, "optimizer": optimizer, "steps": 12}
        for name, options in ((None, {}), *EXACT)
    ]
    (ddp, *others) = trained(world, runs)
    check_together(others, runs[1:])
    for request, ranks in zip(runs[1:], others, strict=True):
        assert ranks[0]["losses"] == pytest.approx(ddp[0]["losses"], rel=2e-4, abs=2e-4), request
        if kind == "mlp":  # running statistics of batch normalisation are rank 0's under DDP, the mean here
            assert ranks[0]["values"] == pytest.approx(ddp[0]["values"], rel=1e-3, abs=2e-4), request


@pytest.mark.parametrize("optimizer", ["lars", "lamb"])
def test_layer_norms_are_those_of_whole_layers_also_where_updates_are_shared(optimizer):
    options = {"least_bytes": 4000, "most_bytes": 20000}
    runs = [
        {"strategy": name, "options": given, "optimizer": optimizer, "steps": 8}
        for name, given in (
            (None, {}),
            ("overlap", options),
            ("priority", options),
            ("overlap", {**options, "clip_norm": 1e6}),
        )
    ]
    (ddp, *others) = trained(3, runs)
    check_together(others, runs[1:])
    for request, ranks in zip(runs[1:], others, strict=True):
        assert ranks[0]["values"] == pytest.approx(ddp[0]["values"], rel=1e-3, abs=2e-5), request


def test_tied_and_unused_weights_are_never_stale():
    runs = [{"strategy": name, "options": options, "kind": "tied", "steps": 12} for name, options in EXACT]
    first, *others = trained(2, runs)
    check_together([first, *others], runs)
    for request, ranks in zip(runs[1:], others, strict=True):
        assert ranks[0]["losses"] == pytest.approx(first[0]["losses"], rel=1e-4), request


def test_gradients_add_up_without_sync():
    runs = [
        {"strategy": name, "options": options, "accumulate": 3, "steps": 6}
        for name, options in ((None, {}), *EXACT[:5])
    ]
    runs[4]["options"] = {"fc": "factors"}
    (ddp, *others) = trained(2, runs)
    for request, ranks in zip(runs[1:], others, strict=True):
        assert ranks[0]["values"] == pytest.approx(ddp[0]["values"], rel=1e-3, abs=1e-4), request


@pytest.mark.parametrize("buckets", [1, 3, 20])
def test_compressed_replicas_are_identical_after_100_steps(buckets):
    options = {"bucket_bytes": 180_000 / buckets, "first_bytes": 180_000 / buckets}
    runs = [{"strategy": name, "options": options, "steps": 100} for name in LOSSY]
    check_together(trained(2, runs), runs)


def test_relaxed_replicas_meet():
    options = {
        "local": {"period": 4},
        "post-local": {"period": 4, "after": 4},
        "diloco": {"period": 4},
        "lazy": {**SMALL, "share": 0.6},
    }
    runs = [{"strategy": name, "options": given, "steps": 12} for name, given in options.items()]
    results = trained(3, runs)
    check_together(results, runs)
    assert all(ranks[0]["losses"][-1] < 3 for ranks in results)


def test_lazy_layers_get_every_gradient_once_while_the_interval_grows():
    for counts, intervals in run(
        "workers:added_up", world=2, arguments={"steps": 14}, environment=HERE, timeout_s=150
    ):
        assert counts[0] == pytest.approx(1) and max(intervals) == 4
        sent = [
            step
            for step, (now, before) in enumerate(zip(counts, [0, *counts], strict=False), 1)
            if now > before + 0.5
        ]
        # all that came up to then
        assert [counts[step - 1] for step in sent] == pytest.approx(sent, rel=1e-3)
        assert sent == [1, 2, 4, 7, 11]


def test_the_fake_process_group_sees_the_same_collectives():
    runs = [
        {"strategy": name, "options": options, "steps": 4}
        for name, options in (
            ("allreduce", BUCKETS),
            ("overlap", {**SMALL, "fc": "gradient"}),
            ("overlap", {"fc": "rows"}),
            ("overlap", {"fc": "factors"}),
            ("local", {"period": 2}),
            ("post-local", {"period": 2, "after": 2}),
            ("diloco", {"period": 2}),
            *((name, {}) for name in LOSSY),
            # a link so slow that all gradients are ready before the first is through: then no clock decides
            # on the order
            ("priority", {**SMALL, "link_Bps": 1.0}),
            ("lazy", {**SMALL, "adapt": False}),
            # what it takes after that is one of the others, and which one is up to the link
            ("auto", {"watch": 5}),
        )
    ]
    real = [ranks[0]["order"] for ranks in trained(2, runs)]
    script = "import json, sys, workers; print(json.dumps(workers.pretend(json.loads(sys.argv[1]))))"
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(runs)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **HERE},
    )
    fake = json.loads(done.stdout.splitlines()[-1])
    for request, pretended, issued in zip(runs, fake, real, strict=True):
        assert pretended == issued, request
    assert len(set(real[-3:])) == 3
