"""Data-parallel and sharded plans of captured modules: limits, buckets as torch makes them, memory,
contradictions.
"""

import math
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="capture needs torch")

import torch

import paceline as pl
from paceline.catalog import clusters, devices
from paceline.errors import PlanError
from paceline.predict.degrees import resolve
from paceline.predict.layout import Layout
from paceline.predict.simulated import asked, predict, simulation
from paceline.predict.step import Conditions
from paceline.predict.step import predict as predict_one
from paceline.queueing.order_statistics import slowest_normal
from paceline.sim import mesh
from paceline.sim.program import buckets
from paceline.spec.plan import Plan
from paceline.spec.synchronisation import DDP, SYNCHRONISATIONS, get

CASES = {
    "cnn": ("resnet18", {"batch": 16, "image": 64, "precision": "amp_fp16", "optimizer": "sgd"}),
    "rnn": ("lstm-650", {"batch": 4, "seq": 8}),
    "lm": ("gpt2-124m", {"batch": 4, "seq": 128, "precision": "amp_bf16"}),
    "tables": ("dlrm-small", {"batch": 64}),
    "recomputed": ("gpt2-124m", {"batch": 4, "seq": 128, "checkpointing": True}),
    "compiled": ("resnet50", {"batch": 8, "image": 64, "compile": True}),
}
cases = st.sampled_from(list(CASES))
SHARDINGS = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
NODE = clusters.get("dgx-1-v100")


@cache
def captured(case):
    model, options = CASES[case]
    return pl.capture(model, **options)


def gradients(workload):
    return sum(p.bytes for p in workload.parameters if p.ready >= 0)


# -- limits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", ["h200", "v100-sxm-16gb"])
def test_one_device_is_the_step_of_one_device(case, device):
    one, p = (
        predict_one(captured(case), devices.get(device)),
        predict(captured(case), clusters.get(f"1x{device}"), Plan()),
    )
    assert (p.step_s, p.step_s_low, p.step_s_high, p.throughput) == pytest.approx(
        (one.step_s, one.step_s_low, one.step_s_high, one.throughput)
    )
    assert p.memory == one.memory and p.exposed_s == 0


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("style", SYNCHRONISATIONS)
def test_without_communication_many_are_as_fast_as_one(case, style, monkeypatch):
    monkeypatch.setattr(mesh, "collective_s", lambda *_: 0.0)
    if get(style).server:
        return  # its update is the host's
    p = predict(captured(case), NODE, Plan(), Conditions(exchange=replace(get(style), copies=0.0)))
    assert p.step_s == pytest.approx(predict_one(captured(case), NODE.device).step_s)


def sent(workload, plan):
    """Bytes by collective that a rank sends in a step."""
    out = Counter()
    for op, size, _ in simulation(asked(workload, NODE, plan)).collectives(0):
        out[op] += size
    return out


@pytest.mark.parametrize("case", CASES)
def test_all_gradients_are_reduced_once(case):
    workload = captured(case)
    whole, every = gradients(workload), sum(p.bytes for p in workload.parameters)
    assert sent(workload, Plan()) == {"all_reduce": whole}
    assert sent(workload, Plan(sharding="zero1")) == {"reduce_scatter": whole, "all_gather": whole}
    assert sent(workload, Plan(sharding="fsdp", reshard=False))["reduce_scatter"] == every


