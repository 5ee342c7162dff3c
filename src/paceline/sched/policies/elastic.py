"""Elastic policies: which jobs run, and how many devices each gets, by what the next devices are worth.

All of them hand out devices greedily. Going from n to m devices is worth, per device,

    w (s(m) - s(n)) / (m - n),    s(n) = T(1) / T(n),  T(n) = time to success on n devices

the speedup per added device, times a weight of the job. The weight decides the trade between a short wait for short jobs and efficient
use of devices: w = T(1) ** -haste. With haste 0 the sum of speedups is maximal (efficiency alone; what goodput schedulers maximise); with
haste 1 the rate at which jobs get done (shortest remaining time first, with diminishing returns); larger values lean further to short jobs.
Sizes between which speedup is not concave are jumped over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from paceline.sched.job import RUNNING, Active
from paceline.sched.machine import State
from paceline.sched.policy import Policy


class Elastic(Policy):
    """Greedy marginal allocation with restarts weighed against what they bring."""

    def __init__(
        self, *, haste: float = 1.0, adaptive: bool = False, floor: float = 0.0, knows_ends: bool = False, interval_s: float = 0.0,
        review_s: float = 600.0, worth: float = 4.0, placement: str = "consolidate", quotas: Mapping[str, int] | None = None,
    ) -> None:
        self.haste = haste
        self.adaptive = adaptive
        #: the least speedup per added device (efficiency) at which a job still grows
        self.floor = floor
        self.knows_ends = knows_ends
        self.interval_s = interval_s
        #: seconds after which sizes are reviewed though no job came or went; 0: never
        self.review_s = review_s
        #: a resize must save so many times the restart that it costs
        self.worth = worth
        self.placement = placement
        self.quotas = dict(quotas or {})
        self._last_s = 0.0

    def wake_s(self, state: State) -> float:
        return self._last_s + self.review_s if self.review_s and state.running else math.inf

    def decide(self, state: State) -> None:
        self._last_s = state.now_s
        if not state.jobs:
            return
        sizes = self._settled(state)
        changed = [job for job in state.jobs.values() if sizes[job.name] != job.devices]
        for job in changed:
            if not sizes[job.name] and job.status == RUNNING:
                state.stop(job, "its devices are worth more to other jobs")
        moves = sorted((job for job in changed if sizes[job.name]), key=lambda job: (-sizes[job.name], job.index))
        state.reshape((job, sizes[job.name], self._why(job, sizes[job.name])) for job in moves)

    def _why(self, job: Active, size: int) -> str:
        if job.status != RUNNING:
            return f"{size} devices are worth most to it"
        return f"{'more' if size > job.devices else 'fewer'} devices: {job.devices} to {size} by marginal speedup"

    def _settled(self, state: State) -> dict[str, int]:
        """Sizes, after changes that are not worth a restart were taken back."""
        fixed: dict[str, int] = {}
        while True:
            sizes = self._sizes(state, fixed)
            kept = {
                job.name: job.devices for job in state.running.values()
                if job.name not in fixed and sizes[job.name] != job.devices and not self._pays(state, job, sizes[job.name])
            }
            if not kept:
                return sizes
            fixed |= kept

    def _pays(self, state: State, job: Active, size: int) -> bool:
        """Whether a running job should change: growth must save more than it costs; shrinking frees devices for others, unless it is nearly done."""
        each, now = state.nodes.node_devices, state.now_s
        here = self._left_s(state, job, job.devices)
        cost = self.worth * job.job.restart_s
        if size > job.devices:
            return here - job.seconds_left(now, size, each, self.adaptive) > cost
        return here > cost

    def _left_s(self, state: State, job: Active, size: int) -> float:
        return job.seconds_left(state.now_s, size, state.nodes.node_devices, self.adaptive)

    def _sizes(self, state: State, fixed: Mapping[str, int]) -> dict[str, int]:
        free = state.devices - sum(fixed.values())
        sizes = {name: fixed.get(name, 0) for name in state.jobs}
        ladders: dict[str, list[tuple[int, float]]] = {}
        heap: list[tuple[float, int, Active, int]] = []
        for job in state.jobs.values():
            if job.name not in fixed:
                ladder = ladders[job.name] = self._ladder(state, job, free)
                if len(ladder) > 1:
                    heap.append((-ladder[1][1], job.index, job, 1))
        heapify(heap)
        while heap and free > 0:
            _, index, job, step = heappop(heap)
            ladder = ladders[job.name]
            more = ladder[step][0] - ladder[step - 1][0]
            if more > free:
                continue
            free -= more
            sizes[job.name] = ladder[step][0]
            if step + 1 < len(ladder):
                heappush(heap, (-ladder[step + 1][1], index, job, step + 1))
        return sizes

    def _ladder(self, state: State, job: Active, limit: int) -> list[tuple[int, float]]:
        """(size, worth of each device on the way there) from none up, with falling worth."""
        each, now = state.nodes.node_devices, state.now_s
        sizes = [n for n in job.job.sizes(limit) if n <= each or n % each == 0 or n == job.job.least]
        left = job.left_at(now)
        speed, phase = job.job.speed, job.phase
        times = [speed.seconds(left, phase, n, each, self.adaptive) for n in sizes]
        points = [(0, 0.0), *((n, 1 / t) for n, t in zip(sizes, times, strict=True) if 0 < t < math.inf)]
        if len(points) < 2:
            return [(sizes[0], math.inf)] if sizes else []
        base = points[1][1] / points[1][0]
        weight = base ** (self.haste - 1) * self._value(job, left)
        ladder: list[tuple[int, float]] = [(0, math.inf)]
        at = 0
        while at + 1 < len(points):
            n0, r0 = points[at]
            slope, at = max(((r - r0) / (n - n0), -i) for i, (n, r) in enumerate(points[at + 1:], at + 1))
            at = -at
            if slope <= 0 or (len(ladder) > 1 and slope / base < self.floor):
                break
            ladder.append((points[at][0], slope * weight))
        return ladder

    def _value(self, job: Active, left: float) -> float:
        """What its end is worth, against the work that it will really take: 1 without knowledge of early ends."""
        ends = job.job.ends
        if not self.knows_ends or ends is None:
            return 1.0
        done = 1 - left / job.job.work
        return ends.success_from(done) * (1 - done) / max(ends.left_from(done), 1e-9)
