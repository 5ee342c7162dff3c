"""Plans of transformers: limits, sums, and what more of something must not do."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.catalog import clusters, transformers
from paceline.errors import PlanError
from paceline.predict.simulated import predict
from paceline.spec.plan import Plan
from paceline.spec.transformer import Transformer

MODEL = Transformer(name="small", layers=24, hidden=2048, heads=16, ffn=8192, vocab=51200, seq=2048)
CLUSTER = clusters.get("8x8xh100-sxm@3200Gb/s/node")


def run(text, cluster=CLUSTER, model=MODEL):
    return predict(model, cluster, Plan.parse(text))


def test_one_device_is_the_sum_of_its_parts():
    p = run("gbs=4 mbs=1", clusters.get("1xh100-sxm"))
    assert p.exposed_s == p.bubble_s == 0 and p.devices == 1 and len(p.stages) == 1
    names = {part.name for part in p.breakdown}
    assert names <= {"forward", "backward", "optimizer", "host"}
    parts = {part.name: part.seconds for part in p.breakdown}
    stage = p.stages[0]
    assert p.step_s == pytest.approx(4 * (stage.forward_s + stage.backward_s) + parts["optimizer"])


@pytest.mark.parametrize(
    "plan",
    [
        "tp=8 pp=4 sp recompute=full zero1 gbs=64 mbs=1",
        "fsdp gbs=128 mbs=2",
        "tp=2 cp=2 pp=4 gbs=64 mbs=1 vpp=2 seq=8192",
        "hsdp gbs=64",
        "gbs=64",
        "pp=8 gpipe gbs=64",
        "pp=8 zb-h1 gbs=64 fp8",
        "framework=megatron-2021 tp=4 pp=2 fp16 gbs=64 recompute=selective",
    ],
)
def test_parts_add_up(plan):
    p = run(plan)
    assert sum(part.seconds for part in p.breakdown) == pytest.approx(p.step_s)
    assert sum(part.share for part in p.breakdown) == pytest.approx(1)
    assert p.step_s_low < p.step_s < p.step_s_high and 0 < p.mfu <= p.hfu < 1
    assert sum(stage.layers for stage in p.stages) == MODEL.layers
    for stage in p.stages:
        assert sum(stage.memory.by_kind.values()) == stage.memory.peak_bytes
    data = p.to_dict()
    assert (
        data["step_s"] == p.step_s
        and data["peak_bytes"] == p.peak_bytes
        and data["memory"]
        and data["breakdown"]
        and data["provenance"]
    )


def test_schedules_rank_as_they_should():
    bubbles = [run(f"pp=8 gbs=64 mbs=1 {word}").bubble_s for word in ("1f1b", "vpp=3", "zb-h1")]
    assert bubbles[0] > bubbles[1] and bubbles[0] > bubbles[2]
    held = [run(f"pp=8 gbs=512 mbs=1 {word}").memory.by_kind["activations"] for word in ("gpipe", "1f1b")]
    assert held[0] > held[1]


def test_sharding_saves_memory():
    kinds = ("ddp", "zero1", "zero2", "fsdp")
    peaks = [run(f"{kind} gbs=64").peak_bytes for kind in kinds]
    assert peaks == sorted(peaks, reverse=True)


def test_recomputation_trades_time_for_memory():
    none, full = run("tp=8 gbs=64 mbs=8"), run("tp=8 gbs=64 mbs=8 recompute=full")
    assert full.step_s > none.step_s and full.peak_bytes < none.peak_bytes
    assert full.hfu > full.mfu == pytest.approx(none.mfu * none.step_s / full.step_s)


def test_what_does_not_fit_is_an_answer():
    p = run("gbs=64 mbs=1", model=transformers.get("llama3-70b"))
    assert not p.fit.fits and p.fit.needed_bytes > p.fit.available_bytes


DEGREES = st.sampled_from([1, 2, 4, 8])


@given(
    tp=DEGREES,
    pp=DEGREES,
    mbs=st.sampled_from([1, 2]),
    kind=st.sampled_from(["ddp", "zero1", "fsdp"]),
    recompute=st.sampled_from(["none", "full"]),
    sp=st.booleans(),
    more=st.sampled_from(["layers", "gbs", "seq", "ffn", "vocab"]),
)
def test_more_work_takes_no_less_time(tp, pp, mbs, kind, recompute, sp, more):
    plan = Plan(
        tp=tp, pp=pp, mbs=mbs, gbs=128, seq=2048, sharding=kind, recompute=recompute, sp=sp and tp > 1
    )
    model = MODEL
    try:
        less = predict(model, CLUSTER, plan)
        if more in ("gbs", "seq"):
            plan = replace(plan, **{more: 2 * getattr(plan, more)})
        else:
            model = replace(MODEL, **{more: 2 * getattr(MODEL, more)})
        assert predict(model, CLUSTER, plan).step_s >= less.step_s
    except PlanError:
        assume(False)


@given(tp=DEGREES, pp=DEGREES, kind=st.sampled_from(["ddp", "zero1", "fsdp"]), tier=st.integers(0, 1))
def test_a_faster_network_takes_no_more_time(tp, pp, kind, tier):
    plan = Plan(tp=tp, pp=pp, gbs=128, mbs=1, sharding=kind)
    tiers = list(CLUSTER.tiers)
    wide = {
        field: 2 * value
        for field in ("bandwidth_Bps", "node_bandwidth_Bps")
        if (value := getattr(tiers[tier], field))
    }
    tiers[tier] = replace(tiers[tier], **wide)
    assert predict(MODEL, replace(CLUSTER, tiers=tuple(tiers)), plan).step_s <= predict(
        MODEL, CLUSTER, plan
    ).step_s * (1 + 1e-9)
