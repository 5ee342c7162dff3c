"""Ends before success from published shares, put onto a job list.

Of each cluster it is known what share of jobs, and what share of device time, went to jobs that completed, were cancelled, or failed (Hu et
al., "Characterization of Large Language Model Development in the Datacenter", NSDI 2024, and "Characterization and Prediction of Deep
Learning Workloads in Large-Scale GPU Datacenters", SC 2021). The chance to end early is taken to rise with a job's device time g as
1 / (1 + exp(-(a + b ln g))), a and b such that both shares are met on the job list at hand.

A traced length is what a job really ran; one that ends early had asked for more. How far such jobs get was not published: the share of work
done is taken as even between 0 and 1 for cancelled jobs, and as even in logarithm from 0.02 for failed ones, which fail sooner.
What policies may know of it, `Ends` by size and devices, is learnt from a second draw: a history, not the jobs themselves.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.errors import UnknownName
from paceline.sched.ends import Ends, empirical
from paceline.sched.job import Job
from paceline.sched.traces import Trace

#: failed jobs reach at least this share of their work
FIRST = 0.02
#: a class of jobs with fewer in the history shares the ends of all
ENOUGH = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Of GPU jobs: those completed, cancelled (killed by their user), failed; of all jobs, and of all device time."""

    completed: float
    killed: float
    failed: float
    completed_time: float
    killed_time: float
    failed_time: float


#: AcmeTrace, data/cluster_summary.csv (CC-BY-4.0)
PUBLISHED = {
    "philly": Shares(completed=0.604, killed=0.090, failed=0.305, completed_time=0.321, killed_time=0.294, failed_time=0.386),
    "helios": Shares(completed=0.624, killed=0.221, failed=0.155, completed_time=0.513, killed_time=0.394, failed_time=0.093),
    "seren": Shares(completed=0.497, killed=0.075, failed=0.429, completed_time=0.212, killed_time=0.664, failed_time=0.124),
    "kalos": Shares(completed=0.541, killed=0.062, failed=0.397, completed_time=0.313, killed_time=0.607, failed_time=0.080),
}


def get(name: str) -> Shares:
    """The published shares of a cluster."""
    if name not in PUBLISHED:
        raise UnknownName("cluster with termination shares", name, PUBLISHED, f"allowed: {', '.join(PUBLISHED)}")
    return PUBLISHED[name]


def apply(trace: Trace, shares: Shares, *, seed: int = 0) -> Trace:
    """The same jobs, some of which end early; each knows the ends of past jobs like it."""
    times = [_device_s(job) for job in trace.jobs]
    early = Logistic.fit(times, shares.killed + shares.failed, shares.killed_time + shares.failed_time)
    weight = [early.at(t) for t in times]
    killed = Logistic.fit(
        times, shares.killed / (shares.killed + shares.failed), shares.killed_time / (shares.killed_time + shares.failed_time), weight,
    )
    history = _draw(trace.jobs, times, early, killed, random.Random(f"history {seed}"))
    known = _learn(history)
    jobs = _draw(trace.jobs, times, early, killed, random.Random(f"jobs {seed}"))
    whole = known[None]
    return replace(trace, jobs=tuple(replace(job, ends=known.get(_class(job), whole)) for job in jobs))


def _device_s(job: Job) -> float:
    return max(1.0, job.speed.seconds(job.work, 0, job.devices, job.devices, False) * job.devices)


def _draw(jobs: Sequence[Job], times: Sequence[float], early: Logistic, killed: Logistic, draw: random.Random) -> list[Job]:
    out = []
    for job, time_s in zip(jobs, times, strict=True):
        ends, how, far = draw.random() < early.at(time_s), draw.random() < killed.at(time_s), draw.random()
        if not ends:
            out.append(job)
            continue
        share = max(far, 1e-3) if how else FIRST ** (1 - far)
        out.append(replace(job, work=job.work / share, ends_at=min(share, 1 - 1e-9), outcome="killed" if how else "failed"))
    return out


def _class(job: Job) -> tuple[int, int]:
    """Jobs alike: by the work they ask for (half decades) and by devices (doublings)."""
    return round(2 * math.log10(job.work)), job.devices.bit_length()


def _learn(history: Sequence[Job]) -> dict[tuple[int, int] | None, Ends]:
    groups: dict[tuple[int, int], list[float]] = defaultdict(list)
    for job in history:
        groups[_class(job)].append(job.ends_at if not job.succeeds else 1.0)
    found: dict[tuple[int, int] | None, Ends] = {key: empirical(seen) for key, seen in groups.items() if len(seen) >= ENOUGH}
    found[None] = empirical([share for seen in groups.values() for share in seen])
    return found


@dataclass(frozen=True, slots=True)
class Logistic:
    """A chance that rises (or falls) with the logarithm of device time."""

    a: float
    b: float

    def at(self, device_s: float) -> float:
        x = self.a + self.b * math.log(device_s)
        return 1 / (1 + math.exp(-x)) if x > -700 else 0.0

    @staticmethod
    def fit(times: Sequence[float], of_jobs: float, of_time: float, weights: Sequence[float] | None = None) -> Logistic:
        """Meets a share of jobs and a share of device time, each weighted; the slope by bisection, and inside it the level by bisection."""
        weights = weights if weights is not None else [1.0] * len(times)
        logs = [math.log(t) for t in times]
        jobs = math.fsum(weights)
        whole = math.fsum(w * t for w, t in zip(weights, times, strict=True))

        def chances(a: float, b: float) -> list[float]:
            return [1 / (1 + math.exp(-min(max(a + b * x, -60.0), 60.0))) for x in logs]

        def level(b: float) -> float:
            low, high = -200.0, 200.0
            for _ in range(50):
                a = (low + high) / 2
                if math.fsum(w * p for w, p in zip(weights, chances(a, b), strict=True)) < of_jobs * jobs:
                    low = a
                else:
                    high = a
            return (low + high) / 2

        low, high = -3.0, 3.0
        for _ in range(25):
            b = (low + high) / 2
            share = math.fsum(w * t * p for w, t, p in zip(weights, times, chances(level(b), b), strict=True))
            if share < of_time * whole:
                low = b
            else:
                high = b
        b = (low + high) / 2
        return Logistic(level(b), b)
