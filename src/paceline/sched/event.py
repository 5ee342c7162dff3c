"""What can happen: the only things that the state machine is told. Times are seconds on one clock, never
before the last one told.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.errors import SpecError
from paceline.sched.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened at `time_s`."""

    time_s: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the log."""
        out: dict[str, Any] = {"event": type(self).__name__.lower(), "time_s": self.time_s}
        for name in self.__dataclass_fields__:
            if name != "time_s":
                value = getattr(self, name)
                out[name] = value.name if isinstance(value, Job) else value
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit(Event):
    """A job arrived."""

    job: Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(Event):
    """The time at which the machine asked to be woken has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Event):
    """A running job says how far it is: work done, and the phase (epoch) it is in."""

    name: str
    done: float
    phase: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Event):
    """A job is over: `completed`, `killed` by its user, `failed`, or `cancelled` before it ran."""

    name: str
    outcome: str = "completed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted(Event):
    """The engine took a job's devices away unasked; `done` is the work that its last checkpoint holds."""

    name: str
    done: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDown(Event):
    """A node is gone; jobs on it are preempted by events of their own, told before this one."""

    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUp(Event):
    """A node is back."""

    node: int


KINDS: dict[str, type[Event]] = {
    kind.__name__.lower(): kind for kind in (Submit, Tick, Report, Ended, Preempted, NodeDown, NodeUp)
}


def from_dict(entry: dict[str, Any], jobs: dict[str, Job]) -> Event:
    """An event of a log again; `jobs` finds the jobs that were submitted by name."""
    given = dict(entry)
    kind = given.pop("event", None)
    if kind not in KINDS:
        raise SpecError(f"a log entry has no event that is known: {kind!r}; allowed: {', '.join(KINDS)}")
    if kind == "submit":
        if given["job"] not in jobs:
            raise SpecError(f"the log submits {given['job']!r}, a job that was not given")
        given["job"] = jobs[given["job"]]
    return KINDS[kind](**given)
