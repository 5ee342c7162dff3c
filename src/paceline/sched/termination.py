"""Ends before success from published shares, put onto a job list.

Of each cluster it is known what share of jobs, and what share of device time, went to jobs that completed, were cancelled, or failed (Hu et
al., "Characterization of Large Language Model Development in the Datacenter", NSDI 2024, and "Characterization and Prediction of Deep
Learning Workloads in Large-Scale GPU Datacenters", SC 2021). The chance to end early is taken to rise with a job's device time g as
1 / (1 + exp(-(a + b ln g))), a and b such that both shares are met on the job list at hand.

A traced length is what a job really ran; one that ends early had asked for more. (Lists that give what was asked for say so:
`Trace.asked`.) How far such jobs get was not published: the share of work done is taken as even between 0 and 1 for cancelled jobs, and
as even in logarithm from 0.02 for failed ones, which fail sooner. What policies may know of it, `Ends` by size, devices and tenant, is
learnt from further draws: a history, not the jobs themselves.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from paceline.errors import UnknownName
from paceline.sched.ends import Ends, empirical
from paceline.sched.job import Job
from paceline.sched.traces import Trace

#: asked work, devices and tenant, or some of them
Alike = tuple[int | str, ...]
#: between tenants, the deviation of the logarithm of the odds to end early: that between the seven clusters whose shares were published
SPREAD = 0.33
#: jobs of the history that policies learn from (at least one draw of the job list)
HISTORY = 40_000
#: failed jobs reach at least this share of their work
FIRST = 0.02
#: a class of jobs with fewer in the history shares the ends of a wider one
ENOUGH = 200


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


def apply(trace: Trace, shares: Shares, *, seed: int = 0, spread: float = SPREAD) -> Trace:
    """The same jobs, some of which end early; each knows the ends of past jobs like it.

    `spread` is the standard deviation between tenants of the logarithm of the odds to end early.
    """
    times = [_device_s(job) for job in trace.jobs]
    shift = _shifts({job.tenant for job in trace.jobs}, spread, seed)
    early = Logistic.fit(
        times, shares.killed + shares.failed, shares.killed_time + shares.failed_time, shifts=[shift[job.tenant] for job in trace.jobs],
        does=_mean_share(shares) if trace.asked else 1.0,
    )
    weight = [early.at(t, shift[job.tenant]) for t, job in zip(times, trace.jobs, strict=True)]
    killed = Logistic.fit(
        times, shares.killed / (shares.killed + shares.failed), shares.killed_time / (shares.killed_time + shares.failed_time), weight,
    )
    chances = list(zip(times, weight, strict=True))
    draws = -(-HISTORY // len(trace.jobs))
    known = _learn(job for i in range(draws) for job in _draw(trace, chances, killed, random.Random(f"history {seed} {i}")))
    jobs = _draw(trace, chances, killed, random.Random(f"jobs {seed}"))
    return replace(trace, jobs=tuple(replace(job, ends=next(known[c] for c in _classes(job) if c in known)) for job in jobs))


def _device_s(job: Job) -> float:
    return max(1.0, job.speed.seconds(job.work, 0, job.devices, job.devices, False) * job.devices)


def _shifts(tenants: set[str], spread: float, seed: int) -> dict[str, float]:
    draw = random.Random(f"tenants {seed}")
    return {tenant: draw.gauss(0, spread) for tenant in sorted(tenants)}


def _mean_share(shares: Shares) -> float:
    """The share of its work that a job does on average that ends early."""
    killed = shares.killed / (shares.killed + shares.failed)
    return killed * 0.5 + (1 - killed) * (1 - FIRST) / -math.log(FIRST)


def _draw(trace: Trace, chances: Sequence[tuple[float, float]], killed: Logistic, draw: random.Random) -> list[Job]:
    out = []
    for job, (time_s, early) in zip(trace.jobs, chances, strict=True):
        ends, how, far = draw.random() < early, draw.random() < killed.at(time_s), draw.random()
        if not ends:
            out.append(job)
            continue
        share = max(far, 1e-3) if how else FIRST ** (1 - far)
        out.append(replace(job, work=job.work / (1 if trace.asked else share), ends_at=min(share, 1 - 1e-9), outcome="killed" if how else "failed"))
    return out


def _classes(job: Job) -> tuple[Alike, ...]:
    """Jobs alike, ever wider: by the work they ask for (half decades), by devices (one, a few, many) and by tenant; without tenant; all."""
    work, devices = round(2 * math.log10(job.work)), (job.devices.bit_length() + 1) // 2
    return (work, devices, job.tenant), (work, devices), ()


def _learn(history: Iterable[Job]) -> dict[Alike, Ends]:
    groups: dict[Alike, list[float]] = defaultdict(list)
    for job in history:
        for group in _classes(job):
            groups[group].append(1.0 if job.succeeds else job.ends_at)
    return {group: empirical(seen) for group, seen in groups.items() if len(seen) >= ENOUGH or not group}


@dataclass(frozen=True, slots=True)
class Logistic:
    """A chance that rises (or falls) with the logarithm of device time."""

    a: float
    b: float

    def at(self, device_s: float, shift: float = 0.0) -> float:
        x = self.a + self.b * math.log(device_s) + shift
        return 1 / (1 + math.exp(-x)) if x > -700 else 0.0

    @staticmethod
    def fit(
        times: Sequence[float], of_jobs: float, of_time: float, weights: Sequence[float] | None = None, shifts: Sequence[float] | None = None,
        does: float = 1.0,
    ) -> Logistic:
        """Meets a share of jobs and a share of device time, each weighted, where those that it picks do only the share `does` of their time.

        The slope is found by bisection, and inside it the level; a share that no slope up to 3 reaches is missed.
        """
        import numpy as np

        device_s = np.asarray(times)
        logs = np.log(device_s)
        shift = np.zeros_like(logs) if shifts is None else np.asarray(shifts)
        weight = np.ones_like(logs) if weights is None else np.asarray(weights)
        by_job, by_time = weight / weight.sum(), weight * device_s / (weight @ device_s)

        def level(b: float) -> float:
            low, high = -200.0, 200.0
            for _ in range(45):
                a = (low + high) / 2
                if by_job @ (0.5 + 0.5 * np.tanh((a + b * logs + shift) / 2)) < of_jobs:
                    low = a
                else:
                    high = a
            return (low + high) / 2

        low, high = -3.0, 3.0
        for _ in range(25):
            b = (low + high) / 2
            share = float(by_time @ (0.5 + 0.5 * np.tanh((level(b) + b * logs + shift) / 2)))
            if share * does / (1 - share + share * does) < of_time:
                low = b
            else:
                high = b
        return Logistic(level((low + high) / 2), (low + high) / 2)
