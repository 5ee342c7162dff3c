"""Least attained service in a few levels, as Tiresias (NSDI 2019) discretises it.

A job enters the first level; once its device-seconds pass a threshold it falls to the next, behind those
already there. Higher levels run first, inside a level first come, first served. Rounds of a minute and one
threshold at 16 device-hours are what the simulator of the Pollux artifact uses.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from paceline.sched.job import RUNNING, Active
from paceline.sched.machine import State
from paceline.sched.policies.ranked import RankedPolicy


class Las(RankedPolicy):
    """Tiresias: discretised two-dimensional least attained service."""

    name = "las"
    preempts = True
    placement = "widest"

    def __init__(
        self,
        *,
        thresholds: Sequence[float] = (16 * 3600.0,),
        interval_s: float = 60.0,
        quotas: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(quotas=quotas)
        #: device-seconds
        self.thresholds = tuple(thresholds)
        self.interval_s = interval_s
        self._levels: dict[str, tuple[int, int]] = {}
        self._count = 0
        self._crossings: list[tuple[float, int, Active, float]] = []

    def rank(self, job: Active, now_s: float) -> tuple[float, int]:
        level, entry = self._levels[job.name]
        return self.rank_of(job, level), entry

    def rank_of(self, job: Active, level: int) -> float:
        """Of a job in a level; lower runs first."""
        return level

    def why(self, job: Active) -> str:
        return f"next in level {self._levels[job.name][0]} of attained service"

    def added(self, job: Active, now_s: float) -> None:
        if job.name not in self._levels:
            self._enter(job, 0)
        super().added(job, now_s)

    def _enter(self, job: Active, level: int) -> None:
        self._levels[job.name] = level, self._count
        self._count += 1

    def removed(self, job: Active, now_s: float) -> None:
        super().removed(job, now_s)
        if job.status == RUNNING:
            self._watch(job, now_s)

    def left(self, job: Active, now_s: float) -> None:
        super().left(job, now_s)
        self._levels.pop(job.name, None)

    def _watch(self, job: Active, now_s: float) -> None:
        """Notes when a running job will pass the next threshold."""
        level = self._levels[job.name][0]
        if level < len(self.thresholds):
            crosses = now_s + (self.thresholds[level] - job.attained_at(now_s)) / job.devices
            heappush(self._crossings, (crosses, job.index, job, job.started_s))

    def decide(self, state: State) -> None:
        passed = []
        while self._crossings and self._crossings[0][0] <= state.now_s + 1e-6:
            _, _, job, started_s = heappop(self._crossings)
            if job.status == RUNNING and job.started_s == started_s:
                passed.append(job)
        for job in sorted(passed, key=lambda j: j.index):
            self._enter(job, bisect_right(self.thresholds, job.attained_at(state.now_s) + 1e-6))
            self._watch(job, state.now_s)
            self.reported(job, state.now_s)  # it ranks anew
        super().decide(state)

    def wake_s(self, state: State) -> float:
        return self._crossings[0][0] if self._crossings else math.inf
