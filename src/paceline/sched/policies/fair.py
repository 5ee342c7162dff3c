"""Fair shares of devices over time, on one kind of device or several (after Gavel, OSDI 2020).

Each active job is owed an equal share of the cluster. Rounds give devices to the jobs that have had least of
what they were owed, measured in normalised progress: what a job did over what it would do alone on the
fastest kind. `Gavel` sends each job to the kind where it gains most over the others, so that slow kinds are
left to jobs that mind least; `MaxMin` does not tell kinds apart.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.sched.job import RUNNING, Active
from paceline.sched.machine import State
from paceline.sched.policy import Policy
from paceline.sched.speed import packed


class MaxMin(Policy):
    """Least normalised service first, in rounds; no job holds devices while one with less waits for them."""

    name = "maxmin"
    aware = False

    def __init__(self, *, interval_s: float = 360.0, quotas: Mapping[str, int] | None = None) -> None:
        self.interval_s = interval_s
        self.quotas = dict(quotas or {})
        self._rates: dict[tuple[str, str], float] = {}
        self._usual: dict[str, float] = {}

    def wake_s(self, state: State) -> float:
        return state.now_s + self.interval_s if state.waiting else float("inf")

    def left(self, job: Active, now_s: float) -> None:
        for key in [key for key in self._rates if key[0] == job.name]:
            del self._rates[key]

    def decide(self, state: State) -> None:
        if not state.waiting and not self.aware:
            return
        budget = dict(state.nodes.total)
        wanted: list[tuple[Active, str]] = []
        kinds = [kind for kind in state.kinds if budget[kind]]
        best = {name: max(self._rate(state, job, kind) for kind in kinds) for name, job in state.jobs.items()}
        self._usual = (
            {
                kind: sum(
                    self._rate(state, job, kind) / best[name]
                    for name, job in state.jobs.items()
                    if best[name] > 0
                )
                / len(state.jobs)
                for kind in kinds
            }
            if self.aware and state.jobs
            else {}
        )
        for job in sorted(
            state.jobs.values(),
            key=lambda j: (-j.job.priority, self._had(j, best[j.name], state.now_s), j.index),
        ):
            kind = self._choose(state, job, kinds, budget, best[job.name])
            if kind:
                budget[kind] -= job.job.devices
                wanted.append((job, kind))
        self._carry_out(state, wanted)

    def _carry_out(self, state: State, wanted: list[tuple[Active, str]]) -> None:
        keep = {job.name for job, kind in wanted if job.kind == kind or job.status != RUNNING}
        for job in [job for job in state.running.values() if job.name not in keep]:
            state.stop(job, "it has had more than its share, or runs better elsewhere")
        for job, kind in wanted:
            if job.status != RUNNING:
                state.start(job, job.job.devices, f"has had least of its share; {kind}", kind)

    def _rate(self, state: State, job: Active, kind: str) -> float:
        key = job.name, kind
        if key not in self._rates:
            self._rates[key] = job.job.speed.rate(
                packed(job.job.devices, state.nodes.node_devices), kind, job.phase, self.adaptive
            )
        return self._rates[key]

    def _had(self, job: Active, best: float, now_s: float) -> float:
        """Normalised progress since submission, as a share of the time."""
        return job.done_at(now_s) / best / max(now_s - job.job.submit_s, 1.0) if best > 0 else 0.0

    def _choose(
        self, state: State, job: Active, kinds: list[str], budget: Mapping[str, int], best: float
    ) -> str:
        fitting = [
            kind for kind in kinds if budget[kind] >= job.job.devices and self._rate(state, job, kind) > 0
        ]
        if not fitting:
            return ""
        if job.status == RUNNING and job.kind in fitting and not self.aware:
            return job.kind
        return max(
            fitting,
            key=lambda kind: (self._worth(state, job, kind, best), kind == job.kind, -kinds.index(kind)),
        )

    def _worth(self, state: State, job: Active, kind: str, best: float) -> float:
        return 0.0


class Gavel(MaxMin):
    """Max-min fairness that knows how fast each job is on each kind: a kind goes to the jobs with the
    comparative advantage on it.
    """

    name = "gavel"
    aware = True

    def _worth(self, state: State, job: Active, kind: str, best: float) -> float:
        """Its rate there over what active jobs usually reach there: comparative advantage; a move needs 5 %
        of it as a reason.
        """
        return self._rate(state, job, kind) / best / self._usual[kind] + (
            0.05 if job.kind == kind and job.status == RUNNING else 0.0
        )
