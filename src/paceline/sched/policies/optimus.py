"""Optimus (EuroSys 2018): one device for each job, then each further one to the job whose remaining time it shortens most."""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace

from paceline.sched.job import Active
from paceline.sched.machine import State
from paceline.sched.policy import Policy


class Optimus(Policy):
    """Greedy marginal gain over remaining time, in rounds; a job whose size changes is placed anew."""

    name = "optimus"
    placement = "widest"
    follows_reports = True

    def __init__(self, *, interval_s: float = 60.0) -> None:
        self.interval_s = interval_s

    def decide(self, state: State) -> None:
        sizes = self._sizes(state)
        changed = [job for job in state.jobs.values() if sizes[job.name] != job.devices]
        for job in changed:
            if job.devices and not sizes[job.name]:
                state.stop(job, "earlier jobs take all devices, one each")
        state.reshape(
            (job, sizes[job.name], f"{sizes[job.name]} devices by marginal gain")
            for job in sorted((j for j in changed if sizes[j.name]), key=lambda j: sizes[j.name])
        )

    def _sizes(self, state: State) -> dict[str, int]:
        free, each = state.devices, state.nodes.node_devices
        sizes = dict.fromkeys(state.jobs, 0)
        gains: list[tuple[float, int, Active, float]] = []
        for job in state.jobs.values():
            if free < job.job.least:
                continue
            size = sizes[job.name] = job.job.least
            free -= size
            if size < job.job.most:
                now, more = (job.seconds_left(state.now_s, n, each) for n in (size, size + 1))
                gains.append((more - now, job.index, job, more))
        heapify(gains)
        while free and gains and gains[0][0] < 0:
            _, index, job, now = gains[0]
            size = sizes[job.name] = sizes[job.name] + 1
            free -= 1
            if size < job.job.most:
                more = job.seconds_left(state.now_s, size + 1, each)
                heapreplace(gains, (more - now, index, job, more))
            else:
                heappop(gains)
        return sizes
