"""Policies that rank jobs and run those of the best rank at the size they ask for: FIFO, shortest job,
shortest remaining time or service.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping
from heapq import heapify, heappop, heapreplace
from itertools import accumulate
from typing import Any

from paceline.sched.job import RUNNING, Active
from paceline.sched.machine import State
from paceline.sched.policy import Policy

#: (minus the priority, rank, order of submission): unique, so that nothing after it is compared
Key = tuple[float, Any, int]
Item = tuple[Key, Active]
#: how ranks of running jobs change: not at all; all by the time that passes; each by itself
STILL, SHIFTS, DRIFTS = "still", "shifts", "drifts"


class RankedPolicy(Policy):
    """Runs jobs in order of rank as far as devices go. A waiting job's rank does not change, so that queues
    stay sorted.

    Waiting jobs stand in one sorted queue for each size: a size that no longer fits is skipped whole
    (`backfills`) or ends the search.
    """

    #: whether waiting jobs of a better rank stop running ones
    preempts = False
    #: whether a job may pass one ahead of it that does not fit
    backfills = True
    #: a rank that `shifts` is given as the time at which it would be nil
    running_ranks = STILL

    def __init__(self, *, quotas: Mapping[str, int] | None = None) -> None:
        #: most devices at once by tenant; others are not limited
        self.quotas = dict(quotas or {})
        self._queues: dict[tuple[int, str], list[Item]] = {}
        self._keys: dict[str, Key] = {}
        self._running: list[Item] = []
        self._running_keys: dict[str, Key] = {}
        self._wanted = 0

    @abstractmethod
    def rank(self, job: Active, now_s: float) -> Any:
        """Lower runs first."""

    def why(self, job: Active) -> str:
        """Why a job of its rank is next."""
        return "next in order"

    def key(self, job: Active, now_s: float) -> Key:
        return (-job.job.priority, self.rank(job, now_s), job.index)

    def added(self, job: Active, now_s: float) -> None:
        self._drop(job)
        key = self._keys[job.name] = self.key(job, now_s)
        insort(self._queues.setdefault(self._queue(job), []), (key, job))
        self._wanted += job.job.devices

    def removed(self, job: Active, now_s: float) -> None:
        queue = self._queues[self._queue(job)]
        key = self._keys.pop(job.name)
        del queue[_find(queue, key)]
        if not queue:
            del self._queues[self._queue(job)]
        self._wanted -= job.job.devices
        if self.preempts and job.status == RUNNING:
            self._hold(job, now_s)

    def reported(self, job: Active, now_s: float) -> None:
        if job.name in self._running_keys:
            self._drop(job)
            self._hold(job, now_s)

    def left(self, job: Active, now_s: float) -> None:
        self._drop(job)

    def _hold(self, job: Active, now_s: float) -> None:
        priority, rank, index = self.key(job, now_s)
        key = self._running_keys[job.name] = (
            priority,
            rank + now_s if self.running_ranks == SHIFTS else rank,
            index,
        )
        insort(self._running, (key, job))

    def _drop(self, job: Active) -> None:
        key = self._running_keys.pop(job.name, None)
        if key is not None:
            del self._running[_find(self._running, key)]

    def _queue(self, job: Active) -> tuple[int, str]:
        return job.job.devices, job.job.tenant if job.job.tenant in self.quotas else ""

    def decide(self, state: State) -> None:
        if not self._queues:
            return
        starts, stops = self._choose(state)
        for job in stops:
            state.stop(job, "jobs of a better rank need its devices")
        for job, kind in starts:
            state.start(job, job.job.devices, self.why(job), kind)

    def _choose(self, state: State) -> tuple[list[tuple[Active, str]], list[Active]]:
        """Walks running and waiting jobs in order of rank and gives out devices; what was running and got
        none is to be stopped.
        """
        free = state.nodes.free_total
        running = self._running
        fits = max(free.values()) >= min(size for size, _ in self._queues)
        if not self.preempts or (len(free) == 1 and not self.quotas and self._wanted <= state.free):
            return self._walk(state, dict(free), []) if fits else ([], [])  # nobody has to make room
        if self.running_ranks == DRIFTS:
            self._running = running = sorted(
                (self.key(job, state.now_s), job) for job in state.running.values()
            )
            self._running_keys = {job.name: key for key, job in running}
        if (
            not fits
            and running
            and min(queue[0][0] for queue in self._queues.values())
            > self._as_waiting(running[-1][0], state.now_s)
        ):
            return [], []  # all that wait rank behind all that run
        return self._walk(state, dict(state.nodes.total), running)

    def _as_waiting(self, key: Key, now_s: float) -> Key:
        return (key[0], key[1] - now_s, key[2]) if self.running_ranks == SHIFTS else key

    def _as_running(self, key: Key, now_s: float) -> Key:
        return (key[0], key[1] + now_s, key[2]) if self.running_ranks == SHIFTS else key

    def _skip(
        self,
        state: State,
        budget: dict[str, int],
        running: list[Item],
        heads: list[tuple[Key, int, tuple[int, str]]],
        starts: list[tuple[Active, str]],
    ) -> int:
        """The first part of a walk without its steps: up to the running job that no longer fits, room is a
        difference of sums.
        """
        kind = state.kinds[0]
        sums = list(accumulate([job.devices for _, job in running], initial=0))
        whole, started = budget[kind], 0
        while True:
            fails = bisect_right(sums, whole - started) - 1
            if not heads:
                break
            key, place, name = heads[0]
            at = _find(running, key)
            if at > fails:
                break
            if whole - sums[at] - started < name[0]:
                heappop(heads)
                continue
            starts.append((self._queues[name][place][1], kind))
            started += name[0]
            if place + 1 < len(self._queues[name]):
                heapreplace(
                    heads, (self._as_running(self._queues[name][place + 1][0], state.now_s), place + 1, name)
                )
            else:
                heappop(heads)
        budget[kind] = whole - sums[fails] - started
        return fails

    def _walk(
        self, state: State, budget: dict[str, int], running: list[Item]
    ) -> tuple[list[tuple[Active, str]], list[Active]]:
        now, queues, quotas = state.now_s, self._queues, self.quotas
        used = _used(state) if quotas and not running else {}
        starts: list[tuple[Active, str]] = []
        stops: list[Active] = []
        heads = [(self._as_running(queue[0][0], now), 0, name) for name, queue in queues.items()]
        heapify(heads)
        at, count = 0, len(running)
        if running and len(budget) == 1 and not quotas and self.backfills:
            at = self._skip(state, budget, running, heads, starts)
        while heads or (at < count and starts):
            if at < count and (not heads or running[at][0] < heads[0][0]):
                job = running[at][1]
                at += 1
                if budget[job.kind] < job.devices:
                    stops.append(job)
                    continue
                budget[job.kind] -= job.devices
                if quotas:
                    used[job.job.tenant] = used.get(job.job.tenant, 0) + job.devices
                continue
            _, place, name = heads[0]
            size, tenant = name
            kind = next((k for k in state.kinds if budget[k] >= size), None)
            if kind is None and not self.backfills:
                break
            if kind is None or (tenant and used.get(tenant, 0) + size > quotas[tenant]):
                heappop(heads)
                continue
            starts.append((queues[name][place][1], kind))
            budget[kind] -= size
            if tenant:
                used[tenant] = used.get(tenant, 0) + size
            if place + 1 < len(queues[name]):
                heapreplace(heads, (self._as_running(queues[name][place + 1][0], now), place + 1, name))
            else:
                heappop(heads)
        return starts, stops


def _used(state: State) -> dict[str, int]:
    """Devices held by tenant."""
    used: dict[str, int] = {}
    for job in state.running.values():
        used[job.job.tenant] = used.get(job.job.tenant, 0) + job.devices
    return used


def _find(items: list[Item], key: Key) -> int:
    return bisect_left(items, key, key=lambda item: item[0])


class Fifo(RankedPolicy):
    """First come, first served; the first that does not fit holds up all behind it."""

    name = "fifo"
    backfills = False

    def rank(self, job: Active, now_s: float) -> float:
        return job.job.submit_s

    def why(self, job: Active) -> str:
        return "first in the queue"


class Sjf(RankedPolicy):
    """Shortest job first by the time it asks for, never stopped; smaller ones pass those that do not fit."""

    name = "sjf"

    def rank(self, job: Active, now_s: float) -> float:
        return asked_s(job, now_s)

    def why(self, job: Active) -> str:
        return "shortest of those that fit"


class Srtf(Sjf):
    """Shortest remaining time first; running jobs are stopped for shorter ones."""

    name = "srtf"
    preempts = True
    running_ranks = SHIFTS

    def why(self, job: Active) -> str:
        return "least time left of those that fit"


class Srsf(Srtf):
    """Shortest remaining service first: time times devices."""

    name = "srsf"
    running_ranks = DRIFTS

    def rank(self, job: Active, now_s: float) -> float:
        return asked_s(job, now_s) * job.job.devices

    def why(self, job: Active) -> str:
        return "least device time left of those that fit"


def asked_s(job: Active, now_s: float) -> float:
    """Seconds to success at the size that a job has, or asks for; what is left of its restart, or the one it
    needs, among them.
    """
    if job.status == RUNNING:
        return job.left_at(now_s) / job.rate + max(0.0, job.ready_s - now_s) if job.rate else math.inf
    return (
        job.job.restart_s
        + job.owes_s
        + job.job.speed.seconds(job.left_at(now_s), job.phase, job.job.devices, job.job.devices, False)
    )
