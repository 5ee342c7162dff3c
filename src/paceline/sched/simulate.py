"""The event-driven simulator: it tells the state machine what happens, and carries out what it decides.

Between events nothing is computed: a job's next event is the end of its phase (or its early end) at its
present speed. At the same time ends come before node events, those before submissions, and those before a
policy's round.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from paceline.errors import SpecError
from paceline.sched import event as ev
from paceline.sched.decision import Allocation, Decision, Resize, Start, Stop
from paceline.sched.job import Job
from paceline.sched.machine import StateMachine
from paceline.sched.metrics import FinishedJob, Occupancy, ScheduleResult
from paceline.sched.nodes import ClusterShape
from paceline.sched.policy import Policy

#: order of events at one time
_END, _NODE, _SUBMIT, _TICK, _LATE = range(5)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """What the simulated world does to jobs."""

    #: ends of phases fall on multiples of it, in seconds; 0: at any time
    clock_s: float = 0.0
    #: the share of its speed that a job on several nodes loses where another such job shares a node with it
    interference: float = 0.0
    #: mean seconds between failures of one node, and until it is back; 0: none
    node_mtbf_s: float = 0.0
    node_repair_s: float = 3600.0
    seed: int = 0
    #: seconds after which it is given up: a policy that starves a job would never end
    limit_s: float = 20 * 365 * 86400.0

    def __post_init__(self) -> None:
        if (
            not 0 <= self.interference < 1
            or self.clock_s < 0
            or self.node_mtbf_s < 0
            or self.node_repair_s <= 0
        ):
            raise SpecError(
                "interference must be in [0, 1); clock, time between failures and repair must not be negative"
            )


class _Run:
    """A job's true course."""

    __slots__ = (
        "adaptive",
        "allocation",
        "counts",
        "done",
        "ends",
        "job",
        "kind",
        "phase",
        "rate",
        "since_s",
        "spent_s",
        "stamp",
        "start_s",
    )

    def __init__(self, job: Job) -> None:
        self.job = job
        self.ends = job.speed.ends(job.work)
        self.done = 0.0
        self.phase = 0
        self.rate = 0.0
        #: when progress counts from: restarts are over
        self.since_s = self.start_s = 0.0
        self.stamp = 0
        self.allocation: Allocation = ()
        self.counts: tuple[int, ...] = ()
        self.kind = ""
        self.adaptive = False
        #: device-seconds
        self.spent_s = 0.0

    def settle(self, now_s: float) -> None:
        if now_s > self.since_s:
            self.done += self.rate * (now_s - self.since_s)
            self.since_s = now_s


