"""Captured modules as pipelines: nothing is lost between chunks, and limits that are known."""

from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

pytest.importorskip("torch", reason="capture needs torch")

import paceline as pl
from paceline.catalog import clusters
from paceline.predict.captured import Module
from paceline.predict.captured_memory import activations, live
from paceline.predict.captured_work import CapturedRanks
from paceline.predict.simulated import asked, predict
from paceline.predict.step import predict as predict_one
from paceline.spec.plan import SCHEDULES, Plan

CASES = {
    "cnn": ("resnet50", {"batch": 8, "image": 64, "optimizer": "sgd"}),
    "lm": ("gpt2-124m", {"batch": 4, "seq": 128, "precision": "amp_bf16"}),
}
CLUSTER = clusters.get("2xdgx-h100")


@cache
def captured(case):
    model, options = CASES[case]
    return pl.capture(model, **options)


def pipeline(case, words) -> Module:
    return asked(captured(case), CLUSTER, Plan.parse(words))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("words", ["pp=2", "pp=8", "pp=4 vpp=2"])
def test_chunks_are_the_whole_model(case, words):
    """One micro-batch: no sums of accumulated gradients yet."""
    made, workload = pipeline(case, words), captured(case)
    made = replace(made, plan=replace(made.plan, gbs=made.plan.dp * workload.batch))
    step = made.timed.step
    update = made.layout.update
    pieces = [piece for passed in CapturedRanks(made).work().passes.values() for piece in passed.pieces]
    assert sum(piece.seconds for piece in pieces) == pytest.approx(step.device[:update].sum())
    assert sum(piece.host_s for piece in pieces) == pytest.approx(step.issue[:update].sum())
    assert sum(made.parameter_bytes) == sum(p.bytes for p in workload.parameters)
    assert sum(activations(made)) == pytest.approx(1) and made.chunks[-1].sends == 0
    assert all(chunk.sends > 0 for chunk in made.chunks[:-1])
    copies = 2 * made.style.copies * sum(made.gradient_bytes) / made.timed.chip.bandwidth
    assert sum(role.update[-1].seconds for role in CapturedRanks(made).work().roles) == pytest.approx(
        step.device[update:].sum() + copies
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "words",
    [
        *(f"pp=4 {s} gbs={{}}" + (" vpp=2" if s in ("interleaved", "looped-bfs") else "") for s in SCHEDULES),
        "pp=4 zero1 gbs={}",
        "pp=4 fsdp gbs={}",
        "pp=4 hsdp shard=2 no-reshard gbs={}",
        "pp=16 gbs={}",
    ],
)
def test_parts_add_up(case, words):
    workload = captured(case)
    p = predict(workload, CLUSTER, Plan.parse(words.format(64 * workload.batch)), trace=True)
    assert sum(part.seconds for part in p.breakdown) == pytest.approx(p.step_s)
    assert (
        p.devices == 16
        and len(p.stages) == int(words.split()[0][3:])
        and 0 < p.mfu <= p.hfu < 1
        and p.to_dict()["stages"]
    )
    lanes = defaultdict(list)
    for span in p.timeline.spans:
        assert 0 <= span.start_s <= span.end_s <= p.step_s + 1e-9
        lanes[span.rank, span.stream].append(span)
    assert {rank for rank, _ in lanes} == set(range(len(p.stages)))
    for lane in lanes.values():
        assert all(b.start_s >= a.end_s - 1e-9 for a, b in pairwise(lane))


def test_a_pipeline_of_one_node_is_about_as_fast_as_its_share():
    """With many micro-batches and NVLink between stages, four stages take a quarter of the time and what
    imbalance and bubble add.
    """
    workload, node = captured("lm"), clusters.get("4xh100-sxm")
    one = predict_one(workload, node.device)
    many = predict(workload, node, Plan.parse(f"pp=4 gbs={64 * workload.batch}"))
    assert one.kernel_s * 64 / 4 * 0.8 < many.step_s < one.step_s * 64 / 2
    assert (
        many.bubble_s < 0.3 * many.step_s
        and max(stage.memory.peak_bytes for stage in many.stages) < one.peak_bytes * 4
    )


def test_schedules_hold_what_they_hold():
    """GPipe keeps every micro-batch, 1F1B as many as there are stages behind."""
    gpipe, other = (pipeline("lm", f"pp=4 {word} gbs={64 * 4}") for word in ("gpipe", "1f1b"))
    assert gpipe.plan.micro_batches == 16
    for rank in range(4):
        assert live(gpipe, rank) == pytest.approx(16 * activations(gpipe)[rank])
        assert live(other, rank) == pytest.approx((4 - rank) * activations(other)[rank])


def test_trace_of_one_rank():
    workload = captured("cnn")
    for words in ("ddp", "fsdp", f"zero1 gbs={16 * 8 * 2}"):
        p = predict(workload, CLUSTER, Plan.parse(words), trace=True)
        names = {span.name for span in p.timeline.spans if span.stream in ("dp", "shard")}
        assert names == {"ddp": {"ncclDevKernel_AllReduce"}}.get(
            words, {"ncclDevKernel_ReduceScatter", "ncclDevKernel_AllGather"}
        )
        device = [span for span in p.timeline.spans if span.stream == "compute"]
        assert all(b.start_s >= a.end_s - 1e-9 for a, b in pairwise(device)) and len(device) >= sum(
            len(workload.segments[i].ops) for i in workload.order
        )
