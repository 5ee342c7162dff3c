"""The answer about a step: where its time goes becomes a prediction with interval, breakdown and bottleneck.

Whatever a step was made from (`simulated.Asked`) says what it is besides its time: what its ranks do, what
they hold, and how sure that is; the rest is the same for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.cost import money
from paceline.predict.interval import around
from paceline.predict.program import Simulation
from paceline.queueing.order_statistics import slowest_normal
from paceline.sim.work import BUBBLE, CODING, GATHERS, REDUCTION, TITLES, TRANSFERS
from paceline.spec.cluster import Cluster
from paceline.spec.prediction import DistributedPrediction, Evidence, Part, Stage, fullest
from paceline.sync.way import Way

if TYPE_CHECKING:
    from paceline.predict.simulated import Asked

#: parts that are communication that nothing hides
EXPOSED = (*TITLES.values(), GATHERS, TRANSFERS, REDUCTION)
#: parts in which a stage waits for others
WAITS = (GATHERS, TRANSFERS, REDUCTION, BUBBLE)
STRAGGLERS = "stragglers"
#: what bounds each part; all others are communication
BOUNDS = {
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


def answer(asked: Asked, simulation: Simulation, trace: bool = False) -> DistributedPrediction:
    """The prediction for a simulated step."""
    parts = dict(simulation.spent(simulation.freest()) if trace else simulation.parts())
    computed = sum(seconds for name, seconds in parts.items() if name not in WAITS)
    parts[STRAGGLERS] = straggling(asked.cluster) * computed
    step, lines = sum(parts.values()), breakdown(parts, BOUNDS)
    exposed, bubble = sum(parts.get(name, 0.0) for name in EXPOSED), parts.get(BUBBLE, 0.0)
    low, high = around(step, asked.sigma(step, exposed, bubble))
    plan, facts, device = asked.plan, asked.facts(), asked.cluster.device
    stages = tuple(_stages(asked, simulation))
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
        exposed_s=exposed,
        bubble_s=bubble,
        # an update is computation
        bound_by=leading(("compute" if p.bound_by == "memory" else p.bound_by, p.seconds) for p in lines),
        breakdown=lines,
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


def leading(amounts: Iterable[tuple[str, float]]) -> str:
    """The name under which amounts add up to most; the host where there are none."""
    totals: dict[str, float] = defaultdict(float)
    for name, amount in amounts:
        totals[name] += amount
    return max(totals, key=lambda name: totals[name], default="host")


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
