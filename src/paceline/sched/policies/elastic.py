"""Elastic policies: which jobs run, and how many devices each gets, by what the next devices are worth.

All of them hand out devices greedily. Going from n to m devices is worth, per device,

    w (s(m) - s(n)) / (m - n),    s(n) = T(1) / T(n),  T(n) = time to success on n devices

the speedup per added device, times a weight of the job. The weight decides the trade between a short wait for
short jobs and efficient use of devices: w = T(1) ** -haste. With haste 0 the sum of speedups is maximal
(efficiency alone; what goodput schedulers maximise); with haste 1 the rate at which jobs get done (shortest
remaining time first, with diminishing returns); larger values lean further to short jobs. Sizes between which
speedup is not concave are jumped over.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from paceline.sched.job import RUNNING, Active
from paceline.sched.machine import State
from paceline.sched.policy import Policy
from paceline.sched.speed import OnePhaseSpeed

#: (size, worth of each device on the way there)
Ladder = list[tuple[int, float]]


class Elastic(Policy):
    """Greedy marginal allocation with restarts weighed against what they bring."""

    def __init__(
        self,
        *,
        haste: float = 1.0,
        adaptive: bool = False,
        floor: float = 0.0,
        knows_ends: bool = False,
        interval_s: float = 60.0,
        review_s: float = 600.0,
        worth: float = 4.0,
        placement: str = "consolidate",
        quotas: Mapping[str, int] | None = None,
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
        #: most devices at once by tenant; others are not limited
        self.quotas = dict(quotas or {})
        self._last_s = 0.0
        self._new: list[Active] = []
        self._queue: list[tuple[tuple[float, float, int], Active, Ladder]] = []
        self._keys: dict[str, tuple[float, float, int]] = {}
        self._shapes: dict[str, Ladder] = {}

    def wake_s(self, state: State) -> float:
        return self._last_s + self.review_s if self.review_s and state.running else math.inf

    def added(self, job: Active, now_s: float) -> None:
        self._new.append(job)

    def removed(self, job: Active, now_s: float) -> None:
        key = self._keys.pop(job.name, None)
        if key is None:
            self._new.remove(job)
        else:
            del self._queue[bisect_left(self._queue, key, key=lambda item: item[0])]

    def left(self, job: Active, now_s: float) -> None:
        self._shapes.pop(job.name, None)

    def decide(self, state: State) -> None:
        self._last_s = state.now_s
        for job in self._new:  # a waiting job's worth does not change: it is found once
            ladder = self._ladder(state, job)
            if len(ladder) > 1:
                key = self._keys[job.name] = (-job.job.priority, -ladder[1][1], job.index)
                insort(self._queue, (key, job, ladder))
        self._new = [job for job in self._new if job.name not in self._keys]
        if not state.jobs:
            return
        sizes = self._settled(state)
        changed = [job for job in state.running.values() if sizes[job.name] != job.devices]
        for job in [job for job in changed if not sizes[job.name]]:
            state.stop(job, "its devices are worth more to other jobs")
        moves = [job for job in changed if sizes[job.name]] + [
            state.jobs[name] for name, size in sizes.items() if size and name in state.waiting
        ]
        moves.sort(key=lambda job: (-sizes[job.name], job.index))
        state.reshape([(job, sizes[job.name], self._why(job, sizes[job.name])) for job in moves])

    def _why(self, job: Active, size: int) -> str:
        if job.status != RUNNING:
            return f"{size} device{'s are' if size > 1 else ' is'} worth most to it"
        return (
            f"{'more' if size > job.devices else 'fewer'} devices: {job.devices} to {size} by marginal"
            " speedup"
        )

    def _settled(self, state: State) -> dict[str, int]:
        """Sizes, after changes that are not worth a restart were taken back."""
        fixed: dict[str, int] = {}
        ladders = [(job, self._ladder(state, job)) for job in state.running.values()]
        ladders += [(job, ladder) for _, job, ladder in self._queue[: state.devices]]
        while True:
            sizes = self._sizes(state, ladders, fixed)
            kept = {
                job.name: job.devices
                for job in state.running.values()
                if job.name not in fixed
                and sizes[job.name] != job.devices
                and not self._pays(state, job, sizes[job.name])
            }
            if not kept:
                return sizes
            fixed |= kept

    def _pays(self, state: State, job: Active, size: int) -> bool:
        """Whether a running job should change: growth must save more than it costs; shrinking frees devices
        for others, unless it is nearly done.
        """
        each, now = state.nodes.node_devices, state.now_s
        here = job.seconds_left(now, job.devices, each, self.adaptive)
        cost = self.worth * (job.job.restart_s + job.job.checkpoint_s)
        if size > job.devices:
            return here - job.seconds_left(now, size, each, self.adaptive) > cost
        return here > cost

    def _sizes(
        self, state: State, ladders: list[tuple[Active, Ladder]], fixed: Mapping[str, int]
    ) -> dict[str, int]:
        free = state.devices - sum(fixed.values())
        sizes = {job.name: fixed.get(job.name, 0) for job, _ in ladders}
        used: dict[str, int] = {}
        for name, size in fixed.items():
            tenant = state.jobs[name].job.tenant
            used[tenant] = used.get(tenant, 0) + size
        heap = [
            (-job.job.priority, -ladder[1][1], job.index, job, ladder, 1)
            for job, ladder in ladders
            if len(ladder) > 1 and job.name not in fixed
        ]
        heapify(heap)
        while heap and free > 0:
            priority, _, index, job, ladder, step = heappop(heap)
            more = ladder[step][0] - ladder[step - 1][0]
            tenant = job.job.tenant
            if more > free or (tenant in self.quotas and used.get(tenant, 0) + more > self.quotas[tenant]):
                continue
            free -= more
            used[tenant] = used.get(tenant, 0) + more
            sizes[job.name] = ladder[step][0]
            if step + 1 < len(ladder):
                heappush(heap, (priority, -ladder[step + 1][1], index, job, ladder, step + 1))
        return sizes

    def _ladder(self, state: State, job: Active) -> Ladder:
        """(size, worth of each device on the way there) from none up, with falling worth."""
        left = max(job.left_at(state.now_s), 1e-9 * job.job.work)
        value = self._value(job, left)
        if not isinstance(job.job.speed, OnePhaseSpeed):
            return [(n, w * value) for n, w in self._shape(state, job, left)]
        # how worth falls with size does not depend on how much is left: found once for a job
        if job.name not in self._shapes:
            self._shapes[job.name] = self._shape(state, job, 1.0)
        scale = left**-self.haste * value
        return [(n, w * scale) for n, w in self._shapes[job.name]]

    def _shape(self, state: State, job: Active, left: float) -> Ladder:
        each, most = state.nodes.node_devices, max(state.nodes.total.values())
        sizes = [n for n in job.job.sizes(most) if n <= each or n % each == 0 or n == job.job.least]
        times = [job.job.speed.seconds(left, job.phase, n, each, self.adaptive) for n in sizes]
        points = [(0, 0.0), *((n, 1 / t) for n, t in zip(sizes, times, strict=True) if 0 < t < math.inf)]
        ladder: Ladder = [(0, math.inf)]
        if len(points) < 2:
            return ladder
        base = points[1][1] / points[1][0]
        weight = base ** (self.haste - 1)
        at = 0
        while at + 1 < len(points):
            n0, r0 = points[at]
            slope, at = max(((r - r0) / (n - n0), -i) for i, (n, r) in enumerate(points[at + 1 :], at + 1))
            at = -at
            if slope <= 0 or (len(ladder) > 1 and slope / base < self.floor):
                break
            ladder.append((points[at][0], slope * weight))
        return ladder

    def _value(self, job: Active, left: float) -> float:
        """What its end is worth, against the work that it will really take: 1 without knowledge of early
        ends.
        """
        ends = job.job.ends
        if not self.knows_ends or ends is None:
            return 1.0
        done = 1 - left / job.job.work
        return ends.success_from(done) * (1 - done) / max(ends.left_from(done), 1e-9)