class Simulator:
    """One run of a job list under one policy."""

    def __init__(
        self,
        jobs: Iterable[Job],
        shape: ClusterShape,
        policy: Policy,
        settings: SimulationSettings | None = None,
        *,
        log: bool = False,
        gantt: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.jobs = sorted(jobs, key=lambda job: job.submit_s)
        if not self.jobs:
            raise SpecError("there is no job to simulate")
        self.shape = shape
        self.settings = settings or SimulationSettings()
        self.machine = StateMachine(shape, policy, log=log)
        self.events = 0
        self.decisions = 0
        self.segments: list[Occupancy] | None = [] if gantt else None
        self._progress = progress
        self._runs: dict[str, _Run] = {}
        self._heap: list[tuple[float, int, int, str, int]] = []
        self._count = 0
        self._done: list[FinishedJob] = []
        self._busy_s = 0.0
        self._random = random.Random(self.settings.seed)
        #: jobs on several nodes, by node; kept only where they disturb each other
        self._sharing: list[set[str]] = [set() for _ in shape.devices] if self.settings.interference else []

    def run(self) -> ScheduleResult:
        """Runs until every job is over."""
        began = time.perf_counter()
        machine, heap, jobs = self.machine, self._heap, self.jobs
        if self.settings.node_mtbf_s:
            for node in range(len(self.shape.devices)):
                self._push(self._random.expovariate(1 / self.settings.node_mtbf_s), _NODE, f"{node}", 0)
        at, total = 0, len(jobs)
        while len(self._done) < total:
            submit_s = jobs[at].submit_s if at < total else math.inf
            wake_s = machine.wake_s
            first = heap[0] if heap else (math.inf, _LATE)
            other_s = min(submit_s, wake_s)
            # at equal times an end comes before a submission, that before a round, and a late end after it
            if first[0] < other_s or (first[0] == other_s < math.inf and first[1] < _SUBMIT):
                self._next()
            elif at < total and submit_s <= wake_s and submit_s <= first[0]:
                job = jobs[at]
                at += 1
                self._runs[job.name] = _Run(job)
                self._tell(ev.Submit(time_s=submit_s, job=job))
            elif wake_s < math.inf and wake_s <= first[0]:
                self._tell(ev.Tick(time_s=wake_s))
            else:
                raise SpecError(self._stuck())
            if machine.state.now_s > self.settings.limit_s:
                raise SpecError(
                    f"gave up after {self.settings.limit_s / 86400:.0f} simulated days with"
                    f" {total - len(self._done)} jobs left"
                )
        return ScheduleResult.of(
            policy=machine.policy.name,
            cluster=self.shape.name,
            devices=self.shape.total,
            done=self._done,
            events=self.events,
            decisions=self.decisions,
            elapsed_s=time.perf_counter() - began,
            segments=self.segments,
            log=machine.log,
        )

    def _stuck(self) -> str:
        waiting = list(self.machine.state.waiting)
        return (
            f"policy {self.machine.policy.name!r} leaves {len(waiting)} jobs waiting for ever, the first of"
            f" them {waiting[0]!r}"
        )

    def _push(self, time_s: float, order: int, name: str, stamp: int) -> None:
        self._count += 1
        heappush(self._heap, (time_s, order, self._count, name, stamp))

    def _tell(self, event: ev.Event) -> None:
        self.events += 1
        decisions = self.machine.handle(event)
        if decisions:
            self._carry_out(decisions, event.time_s)

    def _next(self) -> None:
        time_s, order, _, name, stamp = heappop(self._heap)
        if order == _NODE:
            self._node(time_s, int(name), stamp)
            return
        run = self._runs.get(name)
        if run is None or run.stamp != stamp:
            return  # it was stopped or moved since
        target = self._target(run)
        if target >= run.job.work * run.job.ends_at - 1e-12 * run.job.work:
            self._over(run, time_s)
            return
        run.done, run.since_s = target, max(time_s, run.since_s)
        run.phase += 1
        run.rate = self._rate(run)
        self._schedule(run)
        self._tell(ev.Report(time_s=time_s, name=name, done=run.done, phase=run.phase))

    def _over(self, run: _Run, time_s: float) -> None:
        job = run.job
        active = self.machine.state.jobs[job.name]
        started_s, restarts = active.first_start_s, active.restarts
        self._segment(run, time_s)
        self._leave(run, time_s)
        del self._runs[job.name]
        self._done.append(
            FinishedJob(
                name=job.name,
                submit_s=job.submit_s,
                start_s=started_s,
                end_s=time_s,
                spent_s=run.spent_s,
                restarts=restarts,
                outcome=job.outcome,
                devices=job.devices,
                alone_s=job.speed.seconds(
                    job.work * job.ends_at, 0, job.devices, self.machine.state.nodes.node_devices, False
                ),
                tenant=job.tenant,
            )
        )
        if self._progress is not None:
            self._progress(len(self._done), len(self.jobs))
        self._tell(ev.Ended(time_s=time_s, name=job.name, outcome=job.outcome))

    def _target(self, run: _Run) -> float:
        """Work at the next event of a running job."""
        return min(run.ends[run.phase], run.job.work * run.job.ends_at)

    def _rate(self, run: _Run) -> float:
        rate = run.job.speed.rate(run.counts, run.kind, run.phase, run.adaptive)
        if (
            self._sharing
            and len(run.allocation) > 1
            and any(len(self._sharing[node]) > 1 for node, _ in run.allocation)
        ):
            rate *= 1 - self.settings.interference
        return rate

    def _schedule(self, run: _Run) -> None:
        run.stamp += 1
        at = run.since_s + max(0.0, self._target(run) - run.done) / run.rate
        clock = self.settings.clock_s
        seen = round(at / clock) * clock if clock else at
        # what is rounded down to a round's time has not happened yet when the round looks
        self._push(
            max(seen, self.machine.state.now_s), _END if seen >= at - 1e-9 else _LATE, run.job.name, run.stamp
        )

    def _carry_out(self, decisions: Sequence[Decision], now_s: float) -> None:
        self.decisions += len(decisions)
        for decision in decisions:
            if isinstance(decision, (Stop, Resize)):
                run = self._runs[decision.name]
                run.settle(now_s)
                run.stamp += 1
                self._segment(run, now_s)
                self._leave(run, now_s)
                if self._sharing:  # the machine does not see what disturbs a job: tell it how far it came
                    self.machine.state.jobs[decision.name].done = run.done
        for decision in decisions:
            if isinstance(decision, (Start, Resize)):
                self._begin(self._runs[decision.name], decision, now_s)

    def _begin(self, run: _Run, decision: Start | Resize, now_s: float) -> None:
        run.allocation = decision.allocation
        run.counts = tuple(count for _, count in decision.allocation)
        run.kind = self.shape.kinds[decision.allocation[0][0]]
        run.adaptive = decision.adaptive
        run.start_s = now_s
        run.since_s = self.machine.state.jobs[run.job.name].ready_s
        if self._sharing and len(run.allocation) > 1:
            self._disturb(run, now_s, joins=True)
        run.rate = self._rate(run)
        self._schedule(run)

    def _leave(self, run: _Run, now_s: float) -> None:
        run.spent_s += (now_s - run.start_s) * sum(run.counts)
        if self._sharing and len(run.allocation) > 1:
            self._disturb(run, now_s, joins=False)
        run.allocation, run.counts = (), ()

    def _disturb(self, run: _Run, now_s: float, joins: bool) -> None:
        """A job on several nodes comes or goes: those that share nodes with it change speed."""
        for node, _ in run.allocation:
            (self._sharing[node].add if joins else self._sharing[node].discard)(run.job.name)
        for name in sorted(
            {name for node, _ in run.allocation for name in self._sharing[node]} - {run.job.name}
        ):
            other = self._runs[name]
            rate = self._rate(other)
            if rate != other.rate and other.allocation:
                other.settle(now_s)
                other.rate = rate
                self._schedule(other)

    def _segment(self, run: _Run, now_s: float) -> None:
        if self.segments is not None and run.allocation:
            self.segments.append(
                Occupancy(name=run.job.name, start_s=run.start_s, end_s=now_s, allocation=run.allocation)
            )

    def _node(self, time_s: float, node: int, down: int) -> None:
        """A node fails (its jobs fall back to their last checkpoints), or is back."""
        if down:
            self._tell(ev.NodeUp(time_s=time_s, node=node))
            self._push(time_s + self._random.expovariate(1 / self.settings.node_mtbf_s), _NODE, f"{node}", 0)
            return
        hit = [run for run in self._runs.values() if any(n == node for n, _ in run.allocation)]
        state = self.machine.state
        for run in hit:
            run.settle(time_s)
            run.stamp += 1
            every = run.job.checkpoint_every_s * run.rate
            if every:
                run.done = max(
                    math.floor(run.done / every) * every, run.ends[run.phase - 1] if run.phase else 0.0
                )
            self._segment(run, time_s)
            self._leave(run, time_s)
        # all that a failure changes is told before the policy is asked again
        for run in hit:
            self.machine.tell_quietly(ev.Preempted(time_s=time_s, name=run.job.name, done=run.done))
        if state.nodes.up[node]:
            self._tell(ev.NodeDown(time_s=time_s, node=node))
        self._push(time_s + self._random.expovariate(1 / self.settings.node_repair_s), _NODE, f"{node}", 1)


def simulate(
    jobs: Iterable[Job],
    shape: ClusterShape,
    policy: Policy,
    settings: SimulationSettings | None = None,
    *,
    log: bool = False,
    gantt: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ScheduleResult:
    """Runs a job list under a policy until every job is over; `log` keeps events and decisions, `gantt` where
    each job ran when.
    """
    return Simulator(jobs, shape, policy, settings, log=log, gantt=gantt, progress=progress).run()
