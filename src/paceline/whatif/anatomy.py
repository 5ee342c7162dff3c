"""What a step is made of, whatever its time: FLOPs, bytes through memory, and every collective; three
readings of it.

    roofline     FLOPs per byte through each resource, against the FLOP/s that this resource then allows
    alpha-beta   each collective as alpha + beta * size, by the algorithm that the library takes
    BSP          w + h g + s l: work, bytes sent times the gap per byte, and supersteps times their latency,
                 nothing overlapped
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.cost.collectives import bus_factor, choice
from paceline.cost.operator_depth import operator_work_depth
from paceline.predict.captured import Module
from paceline.predict.distributed import TransformerStep
from paceline.predict.simulated import asked, simulation
from paceline.spec.cluster import Cluster, Group
from paceline.spec.prediction import DistributedPrediction
from paceline.spec.vocabulary import BoundBy
from paceline.spec.whatif import Anatomy, LayerConcurrency, Roof, Sent
from paceline.spec.workload import Op, Workload
from paceline.whatif.subject import Subject


def anatomy(subject: Subject, found: DistributedPrediction) -> Anatomy:
    """The anatomy of a predicted step."""
    made = asked(subject.model, subject.cluster, subject.plan, subject.conditions)
    step = simulation(made)
    sends = max((list(step.collectives(role)) for role in range(made.plan.pp)), key=len)
    sent = _sent(sends, made.mesh.group, subject.cluster, made.mesh.library)
    if isinstance(made, TransformerStep):
        return _transformer(subject, found, made, sent)
    return _captured(subject, found, made, sent)


def _captured(subject: Subject, found: DistributedPrediction, made: Module, sent: list[Sent]) -> Anatomy:
    timed, plan, workload = made.timed, made.plan, made.workload
    runs = np.bincount(timed.step.index, minlength=timed.packed.size) * plan.micro_batches / plan.pp
    flops, moved = float((runs * timed.packed.flops).sum()), float((runs * timed.packed.moved).sum())
    layers = _layers(
        (op, segment.path or op.module.partition(".")[0], count)
        for segment, count in _counted(workload)
        for op in segment.ops
    )
    return _put(subject, found, flops, moved, timed.peak_flops, sent, layers, made.mesh.group)


def _counted(workload: Workload) -> Iterator[tuple[Any, int]]:
    counts = Counter(workload.order)
    yield from ((workload.segments[index], count) for index, count in sorted(counts.items()))


def _transformer(
    subject: Subject, found: DistributedPrediction, step: TransformerStep, sent: list[Sent]
) -> Anatomy:
    chunks = max(sum(layers for _, layers in mine) for mine in step.parts.chunks)
    times = {"layer": chunks, "embedding": 1, "head": 1}
    totals = [0.0, 0.0]
    for name in step.timed.pieces:
        count = times[name.partition(".")[0]] * step.plan.micro_batches
        for i, column in enumerate((step.timed.packed.flops, step.timed.packed.moved)):
            totals[i] += count * float(column[step.timed.place(name)].sum())
    flops = totals[0] + step.timed.recomputed_flops(step.plan.recompute) * chunks * step.plan.micro_batches
    layers = _layers(
        (op, name, times[name.partition(".")[0]])
        for name, piece in step.timed.pieces.items()
        for op in piece.piece.ops
    )
    peak = step.timed.chip.peaks[step.plan.precision]
    return _put(subject, found, flops, totals[1], peak, sent, layers, step.mesh.group)


def _sent(
    sends: Sequence[tuple[str, float, str]], group_of: Callable[[str], Group], cluster: Cluster, library: str
) -> list[Sent]:
    """Collectives of the same kind and size together, those that take longest first."""
    out = []
    for (op, size, axis), count in Counter((op, round(size), axis) for op, size, axis in sends).items():
        group = group_of(axis)
        if group.size == 1 or not size:
            continue
        line = choice(op, size, group, cluster, library)
        out.append(
            Sent(
                op=op,
                axis=axis,
                ranks=group.size,
                size=float(size),
                count=count,
                algorithm=f"{line.algorithm} {line.protocol}",
                alpha_s=count * line.alpha_s,
                beta_s=count * line.beta * size,
                bytes=count * size * bus_factor(op, group.size),
            )
        )
    return sorted(out, key=lambda s: -s.seconds)


def _put(
    subject: Subject,
    found: DistributedPrediction,
    flops: float,
    moved: float,
    peak: float,
    sent: list[Sent],
    layers: tuple[LayerConcurrency, ...],
    group_of: Callable[[str], Group],
) -> Anatomy:
    cluster, bandwidth = subject.cluster, subject.cluster.device.memory_bandwidth_Bps
    roofs = [
        Roof(name="arithmetic", intensity=None, ceiling=peak, seconds=flops / peak),
        Roof(
            name="device memory",
            intensity=flops / max(1.0, moved),
            ceiling=flops / max(1.0, moved) * bandwidth,
            seconds=moved / bandwidth,
        ),
    ]
    for i, tier in enumerate(cluster.tiers):
        seconds = carried = 0.0
        for s in sent:
            group = group_of(s.axis)
            if group.fan(i) > 1:
                inner = group.members[i - 1] if i else 1
                carried += s.bytes / inner
                seconds += s.bytes / cluster.uplink(group, i)
        if seconds:
            roofs.append(
                Roof(name=tier.name, intensity=flops / carried, ceiling=flops / seconds, seconds=seconds)
            )
    busy = sum(
        part.seconds
        for part in found.breakdown
        if part.bound_by in (BoundBy.COMPUTE, BoundBy.MEMORY, BoundBy.LATENCY)
    )
    return Anatomy(
        flops=flops,
        moved_bytes=moved,
        achieved=flops / found.step_s,
        roofs=tuple(roofs),
        sent=tuple(sent),
        layers=layers,
        compute_s=busy,
        step_s=found.step_s,
    )


# -- work and depth --------------------------------------------------------------------------------


def _layers(ops: Iterator[tuple[Op, str, int]]) -> tuple[LayerConcurrency, ...]:
    """Work and depth by layer: the operators of one run after another (branches are not seen; for those see
    `concurrency`).
    """
    found: dict[str, LayerConcurrency] = {}
    for op, name, count in ops:
        layer = found.get(name, LayerConcurrency(name=name, count=count, work=0.0, depth=0.0))
        cost = operator_work_depth(op)
        found[name] = replace(
            layer, count=max(layer.count, count), work=layer.work + cost.work, depth=layer.depth + cost.depth
        )
    return tuple(sorted(found.values(), key=lambda layer: -layer.work * layer.count))
