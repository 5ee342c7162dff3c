"""Schedules: the same actions in the same order as torch's classes hold."""

import contextlib

import pytest

from paceline.errors import PlanError, UnknownName
from paceline.sim.schedules import actions
from paceline.spec import schedules
from paceline.spec.plan import SCHEDULES


def sizes(schedule):
    """Chunks of a rank to try."""
    return (2, 3) if schedule.chunked else (schedule.chunks_per_rank(1),)


CASES = [
    (name, pp, vpp, m)
    for name, schedule in SCHEDULES.items()
    for pp in (2, 3, 4, 8)
    for vpp in sizes(schedule)
    for m in (pp, 2 * pp, 3 * pp, 8 * pp)
    if m >= schedule.least_micro_batches(pp, vpp, in_torch=True)
]


@contextlib.contextmanager
def fake_group(size):
    torch = pytest.importorskip("torch", reason="compares with torch's own schedules")
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield torch
    finally:
        dist.destroy_process_group()


def held_by_torch(torch, schedule, pp, vpp, m):
    """The actions per rank of torch's class, without its idle slots; a pair that overlaps as two."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining import schedules as theirs

    total = pp * vpp
    stages = [
        PipelineStage(torch.nn.Linear(2, 2), chunk, total, torch.device("cpu"))
        for chunk in schedules.get(schedule).chunks_of(0, pp, vpp)
    ]
    kind = getattr(theirs, f"Schedule{schedules.get(schedule).torch}")
    made = kind(stages if total > pp or schedule == "zb-h1" else stages[0], m, loss_fn=torch.nn.MSELoss())
    orders = made.pipeline_order if hasattr(made, "pipeline_order") else made._get_pipeline_order()
    for rank in range(pp):
        flat = [part for action in orders[rank] if action for part in action.sub_actions or (action,)]
        # torch lists the last rank's forward passes from 1 (it runs them from 0)
        if schedule == "1f1b" and rank == pp - 1:
            flat = [
                a._replace(microbatch_index=a.microbatch_index - 1) if a.computation_type.value == "F" else a
                for a in flat
            ]
        yield [str(action) for action in flat if action.computation_type.value in "FBIW"]


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_as_torch_holds_them(pp):
    with fake_group(pp) as torch:
        for schedule, size, vpp, m in CASES:
            if size == pp and schedules.get(schedule).torch:
                for rank, held in enumerate(held_by_torch(torch, schedule, pp, vpp, m)):
                    assert [str(action) for action in actions(schedule, rank, pp, m, vpp)] == held, (
                        schedule,
                        pp,
                        vpp,
                        m,
                        rank,
                    )


@pytest.mark.parametrize(
    ("schedule", "pp", "vpp", "m"),
    [*CASES, ("1f1b", 8, 1, 3), ("interleaved", 4, 2, 7), ("zb-v", 8, 2, 3), ("zb-h1", 8, 1, 2)],
)
def test_complete_and_without_deadlock(schedule, pp, vpp, m):
    """Every pass of every micro-batch once, in an order that every rank can follow."""
    left = {rank: actions(schedule, rank, pp, m, vpp) for rank in range(pp)}
    chunks = pp * vpp
    for rank, mine in left.items():
        counted = sum(2 if a.kind == "B" and schedules.get(schedule).splits else 1 for a in mine)
        kinds = 3 if schedules.get(schedule).splits else 2
        held = schedules.get(schedule).chunks_of(rank, pp, vpp)
        assert len(set(mine)) == len(mine) and counted == len(held) * m * kinds
        assert all(schedules.get(schedule).rank_of(a.chunk, pp) == rank for a in mine)
    done = set()
    while any(left.values()):
        before = len(done)
        for mine in left.values():
            while mine and needs(mine[0], chunks) <= done:
                action = mine.pop(0)
                done.add((action.chunk, "B" if action.kind == "I" else action.kind, action.micro_batch))
        assert len(done) > before, "stuck"


def needs(action, chunks):
    chunk, kind, i = action
    if kind == "F":
        return {(chunk - 1, "F", i)} if chunk else set()
    if kind == "W":
        return {(chunk, "B", i)}
    return {(chunk + 1, "B", i), (chunk, "F", i)} if chunk < chunks - 1 else {(chunk, "F", i)}


def test_mistakes():
    with pytest.raises(PlanError, match="at least 2 x pp 4 = 8 micro-batches, but there are 7"):
        actions("dualpipev", 0, 4, 7, 2)
    with pytest.raises(UnknownName, match="unknown pipeline schedule"):
        actions("zigzag", 0, 4, 8)
