"""How often a job really ends inside the interval of its ETA: the daemon's loop on the wall's clock, against
a truth that the model does not know.

Jobs run at speeds of their own, take times of their own to restart, and report their progress as live ones
do; now and then somebody asks for the ETA of a job, and when all is over the answers are counted.

    # speeds drawn off the model
    python -m paceline.sched.live.eta_coverage
    # believed: fitted to one and two nodes; true: as measured by the Pollux study
    python -m paceline.sched.live.eta_coverage DATA/traces/pollux
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from paceline.queueing.synchronous import SynchronousModel
from paceline.sched import event as ev
from paceline.sched import policies, throughput
from paceline.sched.job import RUNNING, Job
from paceline.sched.live.forecast import Eta, ObservedSpeed, eta
from paceline.sched.machine import StateMachine
from paceline.sched.nodes import ClusterShape
from paceline.sched.speed import RateTable, ScaledSpeed
from paceline.sched.throughput import ProfiledSpeed

#: work per second of a job, by devices per node, in truth
Truth = Callable[[str, tuple[int, ...]], float]
_REPORT_S = 10.0
#: applications of the Pollux study whose jobs take minutes to hours on one device
MEASURED = ("cifar10", "deepspeech2", "bert", "yolov3", "imagenet")
#: relative deviations of what is drawn: speed of a job over the model's, at one size over that, time to
#: restart over the given one
SPEED, SIZE, RESTART = 0.15, 0.05, 0.3


@dataclass(slots=True)
class _Real:
    """A job as it really is."""

    done: float = 0.0
    #: when it was last brought up to date, when its present run makes its first step, and which run that is
    at_s: float = 0.0
    ready_s: float = math.inf
    started_s: float = math.nan
    rate: float = 0.0


@dataclass(slots=True)
class Rehearsal:
    """One job list on one cluster.

    `known`: whether those who ask know of jobs that are yet to be submitted.
    """

    jobs: Sequence[Job]
    truth: Truth
    shape: ClusterShape
    policy: str = "marginal(interval_s=2)"
    known: bool = True
    asks: int = 20
    seed: int = 0
    answers: list[tuple[float, Eta]] = field(default_factory=list)
    ends: dict[str, float] = field(default_factory=dict)

    def run(self) -> Rehearsal:
        """Plays it to its end."""
        draw = random.Random(self.seed)
        machine = StateMachine(self.shape, policies.get(self.policy), log=False)
        planned = sorted(((job.submit_s, job) for job in self.jobs), key=lambda pair: pair[0])
        real = {job.name: _Real() for job in self.jobs}
        seen: dict[str, ObservedSpeed] = {}
        work = sum(
            job.devices * job.speed.seconds(job.work, 0, job.devices, max(self.shape.devices), False)
            for job in self.jobs
        )
        length = planned[-1][0] + 0.7 * work / self.shape.total
        asks = sorted(draw.uniform(0, length) for _ in range(self.asks))
        report, now = _REPORT_S, 0.0
        while planned or machine.state.jobs:
            ends = {
                name: self._end(real[name], machine.state.jobs[name].job.work)
                for name in machine.state.running
            }
            first = min(ends, key=lambda name: (ends[name], name), default="")
            now = max(
                now,
                min(
                    planned[0][0] if planned else math.inf,
                    machine.wake_s,
                    ends.get(first, math.inf),
                    report,
                    *asks[:1],
                ),
            )
            self._advance(machine, real, now)
            if asks and asks[0] <= now:
                asks.pop(0)
                self._report(machine, real, now, seen, look=True)
                self._ask(machine, planned if self.known else [], now, seen, real, draw)
            elif first and ends[first] <= now:
                self.ends[first] = now
                machine.handle(ev.Ended(time_s=now, name=first))
            elif planned and planned[0][0] <= now:
                machine.handle(ev.Submit(time_s=now, job=planned.pop(0)[1]))
            elif report <= now:
                report += _REPORT_S
                self._report(machine, real, now, seen)
            else:
                machine.handle(ev.Tick(time_s=now))
            self._follow(machine, real, now, draw)
        return self

    @property
    def hits(self) -> list[bool]:
        """Of each answer, whether the job ended inside its interval."""
        return [found.low_s <= self.ends[found.name] - at <= found.high_s for at, found in self.answers]

    def _end(self, job: _Real, work: float) -> float:
        return max(job.at_s, job.ready_s) + (work - job.done) / job.rate if job.rate else math.inf

    def _advance(self, machine: StateMachine, real: dict[str, _Real], now: float) -> None:
        for name in machine.state.running:
            job = real[name]
            job.done += job.rate * max(0.0, now - max(job.at_s, job.ready_s))
            job.at_s = now

    def _follow(self, machine: StateMachine, real: dict[str, _Real], now: float, draw: random.Random) -> None:
        """Carries out what was decided."""
        for name, active in machine.state.jobs.items():
            job = real[name]
            if active.status != RUNNING:
                job.rate, job.started_s = 0.0, math.nan
            elif job.started_s != active.started_s:
                job.started_s, job.at_s = active.started_s, now
                job.ready_s = now + active.job.restart_s * math.exp(draw.gauss(0, RESTART))
                job.rate = self.truth(name, active.counts)

    def _report(
        self,
        machine: StateMachine,
        real: dict[str, _Real],
        now: float,
        seen: dict[str, ObservedSpeed],
        look: bool = False,
    ) -> None:
        """What running jobs say of themselves, to who asks (`look`) and to the machine."""
        for name, active in list(machine.state.running.items()):
            done = min(real[name].done, active.job.work)
            seen.setdefault(name, ObservedSpeed()).look(active, active.restarts, done, now)
            if not look:
                machine.handle(ev.Report(time_s=now, name=name, done=done, phase=active.phase))

    def _ask(
        self,
        machine: StateMachine,
        planned: Sequence[tuple[float, Job]],
        now: float,
        seen: dict[str, ObservedSpeed],
        real: dict[str, _Real],
        draw: random.Random,
    ) -> None:
        names = [*machine.state.jobs, *(job.name for _, job in planned)]
        if names:
            done = {name: min(real[name].done, job.job.work) for name, job in machine.state.running.items()}
            self.answers.append((now, eta(machine, planned, draw.choice(names), now, seen, done)))


def drawn(seed: int, count: int = 12) -> Rehearsal:
    """Elastic jobs of ten minutes or so on sixteen devices, whose speed is off by a factor of their own, and
    by another at each size.
    """
    draw = random.Random(f"jobs {seed}")
    jobs, factors, at = [], {}, 0.0
    for i in range(count):
        devices = draw.choice((1, 2, 4))
        scaling, seconds = ScaledSpeed(devices, draw.uniform(0.01, 0.06)), 600 * math.exp(draw.gauss(0, 0.8))
        jobs.append(
            Job(
                name=f"job{i}",
                submit_s=at,
                work=seconds,
                speed=scaling,
                devices=devices,
                least=1,
                most=4 * devices,
                restart_s=10.0,
            )
        )
        factors[f"job{i}"] = math.exp(draw.gauss(0, SPEED))
        at += draw.expovariate(1 / 60)
    speeds = {job.name: job.speed for job in jobs}

    def truth(name: str, counts: tuple[int, ...]) -> float:
        here = math.exp(random.Random(f"{seed} {name} {counts}").gauss(0, SIZE))
        return here * factors[name] * speeds[name].rate(counts, "", 0, False)

    return Rehearsal(jobs, truth, ClusterShape.of([(4, 4, "cpu")]), seed=seed)


def measured(folder: Path, seed: int, count: int = 8) -> Rehearsal:
    """Jobs of the Pollux study on three nodes and more: believed is what was fitted to one and two nodes,
    true what was measured.
    """
    from paceline.sched import pollux

    draw = random.Random(f"jobs {seed}")
    jobs, real, at = [], {}, 0.0
    for i in range(count):
        name = draw.choice(MEASURED)
        application = pollux.application(folder, name)
        batch = application.first_batch * 16
        believed, true, table = ProfiledSpeed(_fitted(folder / name), batch, application.most_local), {}, {}
        for n in range(12, 65, 4):
            seconds = application.step_s((4,) * (n // 4), application.split(n, batch))
            if batch / n >= application.least_local and seconds > 0:
                true[n], table[n] = batch / seconds, believed.rate((4,) * (n // 4), "", 0, False)
        work = table[12] * 900 * math.exp(draw.gauss(0, 0.6))
        job = Job(
            name=f"{name}-{i}",
            submit_s=at,
            work=work,
            speed=RateTable({"t4": table}),
            devices=12,
            least=12,
            most=max(table),
            restart_s=30.0,
        )
        jobs.append(job)
        real[job.name] = RateTable({"t4": true})
        at += draw.expovariate(1 / 120)
    return Rehearsal(
        jobs,
        lambda name, counts: real[name].rate(counts, "t4", 0, False),
        ClusterShape.of([(16, 4, "t4")]),
        seed=seed,
    )


@cache
def _fitted(folder: Path) -> SynchronousModel:
    return SynchronousModel.fit([row for row in throughput.measured(folder) if row.nodes <= 2])


def covered(make: Callable[[int], Rehearsal], runs: int, known: bool = True) -> tuple[float, int]:
    """(share of answers whose interval held the end, answers)."""
    hits = [hit for seed in range(runs) for hit in replace(make(seed), known=known).run().hits]
    return sum(hits) / len(hits), len(hits)


def main(folder: Path | None) -> None:
    """Prints the shares."""
    make: Callable[[int], Rehearsal] = drawn if folder is None else lambda seed: measured(folder, seed)
    for known in (True, False):
        share, count = covered(make, 20, known)
        print(
            f"{'all jobs known' if known else 'later jobs not known'}: {100 * share:.0f} % of {count} ends"
            " inside the interval of four in five"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