@settings(max_examples=30)
@given(cases, st.sampled_from(SHARDINGS), st.floats(1, 30), st.integers(1, 3))
def test_a_faster_network_is_never_slower(case, sharding, factor, accumulate):
    cluster = clusters.get("4xp100-node-10gbe")
    better = replace(
        cluster,
        tiers=tuple(
            replace(
                t,
                bandwidth_Bps=factor * t.bandwidth_Bps,
                node_bandwidth_Bps=factor * t.node_bandwidth_Bps if t.node_bandwidth_Bps else None,
            )
            for t in cluster.tiers
        ),
    )
    workload = captured(case)
    plan = Plan(sharding=sharding, gbs=cluster.device_count * workload.batch * accumulate)
    one, other = predict(workload, cluster, plan), predict(workload, better, plan)
    assert other.step_s <= one.step_s * (1 + 1e-9)
    assert sum(part.seconds for part in one.breakdown) == pytest.approx(one.step_s)
    assert one.step_s_low < one.step_s < one.step_s_high and 0 < one.mfu <= one.hfu < 1
    assert one.micro_batches == accumulate and one.batch == plan.gbs


@pytest.mark.parametrize("style", SYNCHRONISATIONS)
def test_every_synchronisation_runs_and_costs_something(style):
    workload = captured("cnn")
    cluster = clusters.get("4xp100-node-10gbe")
    p = predict(workload, cluster, Plan(), Conditions(exchange=get(style)))
    assert p.step_s > predict_one(workload, cluster.device).step_s and p.exposed_s > 0
    assert p.to_dict()["breakdown"]


def test_overlap_hides_what_would_follow_the_backward_pass():
    workload = captured("lm")
    plans = [predict(workload, NODE, Plan(framework=style)).exposed_s for style in ("ddp", "after-backward")]
    assert plans[0] < 0.7 * plans[1]  # what is sent slows operators beside it down


def test_accumulated_gradients_are_reduced_once_per_step():
    workload, cluster = captured("cnn"), clusters.get("4xp100-node-10gbe")
    one, four = (predict(workload, cluster, Plan(gbs=n * 16 * workload.batch)) for n in (1, 4))
    assert (
        four.exposed_s == pytest.approx(one.exposed_s, rel=0.1)
        and four.step_s < 4 * one.step_s
        and four.throughput > one.throughput
    )


def test_all_wait_for_the_slowest():
    workload = captured("cnn")
    plain, uneven = (predict(workload, replace(NODE, straggler_cv=cv), Plan()) for cv in (0.0, 0.1))
    computing = plain.step_s - plain.exposed_s
    assert uneven.step_s == pytest.approx(plain.step_s + 0.1 * slowest_normal(8) * computing)
    alone = clusters.get("1xv100-sxm-16gb")
    assert (
        predict(workload, replace(alone, straggler_cv=0.1), Plan()).step_s
        == predict(workload, alone, Plan()).step_s
    )
    assert (
        slowest_normal(1) == 0
        and slowest_normal(2) == pytest.approx(1 / math.sqrt(math.pi), abs=0.03)
        and slowest_normal(8) == pytest.approx(1.42, abs=0.02)
    )
    mixed = replace(NODE, nodes=2, mix=((devices.get("p100-sxm"), 1),))
    assert predict(captured("tables"), mixed, Plan()).device == "p100-sxm"


# -- buckets ---------------------------------------------------------------------------------------


def test_buckets_by_hand():
    assert buckets([3, 3, 3, 3, 3], cap=6, first=2) == [[0], [1, 2], [3, 4]]
    assert buckets([3, 3, 3], cap=0) == [[0], [1], [2]]
    assert buckets([3, 3, 3], cap=math.inf) == [[0, 1, 2]]
    assert buckets([1, 1, 1, 1], cap=100, times=[0.0, 0.1, 0.9, 1.0], cycle_s=0.5) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("case", ["cnn", "lm", "rnn"])
@pytest.mark.parametrize("cap", [25 * 2**20, 2**20])
def test_buckets_are_those_of_torch(case, cap):
    import torch.distributed as dist

    ready = [p for p, _ in Layout(captured(case)).ready()]
    tensors = [torch.empty(p.shape, device="meta") for p in ready]
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, [dist._DEFAULT_FIRST_BUCKET_BYTES, cap])
    assert buckets([p.numel * 4 for p in ready], cap, DDP.first_bucket_bytes) == theirs


