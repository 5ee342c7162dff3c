"""Throughput against workers from a profile: the answer that a person sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paceline.errors import SpecError
from paceline.queueing import baselines
from paceline.queueing.coarse import coarse
from paceline.queueing.profile import HostLink, JobProfile
from paceline.queueing.simulate import SimulatedRun, simulate

#: half of the 90 % interval, relative: what the fine model leaves on the measured set (docs/asynchronous.md),
#: and beyond what was profiled
ERROR = 0.15
#: share of the most that the curve reaches at which it counts as saturated
SATURATED = 0.9
_SEEDS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputPoint:
    """Samples per second of the whole job with `workers`: by the fine model with its interval, and by the
    others.
    """

    workers: int
    samples_per_s: float
    low: float
    high: float
    coarse: float
    linear: float
    optimus: float
    #: mean staleness of updates, where workers do not wait for each other
    staleness: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputCurve:
    """A job on one number of servers and one kind of link."""

    name: str
    mode: str
    servers: int
    link_Bps: float
    points: tuple[ThroughputPoint, ...]
    saturation: int
    bottleneck: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "mode": self.mode,
            "servers": self.servers,
            "link_Bps": self.link_Bps,
            "saturation_workers": self.saturation,
            "bottleneck": self.bottleneck,
            "points": [
                {name: getattr(point, name) for name in ThroughputPoint.__slots__} for point in self.points
            ],
        }


def throughput(
    job: JobProfile, workers: Sequence[int], *, servers: int | None = None, link_Bps: float | None = None
) -> ThroughputCurve:
    """The curve over `workers`, on the profiled number of servers and links unless given."""
    if not workers or min(workers) < 1:
        raise SpecError(f"give worker counts from 1 up, got {list(workers)}")
    job = changed(job, servers, link_Bps)
    most = max(workers)
    quick, line, form = coarse(job, most), baselines.linear(job, most), baselines.optimus(job, most)
    points, last = [], None
    for n in sorted(set(workers)):
        found, last = fine(job, n)
        known = job.measured(n)
        error = ERROR if known is None else ERROR / 2
        points.append(
            ThroughputPoint(
                workers=n,
                samples_per_s=found * job.batch,
                low=found * job.batch / (1 + error),
                high=found * job.batch * (1 + error),
                coarse=float(quick.throughput[n - 1]) * job.batch,
                linear=float(line[n - 1]) * job.batch,
                optimus=float(form[n - 1]) * job.batch,
                staleness=_mean(last.staleness),
            )
        )
    assert last is not None
    return ThroughputCurve(
        name=job.name,
        mode=job.mode,
        servers=job.servers,
        link_Bps=job.link.rate_Bps,
        points=tuple(points),
        saturation=knee([p.workers for p in points], [p.samples_per_s for p in points]),
        bottleneck=bottleneck(last),
    )


def changed(job: JobProfile, servers: int | None, link_Bps: float | None) -> JobProfile:
    """The job on other links or servers; what was profiled of updates is spread over the new servers."""
    if link_Bps is not None and link_Bps != job.link.rate_Bps:
        job = job.with_link(HostLink(rate_Bps=link_Bps))
    if servers is None or servers == job.servers:
        return job
    if servers < 1:
        raise SpecError(f"a job has at least one server, got {servers}")
    share = job.servers / servers
    runs = tuple(
        replace(
            run,
            steps=tuple(
                tuple(replace(step, update_s=step.update_s * share) for step in steps) for steps in run.steps
            ),
        )
        for run in job.few()
    )
    return replace(job, servers=servers, runs=runs)


def fine(job: JobProfile, workers: int, seeds: int = _SEEDS) -> tuple[float, SimulatedRun]:
    """Steps per second by the fine model, the mean of a few simulations; and the last of them."""
    steps = max(12, min(40, 320 // workers))
    runs = [simulate(job, workers, steps=steps, seed=seed) for seed in range(seeds)]
    return float(np.mean([run.throughput for run in runs])), runs[-1]


def knee(workers: Sequence[int], rates: Sequence[float]) -> int:
    """The fewest workers that reach nearly the most of a curve."""
    return next(n for n, rate in zip(workers, rates, strict=True) if rate >= SATURATED * max(rates))


def bottleneck(run: SimulatedRun) -> str:
    """What is busy most of the time; compute where nothing shared is."""
    name, share = max(run.busy.items(), key=lambda item: item[1])
    return name if share > 0.7 else "compute"


def _mean(histogram: dict[int, int]) -> float:
    total = sum(histogram.values())
    return sum(value * count for value, count in histogram.items()) / total if total else 0.0
