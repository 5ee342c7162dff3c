"""Policies that rank jobs and run those of the best rank at the size they ask for: FIFO, shortest job, shortest remaining time or service."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Mapping
from heapq import heapify, heappop, heapreplace
from typing import Any

from paceline.sched.job import RUNNING, Active
from paceline.sched.machine import State
from paceline.sched.policy import Policy

#: (minus the priority, rank, order of submission): unique, so that nothing after it is compared
Key = tuple[float, Any, int]
Item = tuple[Key, Active]


class Ordered(Policy):
    """Runs jobs in order of rank as far as devices go. A waiting job's rank does not change, so that queues stay sorted.

    Waiting jobs stand in one sorted queue for each size: a size that no longer fits is skipped whole (`backfills`) or ends the search.
    """

    #: whether waiting jobs of a better rank stop running ones
    preempts = False
    #: whether a job may pass one ahead of it that does not fit
    backfills = True

    def __init__(self, *, quotas: Mapping[str, int] | None = None) -> None:
        #: most devices at once by tenant; others are not limited
        self.quotas = dict(quotas or {})
        self._queues: dict[tuple[int, str], list[Item]] = {}
        self._keys: dict[str, Key] = {}

    def rank(self, job: Active, now_s: float) -> Any:
        """Lower runs first."""
        raise NotImplementedError

    def why(self, job: Active) -> str:
        """Why a job of its rank is next."""
        return "next in order"

    def key(self, job: Active, now_s: float) -> Key:
        return (-job.job.priority, self.rank(job, now_s), job.index)

    def added(self, job: Active, now_s: float) -> None:
        key = self._keys[job.name] = self.key(job, now_s)
        insort(self._queues.setdefault(self._queue(job), []), (key, job))

    def removed(self, job: Active, now_s: float) -> None:
        queue = self._queues[self._queue(job)]
        key = self._keys.pop(job.name)
        del queue[bisect_left(queue, key, key=lambda item: item[0])]
        if not queue:
            del self._queues[self._queue(job)]

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
        """Walks running and waiting jobs in order of rank and gives out devices; what was running and got none is to be stopped."""
        now, nodes = state.now_s, state.nodes
        budget = dict(nodes.total if self.preempts else nodes.free_total)
        if max(nodes.free_total.values()) < min(size for size, _ in self._queues) and not self.preempts:
            return [], []
        held = sorted((self.key(job, now), job) for job in state.running.values()) if self.preempts else []
        used: dict[str, int] = {}
        if self.quotas and not self.preempts:
            for job in state.running.values():
                used[job.job.tenant] = used.get(job.job.tenant, 0) + job.devices
        starts: list[tuple[Active, str]] = []
        stops: list[Active] = []
        heads = [(queue[0][0], 0, name) for name, queue in self._queues.items()]
        heapify(heads)
        at, count = 0, len(held)
        while heads or (at < count and starts):
            if at < count and (not heads or held[at][0] < heads[0][0]):
                job = held[at][1]
                at += 1
                if budget[job.kind] >= job.devices:
                    budget[job.kind] -= job.devices
                    if self.quotas:
                        used[job.job.tenant] = used.get(job.job.tenant, 0) + job.devices
                else:
                    stops.append(job)
                continue
            _, place, name = heads[0]
            size, tenant = name
            kind = next((k for k in state.kinds if budget[k] >= size), None)
            if kind is None and not self.backfills:
                break
            if kind is None or (tenant and used.get(tenant, 0) + size > self.quotas[tenant]):
                heappop(heads)
                continue
            job = self._queues[name][place][1]
            budget[kind] -= size
            if tenant:
                used[tenant] = used.get(tenant, 0) + size
            starts.append((job, kind))
            if place + 1 < len(self._queues[name]):
                heapreplace(heads, (self._queues[name][place + 1][0], place + 1, name))
            else:
                heappop(heads)
        return starts, stops


class Fifo(Ordered):
    """First come, first served; the first that does not fit holds up all behind it."""

    name = "fifo"
    backfills = False

    def rank(self, job: Active, now_s: float) -> float:
        return job.job.submit_s

    def why(self, job: Active) -> str:
        return "first in the queue"


class Sjf(Ordered):
    """Shortest job first by the time it asks for, never stopped; smaller ones pass those that do not fit."""

    name = "sjf"

    def rank(self, job: Active, now_s: float) -> float:
        return asked_s(job, now_s)

    def why(self, job: Active) -> str:
        return "shortest of those that fit"


class Srtf(Sjf):
    """Shortest remaining time first; running jobs are stopped for shorter ones. `service`: time x devices decides."""

    name = "srtf"
    preempts = True

    def __init__(self, *, service: bool = False, quotas: Mapping[str, int] | None = None) -> None:
        super().__init__(quotas=quotas)
        self.service = service

    def rank(self, job: Active, now_s: float) -> float:
        return asked_s(job, now_s) * (job.job.devices if self.service else 1)

    def why(self, job: Active) -> str:
        return "least work left of those that fit"


def asked_s(job: Active, now_s: float) -> float:
    """Seconds to success at the size that a job has, or asks for."""
    if job.status == RUNNING:
        return job.left_at(now_s) / job.rate + max(0.0, job.ready_s - now_s) if job.rate else math.inf
    return job.job.speed.seconds(job.left_at(now_s), job.phase, job.job.devices, job.job.devices, False)
