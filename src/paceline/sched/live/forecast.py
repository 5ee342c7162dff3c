"""What will happen next if every job advances as the throughput model says: the model's clock, and ETAs with
intervals from it.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from paceline.sched import event as ev
from paceline.sched.ends import Ends
from paceline.sched.job import Active, Job
from paceline.sched.machine import StateMachine
from paceline.sched.speed import Speed

#: relative error of the throughput model (one standard deviation): of a job that was never seen running; of
#: one that was, at another size; of one that is. And of the time that a restart takes. `rehearse` counts how
#: often ETAs made with these hold
UNSEEN, ELSEWHERE, SEEN, RESTART = 0.15, 0.10, 0.04, 0.3
#: seconds for which a job must be seen advancing before its speed counts
_LOOK_S = 2.0
#: what is late takes longer by this share
_LONGER = 0.1
_SAMPLES, _LIMIT = 64, 200_000
#: ticks in a row at which a policy changes nothing, after which it is asked less often: each time after this
#: share of the time since the last change. A job of years must not take years of ticks to play
_IDLE_TICKS, _IDLE_SHARE = 200, 0.1


@dataclass(slots=True)
class ObservedSpeed:
    """The speed of a job over the model's, as its progress shows it."""

    attempt: int = -1
    #: work at the start of this attempt, and the time and work at which it was first seen to come further
    base: float = 0.0
    since_s: float = math.nan
    first: float = 0.0
    #: observed over modelled; of the present attempt, or of an earlier one
    factor: float = 1.0
    deviation: float = UNSEEN

    def look(self, job: Active, attempt: int, done: float, now_s: float) -> None:
        """Takes in the work done by now."""
        if attempt != self.attempt:
            self.attempt, self.base, self.since_s = attempt, done, math.nan
            self.deviation = ELSEWHERE if self.deviation < UNSEEN else UNSEEN
        elif math.isnan(self.since_s):
            if done > self.base:  # it is past its restart
                self.since_s, self.first = now_s, done
        elif now_s - self.since_s > _LOOK_S and done > self.first and job.rate > 0:
            self.factor = min(10.0, max(0.1, (done - self.first) / (now_s - self.since_s) / job.rate))
            self.deviation = SEEN


def upcoming(
    machine: StateMachine,
    planned: Sequence[tuple[float, Job]],
    stops: Mapping[str, float] = MappingProxyType({}),
    patience_s: float = 0.0,
) -> ev.Event | None:
    """The next event by the model: the end of a running job (or of a phase), a submission or a tick, in that
    order at one time.

    `stops`: the work at which jobs end early. `patience_s`: ticks that are due sooner are put off so long.
    """
    best: tuple[float, int, float, int] = (math.inf, 9, 0.0, 0)
    event: ev.Event | None = None
    for job in machine.state.running.values():
        if job.rate > 0:
            stop = stops.get(job.name, job.job.work)
            target = min(_target(job), stop)
            at = max(
                max(job.since_s, job.ready_s) + max(0.0, target - job.done) / job.rate, machine.state.now_s
            )
            if (key := (at, 0, job.started_s, job.index)) < best:
                best = key
                ends = target >= stop * (1 - 1e-12)
                event = (
                    ev.Ended(time_s=at, name=job.name)
                    if ends
                    else ev.Report(time_s=at, name=job.name, done=target, phase=job.phase + 1)
                )
    if planned and (planned[0][0], 1) < best[:2]:
        best, event = (
            (planned[0][0], 1, 0.0, 0),
            ev.Submit(time_s=max(planned[0][0], machine.state.now_s), job=planned[0][1]),
        )
    wake_s = max(machine.wake_s, machine.state.now_s + patience_s)
    if machine.wake_s < math.inf and wake_s < best[0]:
        event = ev.Tick(time_s=wake_s)
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
        """Plain values; a time that never comes is None, for JSON has no infinity."""
        found = {key: getattr(self, key) for key in self.__dataclass_fields__}
        return {key: None if value == math.inf else value for key, value in found.items()}

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> Eta:
        """From plain values."""
        found: dict[str, Any] = {key: math.inf if given is None else given for key, given in value.items()}
        return Eta(**found)

    def __str__(self) -> str:
        if math.isinf(self.end_s):
            return f"{self.name} ({self.state}): does not come to its turn as things are"
        start = "" if self.state == "running" else f"starts in about {_shown(self.start_s)}, "
        low, end, high = map(_shown, (self.low_s, self.end_s, self.high_s))
        return f"{self.name} ({self.state}): {start}ends in {end} ({low} to {high} in four cases of five)"


def _shown(seconds: float) -> str:
    from paceline.units import show

    return show(round(seconds), "time") if seconds >= 1 else "1 s"


