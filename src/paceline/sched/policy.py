"""What a policy is. A simulation and the live engines hold the same object and ask it the same questions.

A policy of one's own needs one method:

    from paceline.sched import Policy

    class Mine(Policy):
        def decide(self, state):
            for job in list(state.waiting.values()):
                if state.fits(job.job.devices):
                    state.start(job, job.job.devices, "it is next and fits")
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.sched.job import Active
    from paceline.sched.machine import State


class Policy(ABC):
    """Decides which jobs run, and on how many devices.

    Deterministic: the same events give the same decisions.
    """

    name: str = ""
    #: 0: asked after each event; else only at multiples of so many seconds, when something happened since
    interval_s: float = 0.0
    #: how sizes become nodes (a name of `placement.STRATEGIES`)
    placement: str = "consolidate"
    #: whether jobs may choose their batch for goodput
    adaptive: bool = False
    #: whether a report of progress is reason to be asked again
    follows_reports: bool = False

    @abstractmethod
    def decide(self, state: State) -> None:
        """Says by `state.start`, `state.resize` and `state.stop` what is to change, each with its reason."""

    def added(self, job: Active, now_s: float) -> None:  # noqa: B027  (a policy without an order of its own ignores it)
        """A job waits: it arrived, or it was stopped or preempted."""

    def removed(self, job: Active, now_s: float) -> None:  # noqa: B027
        """A job waits no more: it was started, or is over."""

    def reported(self, job: Active, now_s: float) -> None:  # noqa: B027
        """A running job said how far it is, or entered another phase."""

    def left(self, job: Active, now_s: float) -> None:  # noqa: B027
        """A job is over."""

    def wake_s(self, state: State) -> float:
        """When it wants to be asked though nothing happens, in seconds; infinity: never."""
        return math.inf
