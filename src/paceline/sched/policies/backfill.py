"""FIFO with EASY backfill: later jobs may go first where they do not delay the one at the head."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.sched.job import Active
from paceline.sched.machine import State
from paceline.sched.policies.ranked import RankedPolicy, asked_s


class Easy(RankedPolicy):
    """The head of the queue is promised the devices that are free soonest; others start now if they end
    before that, or fit beside it.
    """

    name = "easy"

    def __init__(self, *, depth: int = 200, quotas: Mapping[str, int] | None = None) -> None:
        super().__init__(quotas=quotas)
        #: jobs behind the head that are looked at
        self.depth = depth

    def rank(self, job: Active, now_s: float) -> float:
        return job.job.submit_s

    def decide(self, state: State) -> None:
        while self._queues:
            head = min(queue[0] for queue in self._queues.values())[1]
            if not state.fits(head.job.devices) or not state.start(
                head, head.job.devices, "first in the queue"
            ):
                break
        if self._queues and state.free:
            self._fill(state, head)

    def _fill(self, state: State, head: Active) -> None:
        shadow_s, spare = self._promise(state, head)
        behind = sorted(
            item
            for (size, _), queue in self._queues.items()
            if size <= state.free
            for item in queue[: self.depth]
        )
        for _, job in behind[: self.depth]:
            size = job.job.devices
            if job is head or not state.fits(size):
                continue
            in_time = state.now_s + asked_s(job, state.now_s) <= shadow_s
            if (in_time or size <= spare) and state.start(
                job, size, "fills a gap" if in_time else "fits beside what the head will get"
            ):
                spare -= 0 if in_time else size

    def _promise(self, state: State, head: Active) -> tuple[float, int]:
        """(when the head can start, devices left beside it then)."""
        free = state.free
        for end_s, _, job in sorted(
            (state.now_s + asked_s(job, state.now_s), job.index, job) for job in state.running.values()
        ):
            free += job.devices
            if free >= head.job.devices:
                return end_s, free - head.job.devices
        return float("inf"), 0
