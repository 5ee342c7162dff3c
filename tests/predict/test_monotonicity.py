"""More bandwidth or a faster device never makes a step slower: random plans, clusters and modules.

The one exception is contention. What runs beside computation slows it down, so that a collective that moves,
because something else became faster, may slow down more of it; and collectives that meet share their links.
Without contention the bound is exact, with it a few per cent.
"""

import random
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.bench.agreement import random_plan
from paceline.catalog import clusters, frameworks, transformers
from paceline.errors import PlanError
from paceline.predict import distributed, parallel, simulated
from paceline.predict.step import Conditions
from paceline.spec import synchronisation as synchronisations
from paceline.spec.plan import Plan
from paceline.spec.schedules import SCHEDULES

#: what contention may cost
EXCEPTION = 0.05
CLUSTERS = (
    "2xdgx-h100",
    "4xdgx-a100",
    "8x4xa100-sxm-80gb@100Gb/s/node",
    "2xp4d",
    "2xdgx-b200",
    "selene",
    "8xperlmutter-a100",
    "4xdgx-1-v100",
)
MODELS = ("gpt3-1.3b", "llama3-8b", "mixtral-8x7b")


def _faster(tier, factor):
    node = tier.node_bandwidth_Bps
    return replace(
        tier, bandwidth_Bps=factor * tier.bandwidth_Bps, node_bandwidth_Bps=factor * node if node else None
    )


def faster(cluster, what, factor):
    """The cluster with links or devices that are faster by a factor; a device's power limit goes with its
    peak.
    """
    if what in ("network", "links", "all links"):
        keep = {
            "network": lambda t: t.network,
            "links": lambda t: not t.network,
            "all links": lambda t: True,
        }[what]
        return replace(cluster, tiers=tuple(_faster(t, factor) if keep(t) else t for t in cluster.tiers))
    device = cluster.device
    if what == "memory":
        return replace(
            cluster, device=replace(device, memory_bandwidth_Bps=factor * device.memory_bandwidth_Bps)
        )
    peaks = {dtype: factor * peak for dtype, peak in device.peak_flops.items()}
    clock = factor * device.clock_hz if device.clock_hz else None
    return replace(
        cluster,
        device=replace(
            device, peak_flops=peaks, clock_hz=clock, tdp_w=factor * device.tdp_w if device.tdp_w else None
        ),
    )


WHAT = st.sampled_from(["network", "links", "all links", "memory", "peak"])


@settings(max_examples=80)
@given(
    st.integers(0, 10**6),
    st.sampled_from(CLUSTERS),
    st.sampled_from(MODELS),
    WHAT,
    st.sampled_from([1.1, 1.7, 4.0]),
)
def test_transformers_without_contention(seed, name, model, what, factor):
    """Closed form and simulation; no collective slows down what runs beside it, and none meets another on a
    link.

    Where the host sets the pace, faster weight gradients leave a zero-bubble schedule less to fill its gaps
    with: a step may grow by a little.
    """
    cluster, sized = clusters.get(name), transformers.get(model)
    draw = random.Random(seed)
    try:
        plan = random_plan(draw, cluster.device_count, bool(sized.experts))
        usual = distributed.default_framework(plan, cluster.device)
        style = replace(frameworks.get(plan.framework or usual), contention=0.0)
        before = distributed.predict(sized, cluster, plan, framework=style)
    except PlanError:
        assume(False)
    better = faster(cluster, what, factor)
    slack = 1e-2 if any(order.splits and name in before.plan for name, order in SCHEDULES.items()) else 1e-5
    assert distributed.predict(sized, better, plan, framework=style).step_s <= before.step_s * (1 + slack)


@settings(max_examples=40)
@given(
    st.integers(0, 10**6),
    st.sampled_from(CLUSTERS),
    st.sampled_from(MODELS),
    WHAT,
    st.sampled_from([1.1, 1.7, 4.0]),
)
def test_transformers_with_contention(seed, name, model, what, factor):
    cluster, sized = clusters.get(name), transformers.get(model)
    try:
        plan = random_plan(random.Random(seed), cluster.device_count, bool(sized.experts))
        before = simulated.predict(sized, cluster, plan)
    except PlanError:
        assume(False)
    assert simulated.predict(sized, faster(cluster, what, factor), plan).step_s <= before.step_s * (
        1 + EXCEPTION
    )


@cache
def captured(model):
    pytest.importorskip("torch", reason="capture needs torch")
    import paceline as pl

    return pl.capture(
        model,
        **{
            "resnet18": {"batch": 8, "image": 64},
            "gpt2-124m": {"batch": 2, "seq": 128, "precision": "amp_fp16"},
        }[model],
    )


@settings(max_examples=40)
@given(
    st.sampled_from(["resnet18", "gpt2-124m"]),
    st.sampled_from(["ddp", "zero1", "fsdp", "pp=4", "pp=2 zero1", "pp=4 zb-v", "pp=2 fsdp"]),
    st.sampled_from(["2xdgx-h100", "4xp100-node-10gbe", "2xdgx-1-v100"]),
    WHAT,
    st.sampled_from([1.1, 1.7, 4.0]),
    st.integers(1, 2),
)
def test_captured_modules(model, words, name, what, factor, rounds):
    workload, cluster = captured(model), clusters.get(name)
    plan = Plan.parse(words)
    plan = replace(plan, gbs=workload.batch * cluster.device_count // plan.pp * 8 * rounds)
    style = replace(synchronisations.get("ddp"), contention=0.0)
    better = faster(cluster, what, factor)
    before, after = (
        parallel.predict(workload, c, plan, conditions=Conditions(exchange=style)).step_s
        for c in (cluster, better)
    )
    # a module is cut into stages of like duration on the device at hand: a faster one may be cut elsewhere
    assert after <= before * (1 + (EXCEPTION if plan.pp > 1 else 1e-6))
    assert parallel.predict(workload, better, plan).step_s <= parallel.predict(
        workload, cluster, plan
    ).step_s * (1 + EXCEPTION)
