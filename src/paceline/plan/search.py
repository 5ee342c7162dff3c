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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from paceline.plan.bound import bounds
from paceline.plan.evidence import unmeasured
from paceline.plan.memory import spare
from paceline.plan.request import Goal, Progress, silent
from paceline.plan.space import LOSSY, Block, Space
from paceline.plan.table import Array, Table
from paceline.plan.trials import MOST, Trials
from paceline.plan.workers import Interrupted, Run, reached, workers
from paceline.predict.simulated import predict_step
from paceline.spec.planned import Ranked

#: blocks that one task of a worker bounds at most
TASK = 48


def search(
    space: Space, goal: Goal, *, most: int = MOST, processes: int | None = None, progress: Progress = silent
) -> Trials:
    """Search the whole space; with more processes sooner, with the same result.

    Ctrl-C ends it with the best so far; before there is one it raises `Interrupted` with what was reached.
    """
    begun, plans = time.monotonic(), f"{len(space):,} plans"
    with reached(f"none of {plans} has a bound yet"), _workers(space, goal, processes) as run:
        bounded = _bound_all(space.blocks, run, progress)
        how = {"simulate": partial(run, _try), "most": most, "tell": progress, "begun": begun}
        trials = _trials(space, goal, bounded, **how)
        with reached(f"all {plans} have bounds, and none was simulated yet"):
            trials.run()
    return trials


def _trials(space: Space, goal: Goal, bounded: Iterable[Array], **how: Any) -> Trials:
    """Plans that fit, in the order of their bounds."""
    low_s, left = np.concatenate([np.zeros((2, 0)), *bounded], axis=-1)
    low = low_s * np.repeat([goal.factor(block.cluster) for block in space.blocks], [*map(len, space.blocks)])
    low[low_s > goal.most_s] = math.inf
    places = np.flatnonzero(left >= 0)
    # of plans with the same bound the plainest, which a block lists first, come first
    places = places[np.argsort(low[places], kind="stable")]
    return Trials(
        plans=len(space),
        lows=low[places],
        task=lambda i: (int(places[i]), float(low_s[places[i]])),
        measured=lambda: space.measured[places],
        most_s=goal.most_s,
        nearest=(*space.at(int(left.argmax())), float(left.max())) if len(space) else None,
        **how,
    )


def fits(space: Space) -> bool:
    """Whether any plan of a space fits into memory."""
    tables = _tables_of(space)
    return any((spare(block, tables[block.cluster.name]) >= 0).any() for block in space.blocks)


# -- bounds ----------------------------------------------------------------------------------------


def _bound_all(blocks: Sequence[Block], run: Run, tell: Progress) -> list[Array]:
    """What `_bounded` says of each block."""
    # one after another those whose layers are the same
    order = sorted(range(len(blocks)), key=lambda i: _layers(blocks[i]))
    tasks = [order[start : start + TASK] for start in range(0, len(order), TASK)]
    found = list[Array]()
    done, total = 0, sum(map(len, blocks))
    try:
        for some in run(_bound_some, tasks):
            found += some
            done += sum(bounded.shape[-1] for bounded in some)
            tell("bounding", done, total, math.inf)
    except KeyboardInterrupt:
        raise Interrupted(f"{done:,} of {total:,} plans have bounds, and none was simulated yet") from None
    return [found[i] for i in np.argsort(order)]


def _layers(block: Block) -> tuple[object, ...]:
    """What the layers of a block depend on."""
    degrees = vars(block.mesh.inner).values()
    return block.cluster.device_count, *degrees, block.batch.mbs, block.kernels.framework


def _bound_some(task: Sequence[int]) -> list[Array]:
    """What is known of each of some blocks."""
    return [_bounded(_space.blocks[i]) for i in task]


def _bounded(block: Block) -> Array:
    """Of each plan: seconds that it takes at least, and bytes of a device that it leaves; below zero where it
    does not fit.
    """
    table = _tables[block.cluster.name]
    left = spare(block, table).ravel()
    low = bounds(block, table).ravel() if (left >= 0).any() else np.full(len(block), math.inf)
    return np.array([low, left])


# -- simulation ------------------------------------------------------------------------------------


def _try(task: tuple[int, float]) -> Ranked | None:
    """A plan simulated, by its place in the space and its bound; None where it does not fit after all."""
    place, bound_s = task
    cluster, plan = _space.at(place)
    found = predict_step(_tables[cluster.name].timed(plan))
    if not found.fit.fits:
        return None
    return Ranked(
        plan=plan,
        cluster=cluster,
        prediction=found,
        value=found.step_s * _goal.factor(cluster),
        bound_s=bound_s,
        lossy=plan.precision if plan.precision in LOSSY else "",
        unmeasured=unmeasured(vars(plan)),
    )


# -- workers ---------------------------------------------------------------------------------------

#: what the search at hand is about, in this process and in those that it forks
_space: Space
_goal: Goal
_tables: dict[str, Table]


def _tables_of(space: Space) -> dict[str, Table]:
    return {cluster.name: Table(space.model, cluster) for cluster in space.clusters}


@contextmanager
def _workers(space: Space, goal: Goal, processes: int | None) -> Iterator[Run]:
    """Processes that know the space; this one where there is one core, or no way to fork."""
    global _space, _goal, _tables
    _space, _goal, _tables = space, goal, _tables_of(space)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    with workers((processes or cores) if len(space.blocks) >= TASK else 1) as run:
        yield run
