"""The answer about a step: where its time goes becomes a prediction with interval, breakdown and bottleneck.

Whatever a step was made from says what it is besides its time (`Asked`); the rest is the same for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from paceline.cost import money
from paceline.predict.interval import around
from paceline.predict.program import Simulation
from paceline.queueing.order_statistics import slowest_normal
from paceline.sim.work import BUBBLE, CODING, GATHERS, REDUCTION, TITLES, TRANSFERS, StepWork
from paceline.spec.cluster import Cluster
from paceline.spec.plan import Plan
from paceline.spec.prediction import DistributedPrediction, Evidence, Fit, Memory, Part, Stage
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
    """What an answer says of a step besides its time, its memory and its plan."""

    model: str
    #: of what throughput is counted, and how much of it a step does
    unit: str
    units: float
    parameters: int
    #: FLOPs of a step, and with what runs again; FLOP/s of all ranks at their peak
    flops: float
    executed_flops: float
    peak_flops: float


class Asked(Protocol):
    """A model on the ranks of a resolved plan, with its operators timed."""

    @property
    def cluster(self) -> Cluster: ...

    @property
    def plan(self) -> Plan: ...

    @property
    def way(self) -> Way: ...

    def work(self) -> StepWork: ...

    def facts(self) -> StepFacts: ...

    def layers(self, rank: int) -> int:
        """Of a stage of the pipeline."""

    def memory(self, rank: int) -> Memory:
        """Of one device of a stage."""

    def fit(self, fullest: Memory) -> Fit: ...

    def sigma(self, step: float, exposed: float, bubble: float) -> float:
        """Standard deviation of the logarithm of a step of so many seconds."""

    def provenance(self) -> Iterable[Evidence]: ...


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """Where the seconds of a step go, from the point of view of the stage that waits least."""

    parts: Mapping[str, float]

    @property
    def step_s(self) -> float:
        return sum(self.parts.values())

    @property
    def bubble_s(self) -> float:
        return self.parts.get(BUBBLE, 0.0)

    @property
    def exposed_s(self) -> float:
        """Of communication that nothing hides."""
        return sum(self.parts.get(name, 0.0) for name in EXPOSED)

    def with_stragglers(self, share: float) -> TimeSpent:
        """The same where all wait for the slowest rank, whose computation takes a share more."""
        computed = sum(seconds for name, seconds in self.parts.items() if name not in WAITS)
        return TimeSpent({**self.parts, STRAGGLERS: share * computed})

    def bound_by(self) -> str:
        """What most of the step goes to; an update is computation."""
        totals: dict[str, float] = defaultdict(float)
        for name, seconds in self.parts.items():
            bound = _BOUNDS.get(name, "communication")
            totals["compute" if bound == "memory" else bound] += seconds
        return max(totals, key=lambda name: totals[name])

    def breakdown(self) -> tuple[Part, ...]:
        return breakdown(self.parts, _BOUNDS)


def answer(asked: Asked, simulation: Simulation, trace: bool = False) -> DistributedPrediction:
    """The prediction for a simulated step."""
    parts = simulation.spent(simulation.freest()) if trace else simulation.parts()
    spent = TimeSpent(parts).with_stragglers(straggling(asked.cluster))
    step, plan, facts = spent.step_s, asked.plan, asked.facts()
    low, high = around(step, asked.sigma(step, spent.exposed_s, spent.bubble_s))
    device, stages = asked.cluster.device, tuple(_stages(asked, simulation))
    return DistributedPrediction(
        model=facts.model,
        cluster=asked.cluster.name,
        device=device.name,
        plan=str(plan),
        devices=plan.ranks,
        batch=plan.gbs,
        seq=plan.seq,
        precision=plan.precision,
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
        exposed_s=spent.exposed_s,
        bubble_s=spent.bubble_s,
        bound_by=spent.bound_by(),
        breakdown=spent.breakdown(),
        stages=stages,
        fit=asked.fit(fullest(stages)),
        provenance=(*asked.provenance(), *coding_evidence(asked.way, parts)),
        accuracy=asked.way.accuracy,
        energy_j=money.energy_j(device, plan.ranks * step),
        price=money.basis(device),
        cost_per_unit=money.per_unit(device, plan.ranks * step, facts.units),
        timeline=simulation.timeline() if trace else None,
    )


def _stages(asked: Asked, simulation: Simulation) -> Iterator[Stage]:
    for rank in range(asked.plan.pp):
        forward_s, backward_s = simulation.stage_s(rank)
        yield Stage(
            layers=asked.layers(rank), forward_s=forward_s, backward_s=backward_s, memory=asked.memory(rank)
        )


def fullest(stages: Iterable[Stage]) -> Memory:
    """The memory of the stage that holds most."""
    return max((stage.memory for stage in stages), key=lambda memory: memory.peak_bytes)


def breakdown(parts: Mapping[str, float], bounds: Mapping[str, str]) -> tuple[Part, ...]:
    """Lines of a breakdown, longest first; what has no bound of its own is communication."""
    step = sum(parts.values())
    listed = [
        Part(
            name=name,
            seconds=seconds,
            share=seconds / step,
            count=1,
            bound_by=bounds.get(name, "communication"),
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


def coding_evidence(way: Way, parts: Mapping[str, float]) -> Iterator[Evidence]:
    """What the seconds of encoders and decoders rest on."""
    if parts.get(CODING):
        yield Evidence(
            what=f"{CODING} {1e3 * parts[CODING]:.3g} ms, {way.code}",
            kind="derived",
            source="copies of the gradient that encoders were measured to take, or their work counted",
        )
