"""What will happen next if every job advances as the throughput model says: the model's clock, and ETAs with intervals from it."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.sched import event as ev
from paceline.sched.job import Active, Job
from paceline.sched.machine import Machine
from paceline.sched.speed import Speed

#: relative error of the throughput model (one standard deviation) of a job that has not been seen running, and of one that has
UNSEEN, SEEN = 0.15, 0.05
_SAMPLES, _LIMIT = 64, 200_000


def upcoming(machine: Machine, planned: Sequence[tuple[float, Job]]) -> ev.Event | None:
    """The next event by the model: the end of a running job (or of a phase), a submission or a tick, in that order at one time."""
    best: tuple[float, int, float, int] = (math.inf, 9, 0.0, 0)
    event: ev.Event | None = None
    for job in machine.state.running.values():
        if job.rate > 0:
            target = _target(job)
            at = max(max(job.since_s, job.ready_s) + max(0.0, target - job.done) / job.rate, machine.state.now_s)
            if (key := (at, 0, job.started_s, job.index)) < best:
                best = key
                ends = target >= job.job.work * (1 - 1e-12)
                event = ev.Ended(time_s=at, name=job.name) if ends else ev.Report(time_s=at, name=job.name, done=target, phase=job.phase + 1)
    if planned and (planned[0][0], 1) < best[:2]:
        best, event = (planned[0][0], 1, 0.0, 0), ev.Submit(time_s=max(planned[0][0], machine.state.now_s), job=planned[0][1])
    if machine.wake_s < best[0]:
        event = ev.Tick(time_s=max(machine.wake_s, machine.state.now_s))
    return event


def _target(job: Active) -> float:
    ends = job.job.speed.ends(job.job.work)
    return ends[job.phase] if job.phase < len(ends) else job.job.work


@dataclass(frozen=True, slots=True, kw_only=True)
class Eta:
    """When a job starts and is over, in seconds from now: median, and the bounds of four cases in five."""

    name: str
    state: str
    start_s: float
    end_s: float
    low_s: float
    high_s: float
    samples: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {key: getattr(self, key) for key in self.__dataclass_fields__}

    def __str__(self) -> str:
        from paceline.units import show

        start = "" if self.state == "running" else f"starts in about {show(self.start_s, 'time')}, "
        low, end, high = (show(value, "time") for value in (self.low_s, self.end_s, self.high_s))
        return f"{self.name} ({self.state}): {start}ends in {end} ({low} to {high} in four cases of five)"


def eta(machine: Machine, planned: Sequence[tuple[float, Job]], name: str, now_s: float, seen: Mapping[str, float]) -> Eta:
    """Plays the queue forward under the same policy, with speeds that are off as the model usually is.

    `seen` holds, for jobs that were seen running, their speed over the model's.
    """
    draw = random.Random(0)
    record = machine.state.jobs.get(name)
    state = record.status if record is not None else "planned"
    starts, ends = [], []
    for _ in range(_SAMPLES):
        start_s, end_s = _play(machine, planned, name, now_s, seen, draw)
        starts.append(max(0.0, start_s - now_s))
        ends.append(max(0.0, end_s - now_s))
    starts.sort()
    ends.sort()
    at = [ends[round(share * (_SAMPLES - 1))] for share in (0.1, 0.5, 0.9)]
    return Eta(name=name, state=state, start_s=starts[_SAMPLES // 2], low_s=at[0], end_s=at[1], high_s=at[2], samples=_SAMPLES)


@dataclass(frozen=True, slots=True)
class _Off:
    """A speed that is off by a factor."""

    speed: Speed
    factor: float

    def ends(self, work: float) -> tuple[float, ...]:
        return self.speed.ends(work)

    def rate(self, counts: tuple[int, ...], kind: str, phase: int, adaptive: bool) -> float:
        return self.factor * self.speed.rate(counts, kind, phase, adaptive)

    def seconds(self, left: float, phase: int, devices: int, node_devices: int, adaptive: bool) -> float:
        return self.speed.seconds(left, phase, devices, node_devices, adaptive) / self.factor


def _play(
    machine: Machine, planned: Sequence[tuple[float, Job]], name: str, now_s: float, seen: Mapping[str, float], draw: random.Random,
) -> tuple[float, float]:
    """(start, end) of a job in one future."""
    ahead = copy.deepcopy(machine)
    state = ahead.state

    def off(job: Job) -> Job:
        factor = seen.get(job.name, 1.0) * math.exp(draw.gauss(0.0, SEEN if job.name in seen else UNSEEN))
        return replace(job, speed=_Off(job.speed, factor))

    for active in state.jobs.values():
        active.settle(now_s)
        active.job = off(active.job)
        if isinstance(active.job.speed, _Off):
            active.rate *= active.job.speed.factor
    state.now_s = max(now_s, state.now_s)
    future = [(max(at, state.now_s), off(job)) for at, job in planned]
    start_s = now_s if name in state.running else math.nan
    for _ in range(_LIMIT):
        event = upcoming(ahead, future)
        if event is None:
            break
        if isinstance(event, ev.Submit):
            future.pop(0)
        ahead.handle(event)
        if math.isnan(start_s) and name in state.running:
            start_s = state.now_s
        if isinstance(event, ev.Ended) and event.name == name:
            return start_s, state.now_s
    return math.inf, math.inf
