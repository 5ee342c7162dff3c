"""What came of a job list: response times, of all jobs and of the successful ones, utilisation, fairness,
waste.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.sched.decision import Allocation
from paceline.spec.student import t95

if TYPE_CHECKING:
    from paceline.sched.machine import EventRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedJob:
    """A job that is over.

    Times in seconds; `spent_s` are device-seconds; `alone_s` is what its run takes at the size asked for,
    undisturbed.
    """

    name: str
    submit_s: float
    start_s: float
    end_s: float
    spent_s: float
    restarts: int
    outcome: str
    devices: int
    alone_s: float
    tenant: str = ""

    @property
    def response_s(self) -> float:
        """From submission to end."""
        return self.end_s - self.submit_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """Where a job ran, from when to when."""

    name: str
    start_s: float
    end_s: float
    allocation: Allocation


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleResult:
    """One run of a job list under one policy."""

    policy: str
    cluster: str
    devices: int
    done: tuple[FinishedJob, ...]
    events: int
    decisions: int
    #: wall-clock seconds that the simulation took
    elapsed_s: float
    segments: tuple[Occupancy, ...] | None = None
    log: tuple[EventRecord, ...] | None = None

    @staticmethod
    def of(
        *,
        policy: str,
        cluster: str,
        devices: int,
        done: Sequence[FinishedJob],
        events: int,
        decisions: int,
        elapsed_s: float,
        segments: Sequence[Occupancy] | None,
        log: Sequence[EventRecord] | None,
    ) -> ScheduleResult:
        """Freezes what a run collected."""
        return ScheduleResult(
            policy=policy,
            cluster=cluster,
            devices=devices,
            done=tuple(done),
            events=events,
            decisions=decisions,
            elapsed_s=elapsed_s,
            segments=None if segments is None else tuple(segments),
            log=None if log is None else tuple(log),
        )

    @property
    def responses_s(self) -> list[float]:
        """Response times of all jobs, sorted."""
        return sorted(job.response_s for job in self.done)

    @property
    def makespan_s(self) -> float:
        """From the first submission to the last end."""
        return max(job.end_s for job in self.done) - min(job.submit_s for job in self.done)

    def metrics(self) -> dict[str, float]:
        """Figures by name; times in seconds, shares of 1."""
        responses = self.responses_s
        good = sorted(job.response_s for job in self.done if job.outcome == "completed")
        spent = sum(job.spent_s for job in self.done)
        wasted = sum(job.spent_s for job in self.done if job.outcome != "completed")
        slowdown = [job.response_s / max(job.alone_s, 1.0) for job in self.done]
        waits = [job.start_s - job.submit_s for job in self.done]
        return {
            "avg_jct_s": mean(responses),
            "median_jct_s": quantile(responses, 0.5),
            "p99_jct_s": quantile(responses, 0.99),
            "avg_successful_jct_s": mean(good),
            "median_successful_jct_s": quantile(good, 0.5),
            "p99_successful_jct_s": quantile(good, 0.99),
            "makespan_s": self.makespan_s,
            "avg_wait_s": mean(waits),
            "utilisation": spent / (self.devices * self.makespan_s) if spent else 0.0,
            "fairness": jain(slowdown),
            "p99_slowdown": quantile(sorted(slowdown), 0.99),
            "device_hours": spent / 3600,
            "wasted_device_hours": wasted / 3600,
            "restarts": mean([float(job.restarts) for job in self.done]),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "policy": self.policy,
            **self.metrics(),
            "jobs": len(self.done),
            "successful_jobs": sum(j.outcome == "completed" for j in self.done),
            "cluster": self.cluster,
            "devices": self.devices,
            "events": self.events,
            "decisions": self.decisions,
            "elapsed_s": self.elapsed_s,
        }


def mean(values: Sequence[float]) -> float:
    """Not a number where there is none."""
    return math.fsum(values) / len(values) if values else math.nan


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of sorted values, straight between neighbours."""
    if not ordered:
        return math.nan
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def jain(values: Sequence[float]) -> float:
    """Jain's index of fairness: 1 where all are equal, 1/n where one has all."""
    squares = math.fsum(v * v for v in values)
    return math.fsum(values) ** 2 / (len(values) * squares) if squares else 1.0


def interval(values: Sequence[float]) -> tuple[float, float]:
    """(mean, half width of its 95 % confidence interval) over independent runs; the half width is not a
    number for a single one.
    """
    middle = mean(values)
    count = len(values)
    if count < 2:
        return middle, math.nan
    deviation = math.sqrt(math.fsum((v - middle) ** 2 for v in values) / (count - 1))
    return middle, t95(count - 1) * deviation / math.sqrt(count)
