"""Bounds hold for the simulation, and memory is that of the prediction, on random plans of random models and
clusters.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from paceline.catalog import clusters, transformers
from paceline.plan.bound import bounds
from paceline.plan.memory import peaks, room
from paceline.plan.space import LayerOptions, Limits, Space, plan_of
from paceline.plan.table import (
    PIECES,
    Table,
    hop_s,
    layer_bytes,
    layer_parts,
    of_parts,
    pass_seconds,
    records,
    stage_s,
    state_s,
)
from paceline.predict.memory import saved, stage_memory
from paceline.predict.simulated import predict_step
from paceline.spec import schedules
from paceline.spec.transformer import Transformer
from paceline.spec.vocabulary import Offload

CLUSTERS = ("1xdgx-a100", "2xdgx-h100", "4xdgx-1-v100", "2x8xh100-sxm@100Gb/s/node")


@st.composite
def models(draw):
    heads = draw(st.sampled_from([4, 8, 16]))
    experts = draw(st.sampled_from([0, 0, 4, 8]))
    return Transformer(
        name="random",
        layers=draw(st.sampled_from([2, 4, 6, 8, 12])),
        hidden=128 * heads,
        heads=heads,
        kv_heads=draw(st.sampled_from([0, heads // 2])),
        ffn=draw(st.sampled_from([256, 512])) * heads,
        vocab=draw(st.sampled_from([1000, 32_000, 128_000])),
        seq=2048,
        experts=experts,
        top_k=2 if experts else 0,
        tied=draw(st.booleans()),
        gated=draw(st.booleans()),
    )


#: copies to the host take longer than the host needs to issue a layer, and that longer than the layer
COPIED = Transformer(
    name="copied",
    layers=6,
    hidden=512,
    heads=4,
    ffn=1024,
    vocab=1000,
    seq=2048,
    tied=False,
    experts=4,
    top_k=2,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    model=models(),
    name=st.sampled_from(CLUSTERS),
    batch=st.sampled_from([16, 32]),
    seed=st.integers(0, 10**6),
)
@example(model=COPIED, name="2xdgx-h100", batch=16, seed=29637)
def test_no_simulation_beats_its_bound(model, name, batch, seed):
    cluster, rng = clusters.get(name), np.random.default_rng(seed)
    space, table = Space(model, (cluster,), batch, 2048, Limits.of()), Table(model, cluster)
    for _ in range(4):
        block = space.blocks[rng.integers(len(space.blocks))]
        index = int(rng.integers(len(block)))
        step = table.timed(block.plan(index))
        assert bounds(block, table).ravel()[index] <= predict_step(step).step_s * (1 + 1e-9), str(step.plan)
        memory = [stage_memory(step, stage, i) for i, stage in enumerate(step.parts.stages)]
        assert peaks(block, table).ravel()[index] == pytest.approx(
            max(m.reserved_bytes for m in memory), abs=8
        )
        assert room(block, table) == pytest.approx(memory[0].available_bytes, abs=2)


def test_no_sharded_plan_that_puts_weights_off_beats_its_bound():
    """Its gradients are scattered in the passes that were put off, not on the way of the others."""
    deep = replace(COPIED, name="deep", layers=8, hidden=2048, ffn=8192)
    cluster, rng = clusters.get("2xdgx-h100"), np.random.default_rng(0)
    space, table = Space(deep, (cluster,), 16, 2048, Limits.of(["fsdp", "zb-h1"])), Table(deep, cluster)
    for block in (space.blocks[i] for i in rng.integers(len(space.blocks), size=40)):
        index = int(rng.integers(len(block)))
        step = table.timed(block.plan(index))
        assert bounds(block, table).ravel()[index] <= predict_step(step).step_s * (1 + 1e-9), str(step.plan)


@pytest.mark.parametrize("name", ["gpt3-13b", "mixtral-8x7b"])
def test_keys_hold_every_field_that_matters(name):
    """What is found from the fields of a key is what is found from the whole plan."""
    model, cluster, rng = transformers.get(name), clusters.get("2xdgx-h100"), np.random.default_rng(0)
    limits = Limits.of(allow=["fp8"], forbid=["zb-v", "dualpipev"])  # where both ends are on one rank
    space, table = Space(model, (cluster,), 32, 2048, limits), Table(model, cluster)
    for block in (space.blocks[i] for i in rng.integers(len(space.blocks), size=12)):
        plan = block.plan(int(rng.integers(len(block))))
        step = table.timed(replace(plan, offload=Offload.NONE))
        passes = pass_seconds(table, layer_parts(block), block.shapes)
        at = block.shapes.index(LayerOptions(plan.sp, plan.recompute, plan.context))
        for piece in PIECES:
            label, found = step.tasks.piece(piece), passes[at, PIECES.index(piece)]
            wanted = (label.seconds, label.host_s)
            assert (found["device"], found["host"]) == pytest.approx(wanted, rel=1e-12), str(plan)
        offloaded = table.timed(replace(plan, offload=Offload.ACTIVATIONS)).tasks.copying_s
        assert passes["copying"][at].tolist() == [offloaded] * 2 + [0.0] * (len(PIECES) - 2), str(plan)
        of_shape = of_parts(table, layer_bytes, layer_parts(block), block.shapes)[at]
        assert (of_shape["layer"], of_shape["embedding"]) == saved(step), str(plan)
        assert hop_s(table, block.mesh, block.batch, block.kernels, plan.sp) == step.mesh.total(step.sent.hop)
        states, stages = block.states, tuple(step.parts.stages)
        fixed = (block.mesh, block.kernels)
        seconds, of_state = (
            of_parts(table, stage_s, fixed, states, stages),
            of_parts(table, state_s, fixed, states),
        )
        for state in rng.integers(len(states), size=3):
            step = table.timed(plan_of(block.plan(0), states[state]))
            rows = records([stage_s(step, stage) for stage in stages])
            assert seconds[state].tolist() == rows.tolist(), str(plan)
            assert of_state[state].tobytes() == records([state_s(step)]).tobytes(), str(plan)


def test_bounds_are_close_where_plans_are_good():
    model, cluster = transformers.get("gpt3-13b"), clusters.get("2xdgx-a100")
    space, table = (
        Space(model, (cluster,), 64, 2048, Limits.of(forbid=["offload", "zb-v", "dualpipev"])),
        Table(model, cluster),
    )
    low = [bounds(block, table).ravel() for block in space.blocks]
    best = sorted((float(one.min()), i, int(one.argmin())) for i, one in enumerate(low))[:10]
    for bound, i, index in best:
        step = table.timed(space.blocks[i].plan(index))
        assert bound >= 0.93 * predict_step(step).step_s


@pytest.mark.parametrize("schedule", schedules.SCHEDULES)
@pytest.mark.parametrize(("network", "pp", "gbs"), [("100Gb/s", 2, 256), ("400Gb/s", 4, 28)])
def test_bounds_hold_where_reductions_take_as_long_as_passes(schedule, network, pp, gbs):
    """With many micro-batches, breadth-first schedules complete the first gradients long before the last."""
    model = Transformer(
        name="wide", layers=16, hidden=4096, heads=32, ffn=16384, vocab=1000, seq=2048, tied=False
    )
    where = clusters.get(f"16x1xh100-sxm@{network}")
    words = [schedule, f"pp={pp}", "ddp", "mbs=1", "tp=1", "cp=1", "recompute=none", "offload=none"]
    limits = Limits.of(fix=words)
    space, table = Space(model, (where,), gbs, 2048, limits), Table(model, where)
    assert len(space) or schedule == "dualpipev"  # which needs eight micro-batches, not seven
    for block in space.blocks:
        low = bounds(block, table).ravel()
        for index in range(len(block)):
            step = table.timed(block.plan(index))
            assert low[index] <= predict_step(step).step_s * (1 + 1e-9), str(step.plan)
