"""The answer about replicas that exchange now and then: the step of a replica by itself, with what its way of
synchronising adds (`paceline.sync.rarely`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from paceline.cost.collectives import sigma
from paceline.cost.memory import with_more
from paceline.predict.interval import Z90, around
from paceline.spec.prediction import DistributedPrediction, Fit, Part, Stage
from paceline.sync.accuracy import accuracy
from paceline.sync.rarely import ADDED, OUTER, WAITING, Added, Replica


def predict(replica: Replica) -> DistributedPrediction:
    """The step of a replica with what its way of synchronising adds."""
    return answer(replica, ADDED[replica.plan.relax.mode](replica))


def answer(replica: Replica, more: Added) -> DistributedPrediction:
    """The prediction of a replica by itself with an exchange added."""
    alone, relax = replica.alone, replica.plan.relax
    own, added = _seconds(replica, more)
    step = sum(own.values()) + sum(added.values())
    sent = sum(seconds for name, seconds in added.items() if name not in (WAITING, OUTER))
    low, high = around(step, _sigma(replica, sent / step))
    ratio, exposed = alone.step_s / step * more.used, alone.exposed_s + sent
    stages = tuple(_with(stage, more.more_bytes) for stage in alone.stages)
    fullest = max((stage.memory for stage in stages), key=lambda memory: memory.peak_bytes)
    return replace(
        alone,
        plan=str(replica.plan),
        step_s=step,
        step_s_low=low,
        step_s_high=high,
        throughput=alone.throughput * ratio,
        mfu=alone.mfu * ratio,
        hfu=alone.hfu * alone.step_s / step,
        exposed_s=exposed,
        bound_by="communication" if exposed > 0.5 * step else alone.bound_by,
        breakdown=_breakdown(alone, own, added, step),
        stages=stages,
        fit=Fit(
            fits=fullest.fits, needed_bytes=fullest.reserved_bytes, available_bytes=fullest.available_bytes
        ),
        provenance=(*alone.provenance, *more.remarks),
        accuracy=accuracy(relax),
        energy_j=None if alone.energy_j is None else alone.energy_j * step / alone.step_s,
        cost_per_unit=None if alone.cost_per_unit is None else alone.cost_per_unit / ratio,
    )


def _seconds(replica: Replica, more: Added) -> tuple[dict[str, float], dict[str, float]]:
    """Where the time of a replica goes by itself, and what the exchange adds."""
    relax = replica.plan.relax
    added = {name: seconds for name, seconds in more.seconds.items() if seconds > 0}
    own = {part.name: part.seconds for part in replica.alone.breakdown}
    late = own.pop(WAITING, 0.0)
    # over the steps of a period, workers are late by less per step
    if late and relax.mode.averages_rarely:
        added[WAITING] = late / math.sqrt(relax.every)
    return own, added


def _sigma(replica: Replica, sent: float) -> float:
    """Standard deviation of the logarithm of a step, a share of which goes to what is sent."""
    alone, network = replica.alone, 0.0
    if replica.replicas > 1:
        group = replica.cluster.group(replica.replicas, replica.stride)
        network = float(sigma(1e7, group, replica.cluster, replica.library))
    own = math.log(alone.step_s_high / alone.step_s) / Z90
    return math.hypot((1 - sent) * own, sent * network)


def _breakdown(
    alone: DistributedPrediction, own: Mapping[str, float], added: Mapping[str, float], step: float
) -> tuple[Part, ...]:
    """The replica's parts and those that were added, largest first."""
    kinds = {WAITING: "bubble", OUTER: "memory"}
    listed = [replace(part, share=part.seconds / step) for part in alone.breakdown if part.name in own]
    for name, seconds in added.items():
        bound = kinds.get(name, "communication")
        listed.append(
            Part(name=name, seconds=seconds, share=seconds / step, count=1, bound_by=bound, flops=0.0)
        )
    return tuple(sorted(listed, key=lambda part: -part.seconds))


def _with(stage: Stage, more: float) -> Stage:
    """A stage whose device holds more."""
    return replace(stage, memory=with_more(stage.memory, more))