# -- where gradients become ready ------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_gradients_become_ready_in_the_backward_pass(case):
    workload = captured(case)
    layout = Layout(workload)
    ready = layout.ready()
    assert len(ready) == workload.trained
    phases = [
        segment.phase
        for index in workload.order
        for segment in [workload.segments[index]]
        for _ in segment.ops
    ]
    assert all(
        phases[place - 1] in ("backward", "recompute", "forward") and place <= layout.update
        for _, place in ready
    )
    half = sum(place > phases.index("backward") for _, place in ready)
    assert half == len(ready)


def test_folded_blocks_become_ready_one_after_another():
    workload = captured("lm")
    layout = Layout(workload)
    spans = [unit.backward for unit in layout.units]
    assert len(spans) == 12 and all(a[0] >= b[1] for a, b in pairwise(spans))  # last block first
    of_block = {
        int(p.name.split(".")[1]): place for p, place in layout.ready() if p.name.startswith("blocks.")
    }
    assert all(spans[i][0] < place <= spans[i][1] for i, place in of_block.items()) and len(of_block) == 12
    sizes = {unit.bytes for unit in layout.units}
    inside = sum(p.bytes for p in workload.parameters if p.name.startswith("blocks."))
    assert len(sizes) == 1 and sum(unit.bytes for unit in layout.units) == inside


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["cnn", "lm"])
def test_each_stage_shards_one_kind_more(case):
    workload = captured(case)
    found = {kind: predict(workload, NODE, Plan(sharding=kind)).memory.by_kind for kind in SHARDINGS[:4]}
    whole = predict_one(workload, NODE.device).memory.by_kind
    assert found["ddp"]["optimizer"] == whole["optimizer"] and found["zero1"]["optimizer"] == pytest.approx(
        whole["optimizer"] / 8, abs=8
    )
    assert found["zero2"]["gradients"] < found["zero1"]["gradients"]
    assert found["fsdp"]["parameters"] < found["zero2"]["parameters"] == whole["parameters"]
    peaks = [sum(found[kind].values()) for kind in ("ddp", "zero1", "zero2")]
    assert peaks == sorted(peaks, reverse=True) and sum(found["fsdp"].values()) < peaks[0]
    more = predict(workload, clusters.get("8xdgx-1-v100"), Plan(sharding="fsdp")).peak_bytes
    assert more < sum(found["fsdp"].values())


# -- plans -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("tp=2", "tp 2: a captured module is split by data and, between modules, into a pipeline"),
        ("dp=4", "dp 4 x tp 1 x pp 1 x cp 1 = 4 ranks, but the cluster has 8 devices"),
        ("pp=3", "dp 2 x tp 1 x pp 3 x cp 1 = 6 ranks"),
        ("pp=4 dualpipev gbs=192", "needs at least 2 x pp 4 = 8 micro-batches"),
        ("pp=8 vpp=8", "pp 8 x 8 chunks = 64, but resnet18 can be cut into"),
        ("ddp shard=4", "shard 4 is of hsdp"),
        ("mbs=3", "mbs 3, but the workload was captured with batch 16"),
        ("gbs=100", "gbs 100 is not a multiple of dp 8 x mbs 16 = 128"),
        ("hsdp shard=3", "hsdp shard 3 does not divide dp 8"),
        ("recompute=full", "captured without"),
        ("offload=optimizer", "offload optimizer"),
        ("fp8", "precision fp8, but the workload was captured in amp_fp16"),
        ("seq=7", "seq 7"),
    ],
)
def test_contradictions_are_explained(plan, message):
    with pytest.raises(PlanError) as caught:
        predict(captured("cnn"), NODE, Plan.parse(plan))
    text = str(caught.value)
    assert message in text and "nearest feasible plan: " in text and "\n" not in text
    suggestion = text.rpartition("plan: ")[2].replace("amp_fp16", "fp16")
    assert resolve(Plan.parse(suggestion), captured("cnn"), NODE).ranks == 8
