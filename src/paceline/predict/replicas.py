"""The answer about replicas that exchange now and then: the step of a replica by itself, with what its way of
synchronising adds (`paceline.sync.rarely`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from paceline.cost.collectives import sigma
from paceline.cost.memory import plain_fit, with_more
from paceline.predict.answer import breakdown
from paceline.predict.interval import Z90, around
from paceline.spec.prediction import DistributedPrediction, fullest
from paceline.sync.rarely import ADDED, OUTER, WAITING, Added, Replica

#: what bounds the parts that are added; all others are communication
BOUNDS = {WAITING: "bubble", OUTER: "memory"}


def predict(replica: Replica) -> DistributedPrediction:
    """The step of a replica with what its way of synchronising adds."""
    alone, more = replica.alone, ADDED[replica.plan.relax.mode](replica)
    parts = _parts(replica, more)
    step = sum(parts.values())
    exposed = sum(seconds for name, seconds in more.seconds.items() if name not in BOUNDS and seconds > 0)
    low, high = around(step, _sigma(replica, exposed / step))
    longer = step / alone.step_s
    stages = tuple(replace(s, memory=with_more(s.memory, more.more_bytes)) for s in alone.stages)
    bounds = {part.name: part.bound_by for part in alone.breakdown} | BOUNDS
    exposed += alone.exposed_s
    return replace(
        alone,
        step_s=step,
        step_s_low=low,
        step_s_high=high,
        throughput=alone.throughput / longer * more.used,
        mfu=alone.mfu / longer * more.used,
        hfu=alone.hfu / longer,
        exposed_s=exposed,
        bound_by="communication" if exposed > 0.5 * step else alone.bound_by,
        breakdown=breakdown(parts, bounds),
        stages=stages,
        fit=plain_fit(fullest(stages)),
        provenance=(*alone.provenance, *more.remarks),
        energy_j=alone.energy_j and alone.energy_j * longer,
        cost_per_unit=alone.cost_per_unit and alone.cost_per_unit * longer / more.used,
    )


def _parts(replica: Replica, more: Added) -> dict[str, float]:
    """Where the time of a replica goes by itself and in the exchange."""
    relax, parts = replica.plan.relax, {part.name: part.seconds for part in replica.alone.breakdown}
    late = parts.pop(WAITING, 0.0)
    # over the steps of a period, workers are late by less per step
    if late and relax.mode.averages_rarely:
        parts[WAITING] = late / math.sqrt(relax.every)
    return parts | {name: seconds for name, seconds in more.seconds.items() if seconds > 0}


def _sigma(replica: Replica, sent: float) -> float:
    """Standard deviation of the logarithm of a step, a share of which goes to what is sent."""
    alone, network = replica.alone, 0.0
    if replica.replicas > 1:
        network = float(sigma(1e7, replica.group(replica.replicas), replica.cluster, replica.mesh.library))
    own = math.log(alone.step_s_high / alone.step_s) / Z90
    return math.hypot((1 - sent) * own, sent * network)
