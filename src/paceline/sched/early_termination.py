"""Ends before success from published shares, put onto a job list.

Of each cluster it is known what share of jobs, and what share of device time, went to jobs that completed,
were cancelled, or failed (Hu et al., "Characterization of Large Language Model Development in the
Datacenter", NSDI 2024, and "Characterization and Prediction of Deep Learning Workloads in Large-Scale GPU
Datacenters", SC 2021). The chance to end early is taken to rise with a job's device time g as 1 / (1 +
exp(-(a + b ln g))), a and b such that both shares are met on the job list at hand.

A traced length is what a job really ran; one that ends early had asked for more. (Lists that give what was
asked for say so: `Trace.asked`.) How far such jobs get was not published: the share of work done is taken as
even between 0 and 1 for cancelled jobs, and as even in logarithm from 0.02 for failed ones, which fail
sooner. What policies may know of it is learnt from further draws: a history, not the jobs themselves. A
logistic regression gives the chance to end early by the device time asked for, devices and tenant; classes of
similar jobs were tried before it, and their edges put jobs in the wrong order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.errors import UnknownName
from paceline.sched.ends import Ends
from paceline.sched.job import Job
from paceline.sched.traces import Trace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: between tenants, the deviation of the logarithm of the odds to end early: that between the seven clusters
#: whose shares were published
SPREAD = 0.33
#: jobs of the history that policies learn from (at least one draw of the job list)
HISTORY = 40_000
#: failed jobs reach at least this share of their work
FIRST = 0.02
#: points that stand for how far cancelled jobs get, and as many for failed ones
POINTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class EndShares:
    """Of GPU jobs: those completed, cancelled (killed by their user), failed; of all jobs, and of all device
    time.
    """

    completed: float
    killed: float
    failed: float
    completed_time: float
    killed_time: float
    failed_time: float


#: AcmeTrace, data/cluster_summary.csv (CC-BY-4.0)
PUBLISHED = {
    "philly": EndShares(
        completed=0.604,
        killed=0.090,
        failed=0.305,
        completed_time=0.321,
        killed_time=0.294,
        failed_time=0.386,
    ),
    "helios": EndShares(
        completed=0.624,
        killed=0.221,
        failed=0.155,
        completed_time=0.513,
        killed_time=0.394,
        failed_time=0.093,
    ),
    "seren": EndShares(
        completed=0.497,
        killed=0.075,
        failed=0.429,
        completed_time=0.212,
        killed_time=0.664,
        failed_time=0.124,
    ),
    "kalos": EndShares(
        completed=0.541,
        killed=0.062,
        failed=0.397,
        completed_time=0.313,
        killed_time=0.607,
        failed_time=0.080,
    ),
}


def get(name: str) -> EndShares:
    """The published shares of a cluster."""
    if name not in PUBLISHED:
        raise UnknownName(
            "cluster with termination shares", name, PUBLISHED, f"allowed: {', '.join(PUBLISHED)}"
        )
    return PUBLISHED[name]


def apply(trace: Trace, shares: EndShares, *, seed: int = 0, spread: float = SPREAD) -> Trace:
    """The same jobs, some of which end early; each knows the ends of past jobs like it.

    `spread` is the standard deviation between tenants of the logarithm of the odds to end early.
    """
    times = [_device_s(job) for job in trace.jobs]
    shift = _shifts({job.tenant for job in trace.jobs}, spread, seed)
    early = Logistic.fit(
        times,
        shares.killed + shares.failed,
        shares.killed_time + shares.failed_time,
        shifts=[shift[job.tenant] for job in trace.jobs],
        does=_mean_share(shares) if trace.asked else 1.0,
    )
    weight = [early.at(t, shift[job.tenant]) for t, job in zip(times, trace.jobs, strict=True)]
    killed = Logistic.fit(
        times,
        shares.killed / (shares.killed + shares.failed),
        shares.killed_time / (shares.killed_time + shares.failed_time),
        weight,
    )
    chances = list(zip(times, weight, strict=True))
    draws = -(-HISTORY // len(trace.jobs))
    history = [
        job
        for i in range(draws)
        for job in _draw(trace, chances, killed, random.Random(f"history {seed} {i}"))
    ]
    jobs = _draw(trace, chances, killed, random.Random(f"jobs {seed}"))
    return replace(
        trace,
        jobs=tuple(replace(job, ends=ends) for job, ends in zip(jobs, learn(history, jobs), strict=True)),
    )


def _device_s(job: Job) -> float:
    return max(1.0, job.speed.seconds(job.work, 0, job.devices, job.devices, False) * job.devices)


def _shifts(tenants: set[str], spread: float, seed: int) -> dict[str, float]:
    draw = random.Random(f"tenants {seed}")
    return {tenant: draw.gauss(0, spread) for tenant in sorted(tenants)}


def _mean_share(shares: EndShares) -> float:
    """The share of its work that a job does on average that ends early."""
    killed = shares.killed / (shares.killed + shares.failed)
    return killed * 0.5 + (1 - killed) * (1 - FIRST) / -math.log(FIRST)


def _draw(
    trace: Trace, chances: Sequence[tuple[float, float]], killed: Logistic, draw: random.Random
) -> list[Job]:
    out = []
    for job, (time_s, early) in zip(trace.jobs, chances, strict=True):
        ends, how, far = draw.random() < early, draw.random() < killed.at(time_s), draw.random()
        if not ends:
            out.append(job)
            continue
        share = max(far, 1e-3) if how else FIRST ** (1 - far)
        out.append(
            replace(
                job,
                work=job.work / (1 if trace.asked else share),
                ends_at=min(share, 1 - 1e-9),
                outcome="killed" if how else "failed",
            )
        )
    return out


def learn(history: Sequence[Job], jobs: Sequence[Job]) -> list[Ends]:
    """What jobs that are over say of how each of `jobs` may end before success."""
    import numpy as np

    early = [job for job in history if not job.succeeds]
    if not early:
        return [Ends((), ())] * len(jobs)
    tenants = {tenant: i for i, tenant in enumerate(sorted({job.tenant for job in history}))}
    ends = _regress(
        _facts(history, tenants),
        np.array([not job.succeeds for job in history], dtype=float),
        _facts(jobs, tenants),
    )
    killed = _regress(
        _facts(early, {}), np.array([job.outcome == "killed" for job in early], dtype=float), _facts(jobs, {})
    )
    far = [
        (share, how)
        for how in ("killed", "failed")
        for share in _middles(sorted(job.ends_at for job in early if job.outcome == how))
    ]
    far.sort()
    out = []
    for chance, cancelled in zip(ends.tolist(), killed.tolist(), strict=True):
        weights = [cancelled if how == "killed" else 1 - cancelled for _, how in far]
        whole = sum(weights) or 1.0
        out.append(
            Ends(tuple(share for share, _ in far), tuple(chance * weight / whole for weight in weights))
        )
    return out


def _middles(ordered: Sequence[float]) -> list[float]:
    """Medians of `POINTS` parts of equal number."""
    return [ordered[int((i + 0.5) / POINTS * len(ordered))] for i in range(POINTS)] if ordered else []


def _facts(jobs: Sequence[Job], tenants: Mapping[str, int]) -> NDArray[np.float64]:
    """What is known of a job when it is submitted: device time it asks for, devices, tenant (one column
    each).
    """
    import numpy as np

    out = np.zeros((len(jobs), 3 + len(tenants)))
    out[:, 0] = 1.0
    out[:, 1] = [math.log(_device_s(job)) / 10 for job in jobs]
    out[:, 2] = [math.log(job.devices) / 10 for job in jobs]
    for row, job in enumerate(jobs):
        if job.tenant in tenants:
            out[row, 3 + tenants[job.tenant]] = 1.0
    return out


def _regress(
    facts: NDArray[np.float64], happened: NDArray[np.float64], asked: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Chances for the rows of `asked` by logistic regression (Newton's steps; a prior of unit variance keeps
    rare tenants near the others).
    """
    import numpy as np

    weights = np.zeros(facts.shape[1])
    prior = np.eye(len(weights))
    prior[:3, :3] *= 1e-3
    for _ in range(20):
        chance = 0.5 + 0.5 * np.tanh(facts @ weights / 2)
        slope = facts.T @ (happened - chance) - prior @ weights
        weights = weights + np.linalg.solve(
            (facts * (chance * (1 - chance))[:, None]).T @ facts + prior, slope
        )
    return np.asarray(0.5 + 0.5 * np.tanh(asked @ weights / 2))


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
        times: Sequence[float],
        of_jobs: float,
        of_time: float,
        weights: Sequence[float] | None = None,
        shifts: Sequence[float] | None = None,
        does: float = 1.0,
    ) -> Logistic:
        """Meets a share of jobs and a share of device time, each weighted, where those that it picks do only
        the share `does` of their time.

        The slope is found by bisection, and inside it the level; a share that no slope up to 3 reaches is
        missed.
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
