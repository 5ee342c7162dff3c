"""Optimus (EuroSys 2018): one device for each job, then each further one to the job whose remaining time it
shortens most.
"""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace

from paceline.sched.job import Active
from paceline.sched.machine import State
from paceline.sched.policy import Policy
from paceline.sched.speed import OnePhaseSpeed


class Optimus(Policy):
    """Greedy marginal gain over remaining time, in rounds; a job whose size changes is placed anew."""

    name = "optimus"
    placement = "widest"
    follows_reports = True

    def __init__(self, *, interval_s: float = 60.0) -> None:
        self.interval_s = interval_s
        #: seconds for one unit of work by size, of jobs whose speed does not depend on how far they are
        self._unit: dict[str, dict[int, float]] = {}

    def left(self, job: Active, now_s: float) -> None:
        self._unit.pop(job.name, None)

    def decide(self, state: State) -> None:
        sizes = self._sizes(state)
        changed = [job for job in state.jobs.values() if sizes.get(job.index, 0) != job.devices]
        for job in changed:
            if job.devices and job.index not in sizes:
                state.stop(job, "earlier jobs take all devices, one each")
        state.reshape(
            (job, sizes[job.index], f"{sizes[job.index]} devices by marginal gain")
            for job in sorted((j for j in changed if j.index in sizes), key=lambda j: sizes[j.index])
        )

    def _sizes(self, state: State) -> dict[int, int]:
        """Devices by a job's place in the order of submission; who gets none is not in it."""
        free, each = state.devices, state.nodes.node_devices
        sizes: dict[int, int] = {}
        gains: list[tuple[float, int, Active, float, float, dict[int, float] | None]] = []
        for job in state.jobs.values():
            if free < job.job.least:
                continue
            size = sizes[job.index] = job.job.least
            free -= size
            if size < job.job.most:
                left = job.left_at(state.now_s)
                known = (
                    self._unit.setdefault(job.name, {}) if isinstance(job.job.speed, OnePhaseSpeed) else None
                )
                now, more = _seconds(job, left, size, each, known), _seconds(job, left, size + 1, each, known)
                gains.append((more - now, job.index, job, more, left, known))
        heapify(gains)
        while free and gains and gains[0][0] < 0:
            _, index, job, now, left, known = gains[0]
            size = sizes[index] = sizes[index] + 1
            free -= 1
            if size < job.job.most:
                more = _seconds(job, left, size + 1, each, known)
                heapreplace(gains, (more - now, index, job, more, left, known))
            else:
                heappop(gains)
        return sizes


def _seconds(job: Active, left: float, size: int, each: int, known: dict[int, float] | None) -> float:
    """Seconds for so much work on `size` devices; `known` holds those of one unit."""
    if known is None:
        return job.job.speed.seconds(left, job.phase, size, each, False)
    unit = known.get(size)
    if unit is None:
        unit = known[size] = job.job.speed.seconds(1.0, 0, size, each, False)
    return left * unit
