"""What would help a plan that does not fit: other plans like it, each with what it would reserve, and the
nearest that fits.

Changes are tried one at a time, then on top of each other, those that cost least time first; every memory is
predicted as for the plan itself (`predict/memory.py`), without timing anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from paceline.cost.memory import plain_fit
from paceline.errors import PacelineError
from paceline.predict.memory import stage_memory
from paceline.spec.plan import Plan, resolve
from paceline.spec.prediction import Fit, Memory
from paceline.spec.vocabulary import Offload, Recompute, Sharding

if TYPE_CHECKING:
    from paceline.predict.distributed import TransformerStep

#: changes that are made to a plan at most to find one that fits, and plans that are changed further each time
DEPTH, BREADTH = 4, 4
#: times that a cluster is doubled at most
GROWTH = 6
Remedy = tuple[str, int]
#: a change to a plan: in words, whether it can help, and the fields that it sets
Change = tuple[str, bool, dict[str, Any]]
#: axes that data-parallel ranks can go to
AXES = ("tp", "pp", "cp")


def fit(step: TransformerStep, fullest: Memory) -> Fit:
    """Whether the fullest stage fits; if not, what other plans would need, the nearest one that fits
    first.
    """
    found = plain_fit(fullest)
    if found.fits:
        return found
    sizes = ((words, most(other).reserved_bytes) for words, other in changed(step))
    single = sorted((remedy for remedy in sizes if remedy[1] < found.needed_bytes), key=itemgetter(1))
    return replace(found, remedies=(*(nearest(step) or _larger(step)), *single))


def most(step: TransformerStep) -> Memory:
    """Of the stage whose devices reserve most."""
    memories = [stage_memory(step, stage, rank) for rank, stage in enumerate(step.parts.stages)]
    return max(memories, key=lambda memory: memory.reserved_bytes)


def nearest(step: TransformerStep, words: str = "plan") -> list[Remedy]:
    """The plan that fits after the fewest changes, the cheaper ones first, and what it would reserve; none
    where none was found.
    """
    steps, seen = [step], {str(step.plan)}
    for _ in range(DEPTH):
        left: list[tuple[int, TransformerStep]] = []
        for other in (other for one in steps for _, other in changed(one)):
            if str(other.plan) in seen:
                continue
            seen.add(str(other.plan))
            memory = most(other)
            if memory.fits:
                return [(f"{words} {other.plan}", memory.reserved_bytes)]
            left.append((memory.reserved_bytes, other))
        steps = [other for _, other in sorted(left, key=itemgetter(0))[:BREADTH]]
    return []


def _larger(step: TransformerStep) -> list[Remedy]:
    """The nearest plan that fits on the smallest cluster of 2, 4, 8, ...

    times as many nodes, where none fits on this one.
    """
    for times in (2**power for power in range(1, GROWTH + 1)):
        plan, cluster = step.plan, replace(step.cluster, nodes=step.cluster.nodes * times)
        sharding = Sharding.DDP if plan.sharding is Sharding.NONE else plan.sharding
        plan = replace(plan, dp=plan.dp * times, gbs=plan.gbs * times, sharding=sharding)
        words = f"{cluster.device_count} devices and plan"
        near = nearest(replace(step, cluster=cluster, plan=plan), words)
        if near:
            return near
    return []


def changed(step: TransformerStep) -> Iterator[tuple[str, TransformerStep]]:
    """The step after each change that it can take, in words, for its memory alone: its operators are still
    those of the first.
    """
    for words, plan in changes(step.plan):
        try:
            whole = resolve(plan, step.cluster.device_count, step.model)
        except PacelineError:
            continue
        yield words, step.replanned(whole)


def changes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Changes to a plan that save memory, in words, those that usually cost least time first."""
    for words, helps, fields in (*_cheap(plan), *(_wider(plan, axis) for axis in AXES), *_dear(plan)):
        if helps:
            yield words, replace(plan, **fields)


def _cheap(plan: Plan) -> Iterator[Change]:
    shared, recompute = plan.dp * plan.cp > 1, plan.recompute
    yield "sp", plan.tp > 1 and not plan.sp, {"sp": True}
    yield "zero1", shared and plan.sharding.whole, {"sharding": Sharding.ZERO1}
    yield "recompute=selective", recompute is Recompute.NONE, {"recompute": Recompute.SELECTIVE}
    yield f"mbs={plan.mbs // 2}", plan.mbs > 1, {"mbs": plan.mbs // 2}
    yield "recompute=full", recompute is not Recompute.FULL, {"recompute": Recompute.FULL}


def _dear(plan: Plan) -> Iterator[Change]:
    whole = plan.dp * plan.cp > 1 and not plan.sharding.shards_parameters
    yield "fsdp", whole and plan.pp == 1, {"sharding": Sharding.FSDP}
    for what in (Offload.OPTIMIZER, Offload.ACTIVATIONS):
        yield f"offload={what}", plan.offload is Offload.NONE, {"offload": what}


def _wider(plan: Plan, axis: str) -> Change:
    """Half of the data-parallel ranks go to another axis."""
    dp, degree = plan.dp // 2, 2 * getattr(plan, axis)
    kind = plan.sharding if dp * plan.cp > 1 or axis == "cp" else Sharding.NONE
    fields = {axis: degree, "dp": dp, "sharding": kind, "shard": 0}
    return f"{axis}={degree} dp={dp}", plan.dp % 2 == 0, fields
