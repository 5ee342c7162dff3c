"""The answer about a step: where its time goes becomes a prediction with interval, breakdown and bottleneck.

Whatever a step was made from says what it is besides its time (`StepFacts`); the rest is the same for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from paceline.cost import money
from paceline.predict.interval import around
from paceline.predict.program import Simulation
from paceline.queueing.order_statistics import slowest_normal
from paceline.sim.work import BUBBLE, CODING, GATHERS, REDUCTION, TITLES, TRANSFERS
from paceline.spec.cluster import Cluster
from paceline.spec.plan import Plan
from paceline.spec.prediction import DistributedPrediction, Evidence, Fit, Part, Stage
from paceline.sync.way import Way

#: parts that are communication that nothing hides
EXPOSED = (*TITLES.values(), GATHERS, TRANSFERS, REDUCTION)
#: parts in which a stage waits for others
WAITS = (GATHERS, TRANSFERS, REDUCTION, BUBBLE)
STRAGGLERS = "stragglers"
#: what bounds each part; all others are communication
_BOUNDS = {
    "forward": "compute",
    "backward": "compute",
    "recomputation": "compute",
    "optimizer": "memory",
    CODING: "memory",
    "host": "host",
    BUBBLE: "bubble",
    STRAGGLERS: "bubble",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What an answer says of a step besides its time."""

    model: str
    cluster: Cluster
    plan: Plan
    seq: int
    precision: str
    #: of what throughput is counted, and how much of it a step does
    unit: str
    units: float
    parameters: int
    #: FLOPs of a step, and with what runs again; FLOP/s of all ranks at their peak
    flops: float
    executed_flops: float
    peak_flops: float
    stages: tuple[Stage, ...]
    fit: Fit
    provenance: Iterable[Evidence]


class Asked(Protocol):
    """What a step was made from."""

    @property
    def cluster(self) -> Cluster: ...

    @property
    def way(self) -> Way: ...

    def sigma(self, step: float, exposed: float, bubble: float) -> float:
        """Standard deviation of the logarithm of a step of so many seconds."""

    def facts(self, passes: Passes) -> StepFacts: ...


#: seconds of each stage's passes of one micro-batch, forward and backward
Passes = tuple[tuple[float, float], ...]


def answer(asked: Asked, simulation: Simulation, trace: bool = False) -> DistributedPrediction:
    """The prediction for a simulated step, from the point of view of the stage that waits least."""
    passes = tuple(simulation.stage_s(rank) for rank in range(simulation.plan.pp))
    parts = simulation.spent(simulation.freest()) if trace else simulation.parts()
    parts[STRAGGLERS] = straggling(asked.cluster) * sum(
        seconds for name, seconds in parts.items() if name not in WAITS
    )
    step, bubble = sum(parts.values()), parts.get(BUBBLE, 0.0)
    exposed = sum(parts.get(name, 0.0) for name in EXPOSED)
    low, high = around(step, asked.sigma(step, exposed, bubble))
    facts = asked.facts(passes)
    plan, device = facts.plan, facts.cluster.device
    return DistributedPrediction(
        model=facts.model,
        cluster=facts.cluster.name,
        device=device.name,
        plan=str(plan),
        devices=plan.ranks,
        batch=plan.gbs,
        seq=facts.seq,
        precision=facts.precision,
        unit=facts.unit,
        step_s=step,
        step_s_low=low,
        step_s_high=high,
        throughput=facts.units / step,
        mfu=facts.flops / step / facts.peak_flops,
        hfu=facts.executed_flops / step / facts.peak_flops,
        flops=facts.flops,
        parameters=facts.parameters,
        micro_batches=plan.micro_batches,
        exposed_s=exposed,
        bubble_s=bubble,
        bound_by=bound_by(parts),
        breakdown=breakdown(parts, step),
        stages=facts.stages,
        fit=facts.fit,
        provenance=(*facts.provenance, *coding_evidence(asked.way, parts)),
        accuracy=asked.way.accuracy,
        energy_j=device.tdp_w * step * plan.ranks if device.tdp_w else None,
        price=money.basis(device),
        cost_per_unit=device.price_per_s * step * plan.ranks / facts.units if device.price_per_s else None,
        timeline=simulation.timeline() if trace else None,
    )


def bound_by(parts: Mapping[str, float]) -> str:
    """What most of a step goes to; an update is computation."""
    totals: dict[str, float] = defaultdict(float)
    for name, seconds in parts.items():
        bound = _BOUNDS.get(name, "communication")
        totals["compute" if bound == "memory" else bound] += seconds
    return max(totals, key=lambda name: totals[name])


def breakdown(parts: Mapping[str, float], step: float) -> tuple[Part, ...]:
    """Lines of a breakdown, longest first."""
    listed = [
        Part(
            name=name,
            seconds=seconds,
            share=seconds / step,
            count=1,
            bound_by=_BOUNDS.get(name, "communication"),
            flops=0.0,
        )
        for name, seconds in parts.items()
        if seconds > 0
    ]
    return tuple(sorted(listed, key=lambda part: -part.seconds))


def straggling(cluster: Cluster) -> float:
    """By what share of its computation a step is longer because all wait for the slowest rank.

    Every device draws for itself: steps of one server slow down from two devices on as those of many servers
    do (`tf_cnn_benchmarks_2017`), and the traces that coefficients of variation come from are of workers.
    """
    return cluster.straggler_cv * slowest_normal(cluster.device_count)


def coding_evidence(way: Way, parts: Mapping[str, float]) -> Iterable[Evidence]:
    """What the seconds of encoders and decoders rest on."""
    if parts.get(CODING):
        yield Evidence(
            what=f"{CODING} {1e3 * parts[CODING]:.3g} ms, {way.code}",
            kind="derived",
            source="copies of the gradient that encoders were measured to take, or their work counted",
        )


def network_evidence(cluster: Cluster) -> Iterable[Evidence]:
    """What the rates of a cluster's networks rest on."""
    for path, fact in cluster.facts.items():
        if path.startswith("tier.") and path.endswith("bandwidth"):
            yield Evidence(what=f"{cluster.name} {path}", kind=fact.kind, source=fact.source)
