"""The scheduler as a state machine without clock, network or disk: events in, decisions out.

A driver (the simulator, or a live engine) tells `StateMachine.handle` what happened, carries out the
decisions that it returns, and sends a `Tick` at `StateMachine.wake_s`. Decisions of one batch take effect
at once for the machine: what a batch stops or moves is free for what it starts. The log holds each event
with its decisions; `replay` runs it again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import SpecError
from paceline.sched import event as ev
from paceline.sched import placement
from paceline.sched.decision import Allocation, Decision, Resize, Start, Stop
from paceline.sched.job import OVER, RUNNING, WAITING, Active, Job
from paceline.sched.nodes import ClusterShape, Nodes
from paceline.sched.policy import Policy
from paceline.sched.speed import checked


@dataclass(frozen=True, slots=True)
class EventRecord:
    """One step of the log."""

    event: ev.Event
    decisions: tuple[Decision, ...]
    #: told together with the next one
    quiet: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain values: one line of a log file."""
        more = {"quiet": True} if self.quiet else {}
        return {
            **self.event.to_dict(),
            **more,
            "decisions": [decision.to_dict() for decision in self.decisions],
        }


class State:
    """What a policy sees, and how it says what it wants."""

    __slots__ = ("_place", "decisions", "jobs", "kinds", "nodes", "now_s", "policy", "running", "waiting")

    def __init__(self, shape: ClusterShape, policy: Policy) -> None:
        self.now_s = 0.0
        self.nodes = Nodes(shape)
        #: jobs that are not over, by name, in order of submission; of them those that wait and those that run
        self.jobs: dict[str, Active] = {}
        self.waiting: dict[str, Active] = {}
        self.running: dict[str, Active] = {}
        self.policy = policy
        self.decisions: list[Decision] = []
        self._place = placement.get(policy.placement)
        #: kinds of devices, the most common first
        self.kinds = sorted(self.nodes.total, key=lambda kind: -self.nodes.total[kind])

    @property
    def devices(self) -> int:
        """Devices that are up."""
        return self.nodes.devices

    @property
    def free(self) -> int:
        """Devices that are up and free."""
        return self.nodes.free_devices

    def fits(self, devices: int, kind: str | None = None) -> bool:
        """Whether so many devices of one kind are free."""
        free = self.nodes.free_total
        return free[kind] >= devices if kind is not None else max(free.values()) >= devices

    def place(self, devices: int, kind: str | None = None) -> Allocation | None:
        """Free devices by the policy's placement, of the first kind that has enough."""
        if kind is not None:
            return self._place(self.nodes, devices, kind)
        free = self.nodes.free_total
        return next(
            (
                found
                for k in self.kinds
                if free[k] >= devices and (found := self._place(self.nodes, devices, k)) is not None
            ),
            None,
        )

    def start(self, job: Active, where: int | Allocation, reason: str, kind: str | None = None) -> bool:
        """Starts a waiting job on so many devices, or on those of an allocation; False where they are not
        free.
        """
        allocation = self.place(where, kind) if isinstance(where, int) else where
        if allocation is None:
            return False
        if job.status != WAITING:
            raise SpecError(f"policy {self.policy.name!r} starts {job.name!r}, which is {job.status}")
        self._put(job, allocation)
        del self.waiting[job.name]
        self.running[job.name] = job
        job.restarts += not math.isnan(job.first_start_s)
        if math.isnan(job.first_start_s):
            job.first_start_s = self.now_s
        self.policy.removed(job, self.now_s)
        self.decisions.append(
            Start(name=job.name, reason=reason, allocation=allocation, adaptive=job.adaptive)
        )
        return True

    def stop(self, job: Active, reason: str) -> None:
        """Checkpoints a running job; it waits again."""
        self._free(job)
        job.owes_s = job.job.checkpoint_s
        self.decisions.append(Stop(name=job.name, reason=reason))
        self._wait(job)

    def resize(self, job: Active, where: int | Allocation, reason: str, kind: str | None = None) -> bool:
        """Moves a running job to so many devices (its own may be among them), or to an allocation; False
        where they are not free.
        """
        return self.reshape([(job, where, reason)], kind) == 1

    def reshape(self, wanted: Iterable[tuple[Active, int | Allocation, str]], kind: str | None = None) -> int:
        """Gives jobs, waiting or running, new sizes: all give up what they hold, then each is placed in the
        given order.

        A running job that no longer fits anywhere is stopped. Returns how many were placed.
        """
        todo = list(wanted)
        for job, _, _ in todo:
            if job.status == RUNNING:
                self._free(job, keep=True)
                job.owes_s = job.job.checkpoint_s
        placed = 0
        for job, where, reason in todo:
            allocation = self.place(where, kind) if isinstance(where, int) else where
            if job.status == WAITING:
                placed += allocation is not None and self.start(job, allocation, reason)
            elif allocation is None:
                job.status = RUNNING
                self.decisions.append(
                    Stop(name=job.name, reason=f"{reason}, but that many devices are not free")
                )
                self._wait(job)
            else:
                self._put(job, allocation)
                job.restarts += 1
                self.decisions.append(
                    Resize(name=job.name, reason=reason, allocation=allocation, adaptive=job.adaptive)
                )
                placed += 1
        return placed

    def _put(self, job: Active, allocation: Allocation) -> None:
        self.nodes.take(allocation)
        job.settle(self.now_s)
        job.status = RUNNING
        job.allocation = allocation
        job.counts = tuple(count for _, count in allocation)
        job.devices = sum(job.counts)
        job.kind = self.nodes.kind_of(allocation)
        job.adaptive = self.policy.adaptive
        job.started_s = self.now_s
        job.ready_s = self.now_s + job.job.restart_s + job.owes_s
        job.owes_s = 0.0
        job.rate = checked(job.job.speed.rate(job.counts, job.kind, job.phase, job.adaptive), job.name)
        if job.rate == 0:
            raise SpecError(
                f"policy {self.policy.name!r} puts {job.name!r} on {job.devices} devices ({job.kind}), where"
                " it cannot run"
            )

    def _free(self, job: Active, keep: bool = False) -> None:
        if job.status != RUNNING:
            raise SpecError(f"policy {self.policy.name!r} stops {job.name!r}, which is {job.status}")
        job.settle(self.now_s)
        self.nodes.give(job.allocation)
        if not keep:
            job.allocation, job.counts, job.devices = (), (), 0

    def _wait(self, job: Active) -> None:
        job.allocation, job.counts, job.devices = (), (), 0
        job.status, job.rate = WAITING, 0.0
        self.running.pop(job.name, None)
        self.waiting[job.name] = job
        self.policy.added(job, self.now_s)


