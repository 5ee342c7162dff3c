"""Memory of a stage: by hand for each framework's way of holding state, along every schedule's actions, and
what helps when it does not fit.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.catalog import clusters, frameworks, transformers
from paceline.cost.transformer import backward_bytes, head_bytes, saved_bytes
from paceline.predict import remedy
from paceline.predict.distributed import TransformerStep
from paceline.predict.memory import cached, communicators, kept, passing, placeholders, stage_memory
from paceline.predict.simulated import predict
from paceline.sim.schedules import actions, in_flight
from paceline.spec import schedules
from paceline.spec.plan import SCHEDULES, Plan, resolve
from paceline.spec.transformer import Transformer

MODEL = Transformer(name="small", layers=24, hidden=2048, heads=16, ffn=8192, vocab=51200, seq=2048)
FRAMEWORKS = [name for name in frameworks.names() if frameworks.get(name).runs != "modules"]
CLUSTER = clusters.get("8x8xa100-sxm-80gb@1600Gb/s/node")


def step(text, model=MODEL, cluster=CLUSTER):
    return TransformerStep.of(
        model, cluster, resolve(Plan.parse(text), cluster.device_count, model), None, None
    )


def state(text, model=MODEL, index=0, cluster=CLUSTER):
    made = step(text, model, cluster)
    stage = made.parts.stages[index]
    return made, kept(made, stage), made.parts.whole(stage)


# -- what is kept ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "parameters", "gradients", "optimizer"),
    [
        ("megatron-core bf16", 2, 4, 12),
        ("megatron-2021 fp16", 2, 2, 12),
        ("nemo bf16", 2, 2, 12),
        ("megatron-core fp32", 4, 4, 8),
        # autocast's copies, and DDP's buckets
        ("megatron-deepspeed fp16", 2, 2, 12),
        ("torch bf16", 4 + 2, 4 + 4, 8),
    ],
)
def test_bytes_per_parameter(words, parameters, gradients, optimizer):
    _, found, count = state(f"tp=8 gbs=64 framework={words}")
    assert (found.parameters, found.gradients, found.optimizer) == pytest.approx(
        (parameters * count, gradients * count, optimizer * count)
    )


def test_deepspeed_keeps_gradients_twice_where_they_add_up_in_fp32():
    made = step("zero1 tp=8 pp=2 gbs=64 framework=megatron-deepspeed")
    twice = replace(made, framework=replace(made.framework, fp32_gradients=True))
    stage = made.parts.stages[0]
    assert kept(twice, stage).gradients == pytest.approx(3 * kept(made, stage).gradients)


def test_ranks_share_state():
    _, whole, count = state("tp=8 gbs=64")
    _, one, _ = state("zero1 tp=8 gbs=64")
    _, two, _ = state("zero2 tp=8 gbs=64")
    made, three, _ = state("fsdp tp=8 gbs=64 framework=torch")
    assert one.optimizer == pytest.approx(whole.optimizer / 8) and one.gradients == whole.gradients
    assert two.gradients == pytest.approx(whole.gradients / 8) and two.parameters == whole.parameters
    assert three.parameters + three.gradients + three.optimizer == pytest.approx(16 * count / 8)
    layer = made.parts.layer
    assert three.gathered == pytest.approx(2 * (2 * layer + made.parts.ends(True, True)))
    assert three.reduced == pytest.approx((2 + 2 * 4) * layer)  # reduced in fp32
    _, four, _ = state("fsdp no-reshard tp=8 gbs=64 framework=torch")
    assert four.gathered == pytest.approx(2 * count)


def test_experts_are_shared_by_fewer_ranks():
    model = transformers.get("mixtral-8x7b")
    made, found, count = state("zero1 ep=8 gbs=64", model)
    experts = model.layers * made.parts.experts
    assert found.optimizer == pytest.approx(12 * ((count - experts) / 64 + experts / 8))


def test_adapters_leave_only_weights():
    _, found, count = state("tp=8 gbs=64 adapters")
    assert (found.parameters, found.gradients, found.optimizer) == pytest.approx((2 * count, 0, 0))
    made, small, _ = state("tp=8 gbs=64 adapters fp8 framework=nemo", cluster=clusters.get("8xdgx-h100"))
    assert small.parameters == pytest.approx(2 * count - MODEL.layers * made.parts.layer)
    assert saved_bytes(made.shape, "none") < saved_bytes(replace(made.shape, trained=True), "none")


# -- what comes and goes ---------------------------------------------------------------------------


def test_loss_and_layers_take_turns():
    made = step("tp=8 gbs=64 mbs=1")
    stage = made.parts.stages[0]
    loss, layer = passing(made, stage)
    assert loss == pytest.approx(head_bytes(made.shape) + 2 * MODEL.vocab * MODEL.hidden / 8)
    assert layer == pytest.approx(max(backward_bytes(made.shape), 2 * MODEL.vocab * MODEL.hidden / 8))
    found = stage_memory(made, stage, 0)
    assert (
        found.by_kind["temporary"] == pytest.approx(max(loss, layer) + placeholders(made), abs=2)
        and found.peak_at == "stage 0, loss"
    )
    again = step("tp=8 gbs=64 mbs=1 recompute=full")
    assert passing(again, stage)[1] > layer  # a layer is there whole while it is run again


def test_logits_by_framework():
    names = ("megatron-core", "megatron-2021", "torch", "torch-compile")
    shapes = [step(f"tp={tp} gbs=64 framework={name}").shape for name in names for tp in (1, 2)]
    logits = [
        shape.tokens * (shape.model.padded_vocab(2) / 2 if shape.degrees.tp > 1 else shape.model.vocab)
        for shape in shapes
    ]
    assert [head_bytes(s) / count for s, count in zip(shapes, logits, strict=True)] == pytest.approx(
        [6, 6, 10, 10, 12, 18, 4, 18]
    )


def test_blocks_are_used_again_when_large_enough():
    assert cached([]) == 0
    assert cached([4, 2, 3]) == 4
    assert cached([1, 2, 3]) == 6
    assert cached([2, 5, 1, 5, 6]) == 13


def test_deepspeed_reserves_for_its_update():
    made = step("zero1 tp=8 pp=2 gbs=64 framework=megatron-deepspeed fp16")
    stage = made.parts.stages[0]
    found, plain = (
        stage_memory(made, stage, 0),
        stage_memory(replace(made, framework=replace(made.framework, state="megatron")), stage, 0),
    )
    part, table = made.parts.whole(stage) / 4, MODEL.vocab * MODEL.hidden / 8
    piece = min(part, table)
    blocks = cached([2 * table, 2 * made.parts.whole(stage), 4 * piece, 8 * piece, 2 * part, 4 * part])
    assert (
        found.reserved_bytes - plain.reserved_bytes == pytest.approx(blocks, abs=8)
        and found.peak_bytes == plain.peak_bytes
    )


def test_context_and_communicators_are_not_there_to_use():
    assert communicators(resolve(Plan(), 1, MODEL)) == 0
    # all, tensor, data, and two neighbours
    assert communicators(resolve(Plan.parse("tp=8 pp=2 gbs=64"), 64, MODEL)) == 5
    made = step("tp=8 pp=2 gbs=64")
    found = made.memory(0)
    assert found.available_bytes == pytest.approx(80 * 2**30 - made.framework.context_bytes - 5 * 0.5e9)


def test_offloading():
    plain, moved = (step(f"zero1 tp=8 gbs=64 mbs=8 {words}") for words in ("", "offload=activations"))
    activations = [made.memory(0).by_kind["activations"] for made in (plain, moved)]
    assert (
        activations[1] == pytest.approx(2 * saved_bytes(moved.shape, "none"), abs=1)
        and activations[1] < activations[0] / 5
    )
    none = step("zero1 tp=8 gbs=64 offload=optimizer")
    assert none.memory(0).by_kind["optimizer"] == 0


# -- micro-batches in flight -----------------------------------------------------------------------


@given(
    schedule=st.sampled_from(list(SCHEDULES)),
    pp=st.integers(2, 8),
    more=st.integers(0, 20),
    vpp=st.integers(1, 4),
    rank=st.integers(0, 7),
)
def test_in_flight_is_what_the_actions_hold(schedule, pp, more, vpp, rank):
    rank %= pp
    vpp = vpp if schedule in ("interleaved", "looped-bfs") else 1
    count = 2 * pp + more if schedules.get(schedule).v_shaped else 1 + more
    if schedule == "interleaved":
        count = pp * (1 + more % 4)
    live = most = 0
    for action in actions(schedule, rank, pp, count, vpp):
        live += {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind]
        most = max(most, live)
    assert live == 0
    assert in_flight(schedule, rank, pp, count, vpp) == pytest.approx(
        most / schedules.get(schedule).chunks_per_rank(vpp)
    )


def test_one_device_holds_one_micro_batch():
    assert in_flight("1f1b", 0, 1, 64) == in_flight("gpipe", 0, 1, 64) == 1


# -- what would help -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("llama3-70b", "tp=2 mbs=2 gbs=128 seq=8192"),
        ("llama3-8b", "gbs=64 mbs=1 seq=8192"),
        ("gpt3-175b", "tp=8 pp=2 gbs=64 mbs=4 gpipe"),
        ("mixtral-8x7b", "ep=8 gbs=64 mbs=1 seq=4096"),
    ],
)
def test_the_nearest_plan_fits(model, plan):
    model = transformers.get(model)
    found = predict(model, CLUSTER, Plan.parse(plan))
    assert not found.fit.fits and sum(found.memory.by_kind.values()) == found.peak_bytes
    (words, size), *others = found.fit.remedies
    near = predict(model, CLUSTER, Plan.parse(words.removeprefix("plan ")))
    assert near.fit.fits and near.fit.needed_bytes == size
    assert others and all(size < found.fit.needed_bytes for _, size in others)
    assert [size for _, size in others] == sorted(size for _, size in others)


def test_a_larger_cluster_where_nothing_else_helps():
    found = predict(
        transformers.get("gpt3-175b"), clusters.get("1xdgx-a100"), Plan.parse("tp=8 mbs=4 gbs=64 seq=2048")
    )
    words, size = found.fit.remedies[0]
    assert "devices and plan" in words and size <= found.fit.available_bytes


def test_a_plan_that_fits_needs_no_remedy():
    assert predict(MODEL, CLUSTER, Plan.parse("fsdp gbs=64")).fit.remedies == ()


def test_changes_keep_the_devices():
    plan = resolve(Plan.parse("tp=2 pp=2 mbs=4 gbs=256"), 64, MODEL)
    tried = list(remedy.changes(plan))
    assert len(tried) == len({words for words, _ in tried}) >= 8
    assert all(other.ranks == 64 for _, other in tried)


# -- what more of something must not do ------------------------------------------------------------


@given(
    tp=st.sampled_from([1, 2, 8]),
    pp=st.sampled_from([1, 2, 4]),
    kind=st.sampled_from(["ddp", "zero1", "zero2", "fsdp"]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    name=st.sampled_from(FRAMEWORKS),
    more=st.sampled_from(["layers", "seq", "ffn", "vocab", "mbs"]),
)
def test_more_takes_no_less_memory(tp, pp, kind, recompute, name, more):
    plan = Plan(tp=tp, pp=pp, mbs=1, gbs=256, seq=2048, sharding=kind, recompute=recompute, framework=name)
    model = MODEL
    wider = replace(plan, **{more: 2 * getattr(plan, more)}) if more in ("seq", "mbs") else plan
    larger = model if more in ("seq", "mbs") else replace(model, **{more: 2 * getattr(model, more)})
    first, second = (
        TransformerStep.of(m, CLUSTER, resolve(p, 64, m), None, None)
        for m, p in ((model, plan), (larger, wider))
    )
    few, many = (
        max(made.memory(rank).reserved_bytes for rank in range(made.plan.pp)) for made in (first, second)
    )
    assert many >= few
