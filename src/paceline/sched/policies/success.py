"""Policies that know how jobs end early.

`Success` is the index policy of Yao, Paolieri and Golubchik ("Scheduling to Optimize Sojourn Time of
Successful Jobs", 2022): a job is worth its chance of success per device-second that it is still expected to
take. Over the checkpoints at which jobs of its kind end, the chance rises and the rest falls, so a job that
runs is overtaken only by arrivals.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.sched.job import Active
from paceline.sched.policies.ranked import DRIFTS, RankedPolicy, asked_s


class Success(RankedPolicy):
    """Expected remaining service over the chance of success; least first. `preempts`: arrivals with a better
    index stop running jobs.
    """

    name = "success"
    running_ranks = DRIFTS

    def __init__(
        self, *, preempts: bool = True, service: bool = True, quotas: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(quotas=quotas)
        #: whether devices count: device-seconds, or seconds
        self.service = service
        self.preempts = preempts

    def rank(self, job: Active, now_s: float) -> float:
        return asked_s(job, now_s) * expected(job, now_s) * (job.job.devices if self.service else 1)

    def why(self, job: Active) -> str:
        return (
            "best chance of success per expected device-second"
            if self.service
            else "best chance of success per expected second"
        )


def expected(job: Active, now_s: float) -> float:
    """Expected work over work to success, over the chance of success, from where a job stands: 1 where
    nothing is known.
    """
    ends = job.job.ends
    left = job.left_at(now_s) / job.job.work
    if ends is None or left <= 0:
        return 1.0
    return ends.left_from(1 - left) / left / max(ends.success_from(1 - left), 1e-9)