class StateMachine:
    """Holds the state, applies events, asks the policy."""

    __slots__ = ("_count", "_dirty", "_most", "_round_s", "log", "policy", "state", "wake_s")

    def __init__(self, shape: ClusterShape, policy: Policy, *, log: bool = True) -> None:
        self.policy = policy
        self.state = State(shape, policy)
        self.log: list[EventRecord] | None = [] if log else None
        #: when to send a Tick, in seconds; infinity: not needed
        self.wake_s = math.inf
        self._count = 0
        self._most = max(self.state.nodes.total.values())
        self._dirty = False
        self._round_s = 0.0

    def tell_quietly(self, event: ev.Event) -> None:
        """Takes in an event that others follow at the same time; the policy is asked with the last of
        them.
        """
        if event.time_s < self.state.now_s:
            raise SpecError(
                f"events must come in order of time: got {event.time_s:g} s after {self.state.now_s:g} s"
            )
        self.state.now_s = event.time_s
        self._dirty |= self._apply(event)
        if self.log is not None:
            self.log.append(EventRecord(event, (), quiet=True))

    def handle(self, event: ev.Event) -> list[Decision]:
        """Takes in an event and returns what is to be done about it."""
        state, policy = self.state, self.policy
        if event.time_s < state.now_s:
            raise SpecError(
                f"events must come in order of time: got {event.time_s:g} s after {state.now_s:g} s"
            )
        state.now_s = now = event.time_s
        decisions: list[Decision] = []
        state.decisions = decisions
        matters = self._apply(event)
        self._dirty |= matters
        if policy.interval_s:
            if isinstance(event, ev.Tick) and now >= self.wake_s:
                policy.decide(state)
                self._dirty, self._round_s = False, now
                self.wake_s = self._grid(policy.wake_s(state))
            elif self._dirty:
                self.wake_s = min(self.wake_s, self._grid(now))
        elif matters:
            policy.decide(state)
            self.wake_s = policy.wake_s(state)
        if self.log is not None:
            self.log.append(EventRecord(event, tuple(decisions)))
        return decisions

    def _grid(self, time_s: float) -> float:
        """The first round of the policy that is not before `time_s` and has not been held; the first is after
        one interval.
        """
        if not math.isfinite(time_s):
            return time_s
        step = self.policy.interval_s
        return max(math.ceil(time_s / step - 1e-9), math.floor(self._round_s / step + 0.5) + 1) * step

    def _apply(self, event: ev.Event) -> bool:
        """Changes the state; whether the policy should look at it."""
        state = self.state
        if isinstance(event, ev.Submit):
            self._submit(event.job)
        elif isinstance(event, ev.Report):
            job = self._active(event.name)
            job.settle(state.now_s)
            job.done = event.done
            if event.phase != job.phase and job.status == RUNNING:
                job.phase = event.phase
                job.rate = checked(
                    job.job.speed.rate(job.counts, job.kind, job.phase, job.adaptive), job.name
                )
            job.phase = event.phase
            self.policy.reported(job, state.now_s)
            return self.policy.follows_reports
        elif isinstance(event, ev.Ended):
            self._end(self._active(event.name), event.outcome)
        elif isinstance(event, ev.Preempted):
            job = self._active(event.name)
            if job.status == RUNNING:
                state._free(job)
                state._wait(job)
            job.done = event.done
        elif isinstance(event, ev.NodeDown):
            state.nodes.down(event.node)
        elif isinstance(event, ev.NodeUp):
            state.nodes.back(event.node)
        return True

    def _submit(self, job: Job) -> None:
        state = self.state
        if job.name in state.jobs:
            raise SpecError(f"job {job.name!r} was submitted twice")
        if job.least > self._most:
            raise SpecError(
                f"job {job.name!r} needs {job.least} devices of one kind, but the cluster has {self._most}"
            )
        record = state.jobs[job.name] = state.waiting[job.name] = Active(job, self._count)
        record.since_s = state.now_s
        self._count += 1
        self.policy.added(record, state.now_s)

    def _end(self, job: Active, outcome: str) -> None:
        state = self.state
        if job.status == RUNNING:
            state._free(job)
            del state.running[job.name]
        else:
            del state.waiting[job.name]
            self.policy.removed(job, state.now_s)
        del state.jobs[job.name]
        job.status, job.outcome = OVER, outcome
        self.policy.left(job, state.now_s)

    def _active(self, name: str) -> Active:
        if name not in self.state.jobs:
            raise SpecError(f"no job {name!r} waits or runs")
        return self.state.jobs[name]


def replay(
    entries: Iterable[Mapping[str, Any]], jobs: Mapping[str, Job], shape: ClusterShape, policy: Policy
) -> list[list[Decision]]:
    """Runs a log again from the start: the decisions after each of its events."""
    machine = StateMachine(shape, policy, log=False)
    out: list[list[Decision]] = []
    for entry in entries:
        event = ev.from_dict({k: v for k, v in entry.items() if k not in ("decisions", "quiet")}, dict(jobs))
        if entry.get("quiet"):
            machine.tell_quietly(event)
            out.append([])
        else:
            out.append(machine.handle(event))
    return out
