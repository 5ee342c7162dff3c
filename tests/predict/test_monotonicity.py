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

from paceline.catalog import clusters, frameworks, transformers
from paceline.errors import PlanError
from paceline.predict import simulated
from paceline.predict.distributed import default_framework
from paceline.predict.step import Conditions
from paceline.spec import synchronisation as synchronisations
from paceline.spec.plan import Plan
from paceline.spec.schedules import SCHEDULES
from paceline.spec.vocabulary import Precision, Recompute, Sharding

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


_ANY = (1, 1, 2, 4, 8, 16)
#: shardings of plans with and without a pipeline
_PIPELINED = (Sharding.DDP, Sharding.ZERO1, Sharding.ZERO2)
_UNPIPELINED = (Sharding.DDP, Sharding.ZERO1, Sharding.FSDP, Sharding.FSDP, Sharding.HSDP)


def random_plan(draw: random.Random, devices: int, experts: bool) -> Plan:
    """A plan for so many devices; PlanError where its degrees need more. It may still not be one that a model
    can run.
    """
    tp, pp, cp = draw.choice((1, 1, 2, 4, 8)), draw.choice(_ANY), draw.choice((1, 1, 1, 2))
    dp = devices // (tp * pp * cp)
    if not dp:
        raise PlanError("more ranks than devices")
    schedule = (
        draw.choice(("1f1b", "1f1b", "interleaved", "gpipe", "zb-h1", "zb-v", "dualpipev", "looped-bfs"))
        if pp > 1
        else ""
    )
    vpp = draw.choice((2, 4)) if schedule in ("interleaved", "looped-bfs") else 1
    mbs = draw.choice((1, 1, 2, 4))
    micro_batches = (
        draw.choice((pp // 2, pp, 2 * pp, 2 * pp + 1, 4 * pp)) if pp > 1 else draw.choice((1, 2, 8))
    )
    sharding = Sharding.NONE
    if dp * cp > 1:
        sharding = draw.choice(_PIPELINED if pp > 1 else _UNPIPELINED)
    return Plan(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=draw.choice((1, 2, 4, 8)) if experts else 1,
        vpp=vpp,
        mbs=mbs,
        gbs=dp * mbs * micro_batches,
        seq=draw.choice((2048, 4096)),
        sharding=sharding,
        sp=tp > 1 and draw.random() < 0.5,
        schedule=schedule,
        recompute=draw.choice(tuple(Recompute)),
        precision=draw.choice((Precision.BF16, Precision.BF16, Precision.FP8)),
        framework=draw.choice(("", "", "megatron-2022", "nemo", "torch", "jax")),
    )


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
    """No collective slows down what runs beside it.

    Where the host sets the pace, faster weight gradients leave a zero-bubble schedule less to fill its gaps
    with: a step may grow by a little.
    """
    cluster, sized = clusters.get(name), transformers.get(model)
    draw = random.Random(seed)
    try:
        plan = random_plan(draw, cluster.device_count, bool(sized.experts))
        usual = default_framework(plan, cluster.device)
        style = replace(frameworks.get(plan.framework or usual), contention=0.0)
        before = simulated.predict(sized, cluster, plan, Conditions(framework=style))
    except PlanError:
        assume(False)
    better = faster(cluster, what, factor)
    slack = 1e-2 if any(order.splits and name in before.plan for name, order in SCHEDULES.items()) else 1e-5
    assert simulated.predict(sized, better, plan, Conditions(framework=style)).step_s <= before.step_s * (
        1 + slack
    )


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
        simulated.predict(workload, c, plan, Conditions(exchange=style)).step_s for c in (cluster, better)
    )
    # a module is cut into stages of like duration on the device at hand: a faster one may be cut elsewhere
    assert after <= before * (1 + (EXCEPTION if plan.pp > 1 else 1e-6))
    assert simulated.predict(workload, better, plan).step_s <= simulated.predict(
        workload, cluster, plan
    ).step_s * (1 + EXCEPTION)
