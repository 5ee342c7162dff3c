"""The Gittins index over levels of attained service, learnt from jobs that are over; it does not need to know
how long a job is.

A level is worth the best chance to end per device-second spent in it and after it,

    max over g > a of P(a < S <= g) / E[min(S, g) - a],    given S > a

with S the device-seconds of past jobs of the same class: tenant and size. With `successes` only jobs that
succeeded count as ends that are worth something; the device time of those that were killed or failed is spent
for nothing (the index of Yao, Paolieri and Golubchik, 2022, with levels as checkpoints).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence

from paceline.sched.job import Active
from paceline.sched.policies.las import Las
from paceline.sched.policies.ranked import RankedPolicy

#: (tenant, doublings of devices)
Class = tuple[str, int]


class Gittins(Las):
    """Ranks levels by the index of a job's class; of all jobs where few of its class came so far; by the
    level itself while all are few.
    """

    name = "gittins"

    def __init__(
        self,
        *,
        levels: int = 12,
        learns_after: int = 50,
        classes: bool = True,
        successes: bool = False,
        interval_s: float = 60.0,
        quotas: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(
            thresholds=tuple(60.0 * 3.0**i for i in range(levels)), interval_s=interval_s, quotas=quotas
        )
        self.learns_after = learns_after
        self.classes = classes
        self.successes = successes
        self._seen: dict[Class | None, list[tuple[float, bool]]] = defaultdict(list)
        self._index: dict[Class | None, list[float]] = {}
        self._next = learns_after

    def _class(self, job: Active) -> Class:
        return job.job.tenant, job.job.devices.bit_length()

    def rank_of(self, job: Active, level: int) -> float:
        everyone = self._index.get(None)
        if everyone is None:
            return float(level)
        index = self._index.get(self._class(job), everyone) if self.classes else everyone
        return -(index if level < len(index) else everyone)[level]

    def left(self, job: Active, now_s: float) -> None:
        super().left(job, now_s)
        entry = (job.attained_s, job.outcome == "completed" or not self.successes)
        for group in (None, self._class(job)) if self.classes else (None,):
            self._seen[group].append(entry)
        if len(self._seen[None]) >= self._next:
            self._next = int(self._next * 1.5) + 1
            self._index = {
                group: _indices(seen, self.thresholds, self.learns_after)
                for group, seen in self._seen.items()
            }
            self._index[None] = _beyond(self._index[None], self.thresholds)
            self._resort(now_s)

    def _resort(self, now_s: float) -> None:
        """Ranks have changed: queues and running jobs are sorted anew."""
        waiting = [job for queue in self._queues.values() for _, job in queue]
        running = [job for _, job in self._running]
        self._queues.clear()
        self._wanted = 0
        for job in waiting:
            RankedPolicy.added(self, job, now_s)
        self._running.clear()
        self._running_keys.clear()
        for job in running:
            self._hold(job, now_s)


def _indices(seen: Sequence[tuple[float, bool]], thresholds: Sequence[float], enough: int) -> list[float]:
    """The index at the start of each level that at least `enough` jobs reached: of fewer, one that is over by
    chance would decide.
    """
    ordered = sorted(seen)
    sizes = [size for size, _ in ordered]
    goals = [*thresholds, sizes[-1] + 1.0]
    out = []
    for start in (0.0, *thresholds):
        first = bisect_right(sizes, start)
        if len(sizes) - first < enough:
            break
        best, good, spent, at = 0.0, 0, 0.0, first
        for goal in goals[bisect_right(goals, start) :]:
            until = bisect_right(sizes, goal)
            spent += sum(sizes[at:until])
            good += sum(worth for _, worth in ordered[at:until])
            at = until
            cost = spent + goal * (len(sizes) - until) - start * (len(sizes) - first)
            if cost > 0:
                best = max(best, good / cost)
        out.append(best)
    return out


def _beyond(index: list[float], thresholds: Sequence[float]) -> list[float]:
    """For the levels that few reached: lengths there fall off as a power, so that the index falls as service
    attained grows.
    """
    out = index[:]
    for level in range(len(index), len(thresholds) + 1):
        out.append(out[-1] * thresholds[level - 2] / thresholds[level - 1] if level > 1 else out[-1])
    return out
