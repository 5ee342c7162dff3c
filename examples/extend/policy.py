"""A scheduling policy: smallest jobs first, but a job that has waited long enough goes before all others.

    paceline --extend examples/extend/policy.py simulate --policy "smallest(patience_s=3600),srtf"
    paceline --extend examples/extend/policy.py schedule --policy smallest --nodes 2x1 jobs.toml

In a program, `import policy` is all; then `paceline.sched.policies.get("smallest")`.
"""

from __future__ import annotations

from paceline.sched import Policy
from paceline.sched.job import Active
from paceline.sched.machine import State
from paceline.sched.policies import register


@register
class Smallest(Policy):
    """Smallest jobs first; nobody passes a job that has waited for `patience_s` seconds."""

    name = "smallest"

    def __init__(self, *, patience_s: float = 4 * 3600.0) -> None:
        self.patience_s = patience_s

    def decide(self, state: State) -> None:
        def order(job: Active) -> tuple[bool, float]:
            patient = not self._overdue(job, state.now_s)
            return patient, job.job.devices if patient else job.job.submit_s

        for job in sorted(state.waiting.values(), key=order):
            overdue = self._overdue(job, state.now_s)
            reason = "has waited long enough" if overdue else "smallest of those that wait"
            started = state.start(job, job.job.devices, reason)
            if overdue and not started:
                return  # devices that become free are kept for it

    def _overdue(self, job: Active, now_s: float) -> bool:
        return now_s - job.job.submit_s >= self.patience_s
