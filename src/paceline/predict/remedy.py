"""What would help a plan that does not fit: other plans like it, each with what it would reserve, and the
nearest that fits.

Changes are tried one at a time, then on top of each other, those that cost least time first; every memory is
predicted as for the plan itself (`predict/memory.py`), without timing anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

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


def fit(step: TransformerStep, fullest: Memory) -> Fit:
    """Whether the fullest stage fits; if not, what other plans would need, the nearest one that fits
    first.
    """
    found = Fit(
        fits=fullest.fits, needed_bytes=fullest.reserved_bytes, available_bytes=fullest.available_bytes
    )
    if fullest.fits:
        return found
    now = fullest.reserved_bytes
    single = [
        (words, size)
        for words, other in changes(step.plan)
        if (tried := _try(step, other)) is not None and (size := needed(tried)) < now
    ]
    near = nearest(step)
    first = (f"plan {near[0]}", near[1]) if near is not None else _larger(step)
    return replace(
        found, remedies=(*([first] if first else []), *sorted(single, key=lambda remedy: remedy[1]))
    )


def needed(step: TransformerStep) -> int:
    """Bytes reserved on a device of the fullest stage."""
    return max(stage_memory(step, stage, i).reserved_bytes for i, stage in enumerate(step.parts.stages))


def nearest(step: TransformerStep) -> Remedy | None:
    """The plan that fits after the fewest changes, the cheaper ones first, and what it would reserve."""
    plans, seen = [step.plan], {str(step.plan)}
    for _ in range(DEPTH):
        left: list[tuple[int, Plan]] = []
        for plan in plans:
            for _, other in changes(plan):
                tried = _try(step, other)
                if tried is None or str(tried.plan) in seen:
                    continue
                seen.add(str(tried.plan))
                memories = [stage_memory(tried, stage, i) for i, stage in enumerate(tried.parts.stages)]
                size = max(memory.reserved_bytes for memory in memories)
                if all(memory.fits for memory in memories):
                    return str(tried.plan), size
                left.append((size, tried.plan))
        plans = [plan for _, plan in sorted(left, key=lambda pair: pair[0])[:BREADTH]]
    return None


def _larger(step: TransformerStep) -> Remedy | None:
    """The nearest plan that fits on the smallest cluster of 2, 4, 8, ...

    times as many nodes, where none fits on this one.
    """
    for power in range(1, GROWTH + 1):
        cluster = replace(step.cluster, nodes=step.cluster.nodes * 2**power)
        plan = replace(
            step.plan,
            dp=step.plan.dp * 2**power,
            gbs=step.plan.gbs * 2**power,
            sharding=Sharding.DDP if step.plan.sharding is Sharding.NONE else step.plan.sharding,
        )
        near = nearest(replace(step, cluster=cluster, plan=plan))
        if near is not None:
            return f"{cluster.device_count} devices and plan {near[0]}", near[1]
    return None


def _try(step: TransformerStep, plan: Plan) -> TransformerStep | None:
    """The step under another plan on the same cluster, for its memory alone: its operators are still those of
    the first.
    """
    try:
        whole = resolve(plan, step.cluster.device_count, step.model)
    except PacelineError:
        return None
    return step.replanned(whole)


def changes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Changes to a plan that save memory, in words, those that usually cost least time first."""
    shared = plan.dp * plan.cp > 1
    if plan.tp > 1 and not plan.sp:
        yield "sp", replace(plan, sp=True)
    if shared and plan.sharding.whole:
        yield "zero1", replace(plan, sharding=Sharding.ZERO1)
    if plan.recompute is Recompute.NONE:
        yield "recompute=selective", replace(plan, recompute=Recompute.SELECTIVE)
    if plan.mbs > 1:
        yield f"mbs={plan.mbs // 2}", replace(plan, mbs=plan.mbs // 2)
    if plan.recompute is not Recompute.FULL:
        yield "recompute=full", replace(plan, recompute=Recompute.FULL)
    for axis in ("tp", "pp", "cp"):
        if plan.dp % 2 == 0:
            more, dp = 2 * getattr(plan, axis), plan.dp // 2
            kind = plan.sharding if dp * plan.cp > 1 or axis == "cp" else "none"
            yield (
                f"{axis}={more} dp={dp}",
                replace(plan, **{axis: more, "dp": dp, "sharding": kind, "shard": 0}),
            )
    if shared and not plan.sharding.shards_parameters and plan.pp == 1:
        yield "fsdp", replace(plan, sharding=Sharding.FSDP)
    if plan.offload is Offload.NONE:
        yield "offload=optimizer", replace(plan, offload=Offload.OPTIMIZER)
        yield "offload=activations", replace(plan, offload=Offload.ACTIVATIONS)
