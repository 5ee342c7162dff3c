"""The simulation: its parts add up, it costs little, and overlap comes out of it."""

import time
from collections import defaultdict
from itertools import pairwise

import pytest

from paceline.catalog import clusters, transformers
from paceline.predict.distributed import TransformerStep
from paceline.predict.simulated import predict, simulation
from paceline.spec.plan import SCHEDULES, Plan, resolve
from paceline.spec.transformer import Transformer

MODEL = Transformer(name="small", layers=16, hidden=2048, heads=16, ffn=8192, vocab=51200, seq=2048)
CLUSTER = clusters.get("4xdgx-h100")


def run(text, cluster=CLUSTER, model=MODEL, **options):
    return predict(model, cluster, Plan.parse(text), **options)


@pytest.mark.parametrize(
    "plan",
    [
        "tp=8 pp=4 sp recompute=full zero1 gbs=64 mbs=1",
        "fsdp gbs=64 mbs=2",
        "tp=2 cp=2 pp=4 gbs=32 mbs=1 vpp=2 seq=8192",
        "hsdp gbs=32",
        "ddp gbs=32",
        "framework=bigscience tp=4 pp=2 fp16 gbs=64 recompute=selective",
        *(f"pp=4 gbs=64 vpp={2 if s in ('interleaved', 'looped-bfs') else 1} {s}" for s in SCHEDULES),
    ],
)
def test_parts_add_up(plan):
    p = run(plan)
    assert sum(part.seconds for part in p.breakdown) == pytest.approx(p.step_s)
    assert p.step_s_low < p.step_s < p.step_s_high and 0 < p.mfu <= p.hfu < 1 and p.timeline is None
    assert "timeline" not in p.to_dict()


def test_overlap_emerges():
    """Gradients that fit behind the backward pass cost what they slow it down by; on a slow network they cost
    all but that.
    """
    alone, fast = run("gbs=8 mbs=1", clusters.get("1xdgx-h100")), run("ddp gbs=32 mbs=1")
    assert fast.step_s - alone.step_s < 0.25 * alone.step_s
    slow = {
        part.name: part.seconds
        for part in run("ddp gbs=32 mbs=1", clusters.get("4x8xh100-sxm@10Gb/s/node")).breakdown
    }
    assert slow["gradient reduction"] > 5 * (slow["forward"] + slow["backward"])


def test_what_schedules_are_for():
    bubbles = {
        s: run(
            f"pp=4 gbs=128 mbs=1 vpp={2 if s == 'interleaved' else 1} {s}",
            model=transformers.get("llama3-8b"),
        ).bubble_s
        for s in ("1f1b", "interleaved", "zb-h1")
    }
    assert bubbles["interleaved"] < 0.7 * bubbles["1f1b"] and bubbles["zb-h1"] < 0.7 * bubbles["1f1b"]


@pytest.mark.parametrize("plan", ["pp=4 gbs=64 zero1", "fsdp gbs=32", "tp=4 pp=4 sp gbs=16"])
def test_timeline(plan):
    """Nothing overlaps on a stream; the step ends when the last span does."""
    p = run(plan, trace=True)
    lanes = defaultdict(list)
    for span in p.timeline.spans:
        assert 0 <= span.start_s <= span.end_s <= p.step_s + 1e-9
        lanes[span.rank, span.stream].append(span)
    assert p.timeline.ranks == len(p.stages) and max(
        span.end_s for span in p.timeline.spans
    ) == pytest.approx(p.step_s)
    for lane in lanes.values():
        assert all(b.start_s >= a.end_s - 1e-9 for a, b in pairwise(lane))
    events = list(p.timeline.events())
    kernels = [e for e in events if e.get("cat") == "kernel"]
    assert any(e["name"].startswith("ncclDevKernel_") for e in kernels) and all(
        e["args"]["stream"] == e["tid"] for e in kernels
    )
    assert len({(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}) == len(lanes)


def test_many_devices_cost_little():
    """Roles, not ranks, are simulated."""
    start = time.process_time()
    p = run(
        "tp=8 pp=16 vpp=7 gbs=2048 mbs=1 sp zero1 seq=8192",
        clusters.get("2048xdgx-h100"),
        transformers.get("llama3-405b"),
    )
    assert p.devices == 16384 and time.process_time() - start < 2


@pytest.mark.parametrize(
    "words",
    [
        "",
        "gpipe",
        "vpp=2",
        "vpp=2 looped-bfs",
        "zb-h1",
        "zb-v",
        "dualpipev",
        "framework=nemo vpp=4",
        "framework=torch-compile zb-h1",
        "zero1",
        "fsdp",
    ],
)
def test_rounds_of_micro_batches_are_alike(words):
    """What is left out where there are many micro-batches is more of the same, to the last digits."""
    plan = resolve(
        Plan.parse(f"pp=4 tp=2 gbs={160 if 'vpp' in words or 'zb-h1' in words else 168} mbs=1 {words}"),
        CLUSTER.device_count,
        MODEL,
    )
    assert plan.micro_batches >= 40
    simulated = simulation(TransformerStep.of(MODEL, CLUSTER, plan, None, None))
    short, whole = (
        {name: seconds for name, seconds in found.items() if seconds > 1e-12}  # less is rounding
        for found in (simulated.parts(), simulated.spent(simulated.freest()))
    )
    assert short == pytest.approx(whole, rel=1e-6, abs=1e-9)


def test_sixty_four_devices_cost_less():
    start = time.process_time()
    for plan in ("tp=8 pp=8 gbs=4096 mbs=1 sp", "tp=8 pp=8 gbs=2048 mbs=1 vpp=2", "fsdp gbs=512"):
        run(plan, clusters.get("8xdgx-h100"), transformers.get("llama3-70b"))
    assert time.process_time() - start < 3 * 0.2


def test_link_shares():
    plan = resolve(Plan.parse("pp=4 gbs=32 zero1"), CLUSTER.device_count, MODEL)
    share = TransformerStep.of(MODEL, CLUSTER, plan, None, None).mesh.share
    shares = share(("dp", "pp"))
    assert all(0 < share <= 1 for share in shares) and share(("dp", "dp")) == pytest.approx([0.5, 0.5])
