"""Find the plan with the best objective, and prove how good it is.

    memory      plans whose peak does not fit on a device are out
    bound       every other plan gets a lower bound on its time (`plan.bound`)
    simulation  plans in the order of their bounds, until no bound is below the best time found, or the
                budget is spent

What is left then has a bound of its own: no plan of the space is better than the best one found by more than
the gap to it. All of this is relative to the model that predicts: it says nothing about how wrong the
predictions are, which their intervals do.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from paceline.plan import evidence
from paceline.plan.bound import bounds
from paceline.plan.memory import peaks, room
from paceline.plan.space import Block, Space
from paceline.plan.table import Table
from paceline.plan.workers import Interrupted, Pool, reached, workers
from paceline.predict.distributed import TransformerStep as Step
from paceline.predict.memory import stage_memory
from paceline.predict.simulated import predict_step
from paceline.spec.cluster import Cluster
from paceline.spec.plan import Plan
from paceline.spec.prediction import DistributedPrediction
from paceline.spec.transformer import Transformer

Array = NDArray[np.float64]
#: plans that are simulated at most
MOST = 256
#: relative differences below this are not worth another simulation
SETTLED = 1e-3
#: blocks that one task of a worker bounds, about
TASK = 48
#: plans that are simulated before the best time is looked at again
BATCH = 8
#: what a search tells about itself: what it does, how much is done of how much, and the best value so far
Progress = Callable[[str, int, int, float], None]


@dataclass(frozen=True, slots=True)
class Goal:
    """What a plan is worth: seconds of a step times a factor of its cluster; and the longest step that is
    allowed.
    """

    name: str
    factor: Callable[[Cluster], float]
    most_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Tried:
    """A plan that was simulated."""

    cluster: Cluster
    plan: Plan
    bound_s: float
    value: float
    prediction: DistributedPrediction


@dataclass(frozen=True, kw_only=True)
class Found:
    """The outcome of a search: what was tried, best first, and what was left out for which reason."""

    space: int
    by_memory: int
    by_bound: int
    undecided: int
    tried: tuple[Tried, ...]
    #: no plan is better than the first of `tried` by more than this share of it
    gap: float
    elapsed_s: float
    #: least peak of a plan for lack of memory left out, and what there is for it
    nearest: tuple[Plan, Cluster, float, float] | None = None
    interrupted: bool = False


def search(
    space: Space,
    goal: Goal,
    *,
    most: int = MOST,
    processes: int | None = None,
    progress: Progress | None = None,
) -> Found:
    """Search the whole space; with more processes sooner, with the same result.

    Ctrl-C ends it with the best so far; before there is one it raises `Interrupted` with what was reached.
    """
    begun = time.monotonic()
    tell = progress or (lambda *_: None)
    blocks = space.blocks
    with reached(f"none of {len(space):,} plans has a bound yet"), _workers(space, processes) as pool:
        lows, fits, nearest = _bound_all(blocks, goal, pool, tell)
        candidates = _Candidates(blocks, lows, fits)
        tried, interrupted = _simulate(candidates, goal, pool, most, tell)
    if interrupted and not tried:
        raise Interrupted(f"all {len(space):,} plans have bounds, and none was simulated yet")
    best = tried[0].value if tried else math.inf
    left = candidates.left()
    open_ = int(np.count_nonzero(left < best * (1 - SETTLED)))
    gap = max(0.0, 1 - float(left[0]) / best) if tried and len(left) else 0.0
    return Found(
        space=len(space),
        by_memory=candidates.over + candidates.tight,
        by_bound=len(left) - open_,
        undecided=open_,
        tried=tuple(tried),
        gap=gap,
        elapsed_s=time.monotonic() - begun,
        nearest=nearest,
        interrupted=interrupted,
    )


def fits(space: Space) -> bool:
    """Whether any plan of a space fits into memory."""
    tables = {cluster.name: Table(space.model, cluster) for cluster in space.clusters}
    return any(
        (peaks(block, table) <= room(block, table)).any()
        for block in space.blocks
        if (table := tables[block.cluster.name])
    )


# -- bounds ----------------------------------------------------------------------------------------


def _bound_all(
    blocks: Sequence[Block], goal: Goal, pool: Pool, tell: Progress
) -> tuple[list[Array], list[NDArray[np.bool_]], tuple[Plan, Cluster, float, float] | None]:
    """Of every plan of every block: the least value, and whether its memory fits; and the plan that comes
    nearest to fitting.
    """
    order = sorted(range(len(blocks)), key=lambda i: _shared(blocks[i]))
    tasks = [
        task
        for _, same in groupby(order, key=lambda i: _shared(blocks[i])[:4])
        for task in _pieces(list(same), TASK)
    ]
    lows: list[Array] = [np.zeros(0)] * len(blocks)
    fits: list[NDArray[np.bool_]] = [np.zeros(0, dtype=bool)] * len(blocks)
    nearest: tuple[float, int, int, float, float] | None = None
    done, total = 0, sum(map(len, blocks))
    try:
        for task, found in zip(tasks, pool.map(_bound_some, tasks), strict=True):
            for i, (low, inside, over) in zip(task, found, strict=True):
                lows[i] = low * goal.factor(blocks[i].cluster)
                lows[i][low > goal.most_s] = math.inf
                fits[i] = inside
                if nearest is None or over[0] < nearest[0]:
                    nearest = (over[0], i, *over[1:])
                done += len(blocks[i])
            tell("bounding", done, total, math.inf)
    except KeyboardInterrupt:
        raise Interrupted(f"{done:,} of {total:,} plans have bounds, and none was simulated yet") from None
    if nearest is None:
        return lows, fits, None
    _, i, place, peak, room_ = nearest
    return lows, fits, (blocks[i].plan(place), blocks[i].cluster, peak, room_)


def _shared(block: Block) -> tuple[object, ...]:
    """What blocks have in common whose layers take the same time, first."""
    m = block.mesh
    return block.cluster.device_count, m.tp, m.cp, block.batch.mbs, m.ep, block.kernels.framework, m.pp


def _pieces(items: list[int], size: int) -> Iterator[list[int]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _bound_some(
    task: Sequence[int],
) -> list[tuple[Array, NDArray[np.bool_], tuple[float, int, float, float]]]:
    """Of each of some blocks: bounds, which plans fit, and the one that comes nearest to it (share of room,
    place, bytes, room).
    """
    out = []
    for i in task:
        block = _blocks[i]
        table = _tables.setdefault(block.cluster.name, Table(_model, block.cluster))
        need, have = peaks(block, table).ravel(), room(block, table)
        inside = need <= have
        low = bounds(block, table).ravel() if inside.any() else np.full(len(block), math.inf)
        place = int(need.argmin())
        out.append((low, inside, (float(need[place] / have), place, float(need[place]), have)))
    return out


# -- simulation ------------------------------------------------------------------------------------


class _Candidates:
    """Plans that fit, in the order of their bounds."""

    def __init__(
        self, blocks: Sequence[Block], lows: Sequence[Array], fits: Sequence[NDArray[np.bool_]]
    ) -> None:
        self._blocks = blocks
        low, inside = (np.concatenate(list(parts)) if parts else np.zeros(0) for parts in (lows, fits))
        self._starts = np.cumsum([0, *(len(block) for block in blocks)])
        self.over = int(np.count_nonzero(~inside.astype(bool)))
        self.tight = 0
        places = np.flatnonzero(inside)
        # of plans with the same bound the plainest, which a block lists first, come first
        self._places = places[np.argsort(low[places], kind="stable")]
        self._lows = low[self._places]
        self._taken = np.zeros(len(self._places), dtype=bool)

    @cached_property
    def _measured(self) -> NDArray[np.bool_]:
        """Whether plans have only features that were ever measured."""
        of_blocks = [block.measured.ravel() for block in self._blocks]
        return np.asarray(np.concatenate(of_blocks)[self._places]) if of_blocks else np.zeros(0, dtype=bool)

    def take(self, count: int, below: float, measured: bool) -> list[tuple[int, int, float]]:
        """The next plans whose bounds are below a value, or those of measured features: (block, place in it,
        bound).
        """
        stop = int(np.searchsorted(self._lows, below, side="left"))
        open_ = ~self._taken[:stop]
        if measured:
            open_ &= self._measured[:stop]
        chosen = np.flatnonzero(open_)[:count]
        self._taken[chosen] = True
        return [self._where(int(i)) for i in chosen]

    def _where(self, i: int) -> tuple[int, int, float]:
        place = int(self._places[i])
        block = int(np.searchsorted(self._starts, place, side="right")) - 1
        return block, place - int(self._starts[block]), float(self._lows[i])

    def left(self) -> Array:
        """Bounds of the plans that were not taken."""
        return np.asarray(self._lows[~self._taken])


def _simulate(
    candidates: _Candidates, goal: Goal, pool: Pool, most: int, tell: Progress
) -> tuple[list[Tried], bool]:
    """Simulates plans until the best is settled or the budget is spent; best first.

    Where the best has a feature that was never measured, what is left of the budget, and a little kept for
    it, goes to the best plan that has none.
    """
    run = _Simulating(candidates, goal, pool, most, tell)
    try:
        run.until(most - min(BATCH, most // 8), measured=False)
        run.until(most, measured=run.doubtful)
    except KeyboardInterrupt:
        return run.ranked, True
    return run.ranked, False


class _Simulating:
    """Plans that were simulated, and how many more may be."""

    def __init__(self, candidates: _Candidates, goal: Goal, pool: Pool, most: int, tell: Progress) -> None:
        self._candidates, self._goal, self._pool, self._most, self._tell = candidates, goal, pool, most, tell
        self._tried: list[Tried] = []
        self._count = 0

    @property
    def ranked(self) -> list[Tried]:
        return sorted(self._tried, key=lambda tried: tried.value)

    @property
    def doubtful(self) -> bool:
        """Whether the best plan has a feature that was never measured."""
        return bool(self._tried) and bool(evidence.of_plan(self.ranked[0].plan))

    def until(self, most: int, *, measured: bool) -> None:
        """Simulates until the best plan, or the best of measured features, is settled, or so many plans were
        simulated.
        """
        while self._count < most:
            rivals = [
                tried.value for tried in self._tried if not measured or not evidence.of_plan(tried.plan)
            ]
            below = min(rivals, default=math.inf) * (1 - SETTLED)
            batch = self._candidates.take(min(BATCH, most - self._count), below, measured)
            if not batch:
                return
            found = self._pool.map(_try, [(block, place) for block, place, _ in batch])
            for (_, _, low), one in zip(batch, found, strict=True):
                self._add(low, one)
            self._tell(
                "simulating",
                self._count,
                self._most,
                min((tried.value for tried in self._tried), default=math.inf),
            )

    def _add(self, low: float, found: tuple[Cluster, Plan, DistributedPrediction] | None) -> None:
        if found is None:
            self._candidates.tight += 1
            return
        self._count += 1
        cluster, plan, prediction = found
        factor = self._goal.factor(cluster)
        if prediction.step_s <= self._goal.most_s:
            self._tried.append(Tried(cluster, plan, low / factor, prediction.step_s * factor, prediction))


def _try(where: tuple[int, int]) -> tuple[Cluster, Plan, DistributedPrediction] | None:
    """A plan simulated, or None where it does not fit after all."""
    block = _blocks[where[0]]
    plan = block.plan(where[1])
    table = _tables.setdefault(block.cluster.name, Table(_model, block.cluster))
    step = Step.of(_model, block.cluster, plan, None, table.curves)
    if not all(stage_memory(step, stage, i).fits for i, stage in enumerate(step.held())):
        return None
    return block.cluster, plan, predict_step(step)


# -- workers ---------------------------------------------------------------------------------------

#: what the search at hand is about, in this process and in those that it forks
_model: Transformer
_blocks: Sequence[Block] = ()
_tables: dict[str, Table] = {}


@contextmanager
def _workers(space: Space, processes: int | None) -> Iterator[Pool]:
    """Processes that know the space; this one where there is one core, or no way to fork."""
    global _model, _blocks
    _model, _blocks = space.model, space.blocks
    _tables.clear()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    count = (processes or cores) if len(_blocks) >= TASK else 1
    with workers(count) as pool:
        yield pool
