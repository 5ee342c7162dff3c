"""Any other module: every plan of its small space is tried."""

from dataclasses import replace

import pytest

import paceline as pl
from paceline.errors import PlanError
from paceline.plan.general import Captured, plan_module
from paceline.plan.request import Request


@pytest.fixture(scope="module")
def saved():
    return pl.capture("alexnet", batch=32, precision="fp32")


def test_the_best_of_all(saved):
    cluster = pl.clusters.get("2xp100-node-10gbe")
    found = plan_module(saved, Request(where=(cluster,), gbs=32 * cluster.device_count))
    assert found.gap_pct == 0 and found.by_evaluation + found.by_memory == found.space
    values = [ranked.value for ranked in found.top]
    assert values == sorted(values) and not any(ranked.lossy for ranked in found.top)
    plain = pl.predict(saved, plan="ddp", cluster=cluster)
    assert found.best.prediction.step_s <= plain.step_s * (1 + 1e-9)


def test_a_module_is_captured_once_and_searched_anew(monkeypatch):
    """On a slower cluster of the same name too."""
    cluster = pl.clusters.get("2xp100-node-10gbe")
    captured = Captured("alexnet", {})
    first = plan_module(captured, Request(where=(cluster,), gbs=64, top=99))
    monkeypatch.setattr("paceline.plan.general.capture", None)
    tiers = tuple(
        replace(
            tier,
            bandwidth_Bps=tier.bandwidth_Bps / 2,
            node_bandwidth_Bps=tier.node_bandwidth_Bps and tier.node_bandwidth_Bps / 2,
        )
        for tier in cluster.tiers
    )
    second = plan_module(captured, Request(where=(replace(cluster, tiers=tiers),), gbs=64, top=99))
    assert {ranked.plan for ranked in second.top} == {ranked.plan for ranked in first.top}
    assert second.space == first.space and second.best.value > first.best.value


def test_most_simulates_no_more_than_that(saved):
    cluster = pl.clusters.get("2xp100-node-10gbe")
    found = plan_module(saved, Request(where=(cluster,), gbs=256, most=3))
    assert found.by_evaluation == 3 and found.undecided == found.space - 3 and found.gap_pct == 100
    assert "--most simulates more of them" in found.notes[0]


def test_what_changes_training_is_marked(saved):
    cluster = pl.clusters.get("2xp100-node-10gbe")
    found = plan_module(saved, Request(where=(cluster,), gbs=32 * cluster.device_count, allow=["compress"]))
    assert found.best.lossy == "compress" and found.notes
    exact = plan_module(saved, Request(where=(cluster,), gbs=32 * cluster.device_count))
    assert found.best.value < exact.best.value


def test_refusals(saved):
    cluster = pl.clusters.get("2xp100-node-10gbe")
    with pytest.raises(PlanError, match="did you mean 'compress'"):
        plan_module(saved, Request(where=(cluster,), allow=["compres"]))
    with pytest.raises(PlanError, match="has to be a multiple of the devices"):
        plan_module(saved, Request(where=(cluster,), gbs=33))
    for words, message in ({"seq": 64}, "captured with seq None"), ({"fix": ["bf16"]}, "with precision fp32"):
        with pytest.raises(PlanError, match=message):
            plan_module(saved, Request(where=(cluster,), **words))
    with pytest.raises(PlanError, match="captured already, so that precision is fixed"):
        pl.plan(saved, cluster, precision="bf16")