@dataclass(frozen=True, slots=True, kw_only=True)
class EtaQuery:
    """Everything that an ETA depends on, copied: it can be answered while the scheduler goes on."""

    machine: StateMachine
    planned: Sequence[tuple[float, Job]]
    name: str
    now_s: float
    seen: Mapping[str, ObservedSpeed]
    done: Mapping[str, float]

    def answer(self) -> Eta:
        """When the job starts and is over."""
        return eta(self.machine, self.planned, self.name, self.now_s, self.seen, self.done)


def eta(
    machine: StateMachine,
    planned: Sequence[tuple[float, Job]],
    name: str,
    now_s: float,
    seen: Mapping[str, ObservedSpeed],
    done: Mapping[str, float] = MappingProxyType({}),
) -> Eta:
    """Plays the queue forward under the same policy, with speeds that are off as the model usually is, and
    early ends of other jobs as these say they may have; `seen` holds what was observed of the speed of jobs,
    `done` the work that they say they did."""
    now = copy.deepcopy(machine)
    for active in now.state.running.values():
        _as_it_is(active, now_s, seen.get(active.name), done.get(active.name))
    draw = random.Random(0)
    record = machine.state.jobs.get(name)
    state = record.status if record is not None else "planned"
    starts, ends = [], []
    for _ in range(_SAMPLES):
        start_s, end_s = _play(now, planned, name, now_s, seen, draw)
        starts.append(max(0.0, start_s - now_s))
        ends.append(max(0.0, end_s - now_s))
    starts.sort()
    ends.sort()
    at = [ends[round(share * (_SAMPLES - 1))] for share in (0.1, 0.5, 0.9)]
    return Eta(
        name=name,
        state=state,
        start_s=starts[_SAMPLES // 2],
        low_s=at[0],
        end_s=at[1],
        high_s=at[2],
        samples=_SAMPLES,
    )


def _as_it_is(job: Active, now_s: float, seen: ObservedSpeed | None, done: float | None) -> None:
    """What a running job says counts for more than what was believed of it."""
    job.settle(now_s)
    if done is not None:
        job.done = done
    # still restarting: for a while yet, the longer it took so far
    if seen is not None and math.isnan(seen.since_s):
        job.ready_s = max(job.ready_s, now_s + _LONGER * (now_s - job.started_s))
    if job.done >= job.job.work:  # it should be over, and is not
        job.done = (1 - _LONGER) * job.job.work


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
    machine: StateMachine,
    planned: Sequence[tuple[float, Job]],
    name: str,
    now_s: float,
    seen: Mapping[str, ObservedSpeed],
    draw: random.Random,
) -> tuple[float, float]:
    """(start, end) of a job in one future."""
    ahead = copy.deepcopy(machine)
    state = ahead.state
    stops: dict[str, float] = {}

    def off(job: Job, done: float = 0.0) -> Job:
        known = seen.get(job.name) or ObservedSpeed()
        if job.ends is not None and job.name != name:
            stops[job.name] = job.work * _share(job.ends, done / job.work, draw.random())
        return replace(
            job,
            speed=_Off(job.speed, known.factor * math.exp(draw.gauss(0.0, known.deviation))),
            restart_s=job.restart_s * math.exp(draw.gauss(0.0, RESTART)),
        )

    for active in state.jobs.values():
        active.settle(now_s)
        active.job = off(active.job, active.done)
        if isinstance(active.job.speed, _Off):
            active.rate *= active.job.speed.factor
    state.now_s = max(now_s, state.now_s)
    future = [(max(at, state.now_s), off(job)) for at, job in planned]
    start_s = now_s if name in state.running else math.nan
    ticks, changed_s = 0, state.now_s
    for _ in range(_LIMIT):
        patience_s = _IDLE_SHARE * (state.now_s - changed_s) if ticks > _IDLE_TICKS else 0.0
        event = upcoming(ahead, future, stops, patience_s)
        if event is None:
            break
        if isinstance(event, ev.Submit):
            future.pop(0)
        if ahead.handle(event) or not isinstance(event, ev.Tick):
            ticks, changed_s = 0, state.now_s
        else:
            ticks += 1
        if math.isnan(start_s) and name in state.running:
            start_s = state.now_s
        if isinstance(event, ev.Ended) and event.name == name:
            return start_s, state.now_s
    return math.inf, math.inf


def _share(ends: Ends, done: float, uniform: float) -> float:
    """The share of its work at which a job that did `done` of it ends; 1 is success."""
    left = [
        (share, chance) for share, chance in zip(ends.shares, ends.probabilities, strict=True) if share > done
    ]
    alive = ends.success + sum(chance for _, chance in left)
    for share, chance in left:
        uniform -= chance / alive
        if uniform < 0:
            return share
    return 1.0
