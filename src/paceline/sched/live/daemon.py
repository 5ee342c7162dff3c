"""The daemon: one loop round the state machine. It looks at the engine, tells the machine what happened, and
carries out what it decides.

Two clocks. On the wall's clock events have the times at which they were seen. On the model's clock time is
what the throughput model says: an event is told only when the real jobs have come as far as the model expects
by then, and a job's end when it has really ended; the file `limit` of a job says how far it may go until that
event, for jobs that care to wait. So the same job list gives the same decisions in a simulation and on every
engine, however fast or loaded the machines are.
"""

from __future__ import annotations

import contextlib
import copy
import math
import queue
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.errors import SpecError, UnknownName
from paceline.sched import event as ev
from paceline.sched.decision import Decision
from paceline.sched.job import Active
from paceline.sched.live import drivers, forecast
from paceline.sched.live.clocks import Clocks
from paceline.sched.live.driver import EngineAway
from paceline.sched.live.job_spec import JobSpec
from paceline.sched.live.ledger import MODEL, WALL, Ledger
from paceline.sched.live.reconciler import Ending, Reconciler
from paceline.sched.live.run import LIVE, STOPPING, Attempt, progress
from paceline.sched.live.run import OVER as RUN_OVER
from paceline.sched.live.server import DaemonServer
from paceline.sched.live.store import Store
from paceline.sched.machine import StateMachine


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSettings:
    """How a daemon runs; what is empty is taken from the jobs in the folder, or by default."""

    state: Path
    engine: str = ""
    policy: str = ""
    #: nodes of the local engine, or the engine's address or partition; see `drivers`
    nodes: str = ""
    clock: str = ""
    #: seconds between rounds of the policy; None: its own, at most 2 on the wall's clock
    interval_s: float | None = None
    #: seconds for a checkpoint after TERM
    grace_s: float = 60.0
    #: seconds between reports of progress to the policy
    report_s: float = 10.0
    #: most devices at once by tenant; others are not limited
    quotas: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.clock not in ("", WALL, MODEL):
            raise UnknownName("clock", self.clock, (WALL, MODEL), "allowed: wall, model")
        if self.grace_s < 0 or self.report_s <= 0 or (self.interval_s is not None and self.interval_s < 0):
            raise SpecError("grace and interval must not be negative, and report must be above zero")
        if any(devices < 1 for devices in self.quotas.values()):
            raise SpecError(f"a quota is at least one device, got {dict(self.quotas)}")


class Daemon:
    """A scheduler on a live engine. `say` gets one line for each decision and each thing that went wrong."""

    def __init__(
        self,
        setup: DaemonSettings,
        say: Callable[[str], None] = lambda text: None,
        clocks: Clocks | None = None,
    ) -> None:
        self.setup, self.say = setup, say
        self.clocks = clocks or Clocks()
        self.store = Store(setup.state)
        self._away = ""
        try:
            found = self.store.rows["meta"].get("era")
            self.driver = drivers.make(
                setup.engine or (found or {}).get("engine", "local"),
                setup.state,
                setup.nodes or self.store.rows["meta"].get("nodes", ""),
            )
            self.driver.clocks = self.clocks
            self.ledger = Ledger(
                self.store,
                engine=setup.engine,
                policy=setup.policy,
                clock=setup.clock,
                nodes=self.driver.nodes(),
                interval_s=setup.interval_s,
                quotas=setup.quotas,
                clocks=self.clocks,
            )
            if setup.nodes:
                self.store.commit([("meta", "nodes", setup.nodes)])
        except BaseException:
            self.store.close()
            raise
        for note in self.store.notes:
            say(note)
        self.reconciler = Reconciler(self.ledger, self.driver, setup.grace_s, self.clocks)
        self.model = self.ledger.era["clock"] == MODEL
        self._requests: queue.Queue[Callable[[], None]] = queue.Queue()
        self._stopping = False
        #: monotonic seconds of the last look at the nodes, and of the last reports
        self._nodes_s = -math.inf
        self._reports_s = -math.inf
        self._limits: dict[str, str] = {}
        self._seen: dict[str, forecast.ObservedSpeed] = {}
        self.server = DaemonServer(setup.state, self._requests, self)

    @property
    def machine(self) -> StateMachine:
        """The state that policies see."""
        return self.ledger.machine

    # -- the loop --------------------------------------------------------------------------------------

    def run(self, until_idle: bool = False) -> None:
        """Serves until it is stopped, or until every job is over."""
        try:
            while not self._stopping:
                self.turn()
                if until_idle and self.idle:
                    return
                with contextlib.suppress(queue.Empty):
                    self._requests.get(timeout=self.driver.poll_s)()
        finally:
            self.close()

    def stop(self) -> None:
        """Ends the loop; jobs go on, and the next daemon finds them."""
        self._stopping = True

    def close(self) -> None:
        """Releases the folder and the engine."""
        self.server.close()
        self.driver.close()
        self.store.close()

    @property
    def idle(self) -> bool:
        """Whether every job is over and gone from the engine."""
        return not self.ledger.runs and all(
            record["state"] == "over" for record in self.ledger.records.values()
        )

    def turn(self) -> None:
        """One turn of the loop: requests, observed attempts, events for the machine, attempts to start."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._requests.get_nowait()()
        try:
            endings = list(self.reconciler.observe())
            # a node that took runs with it is known to be gone before they are started again
            self._look_at_nodes(at_once=any(ending.outcome == "preempted" for ending in endings))
            for ending in endings:
                self._ended(ending)
        except EngineAway as error:
            if str(error) != self._away:
                self._away = str(error)
                self.say(f"{error}; nothing is started or given up until it answers")
            return
        if self._away:
            self._away = ""
            self.say(f"engine {self.driver.name} answers again")
        if self.model:
            self._advance()
        else:
            self._tick()
        try:
            self.reconciler.begin()
        except EngineAway as error:
            self.say(f"{error}; it is tried again")

    def now_s(self) -> float:
        """Seconds on the scheduler's clock; it never goes back."""
        return self.ledger.now_s()

    def _tell(self, *events: ev.Event, over: Attempt | None = None) -> None:
        for decision in self.ledger.tell(*events, over=over):
            self._say(decision)

    def _say(self, decision: Decision) -> None:
        self.say(f"{self.machine.state.now_s:10.1f} s  {decision}")

    def _tick(self) -> None:
        """On the wall's clock: submissions that are due, progress, rounds of the policy."""
        now = self.now_s()
        due = [
            ev.Submit(time_s=now, job=self._job(name, at)) for at, name in self.ledger.planned() if at <= now
        ]
        at_s = self.clocks.monotonic_s()
        # what runs is known as it is when others come
        if due or at_s > self._reports_s + self.setup.report_s:
            self._reports_s = at_s
            for run in [run for run in self.ledger.runs.values() if run.state == LIVE]:
                self._report(run.job, now)
        if due:  # the policy sees all of them before it is asked
            self._tell(*due)
        if now >= self.machine.wake_s:
            self._tell(ev.Tick(time_s=now))

    def _advance(self) -> None:
        """On the model's clock: the next event, once the real jobs are as far as the model says they are by
        then.
        """
        while self.reconciler.settled():
            event = forecast.upcoming(
                self.machine, [(at, self._job(name, at)) for at, name in self.ledger.planned()[:1]]
            )
            if event is None:
                return
            self._limit(event)
            if not self._reached(event):
                return
            if isinstance(event, ev.Ended):
                self.say(f"{event.time_s:10.1f} s  {event.name} completed")
            self._tell(event)
            if self.ledger.runs and not self.reconciler.settled():
                return

    def _limit(self, event: ev.Event) -> None:
        """Says how far each job may go until the next event."""
        for job in self.machine.state.running.values():
            limit = f"{self._expected(job, event.time_s)}\n"
            if self._limits.get(job.name) != limit:
                self._limits[job.name] = limit
                path = self.driver.state / "jobs" / self.ledger.place(job.name) / "limit"
                path.parent.mkdir(parents=True, exist_ok=True)
                beside = path.with_name("limit.tmp")
                beside.write_text(limit)
                beside.replace(path)

    @staticmethod
    def _expected(job: Active, time_s: float) -> int:
        """Whole units of work that the model expects by then."""
        return math.floor(job.done_at(time_s) + 1e-6)

    def _reached(self, event: ev.Event) -> bool:
        for job in self.machine.state.running.values():
            if self._finished(job.name):
                continue
            done = progress(self.driver.state, self.ledger.place(job.name))
            if (isinstance(event, ev.Ended) and event.name == job.name) or (
                done[0] if done else 0.0
            ) < self._expected(job, event.time_s):
                return False
        return True

    def _finished(self, name: str) -> bool:
        """Whether a job has really completed, though the model's time for that may not have come."""
        last = self.ledger.last.get(name)
        return last is not None and last.state == RUN_OVER and last.outcome == "completed"

    def _job(self, name: str, at: float) -> Any:
        return replace(self.ledger.job(name), submit_s=at)

    # -- what the engine shows -------------------------------------------------------------------------

    def _look_at_nodes(self, at_once: bool = False) -> None:
        """Nodes that went away or came back.

        Jobs on lost ones fall back to their checkpoints; the policy is asked when all is told.
        """
        if not at_once and self.clocks.monotonic_s() < self._nodes_s + 5 * self.driver.poll_s:
            return
        self._nodes_s = self.clocks.monotonic_s()
        up = {node.name for node in self.driver.nodes() if node.up}
        state = self.machine.state
        for index, node in enumerate(self.ledger.nodes):
            if node.name in up and not state.nodes.up[index]:
                self.say(f"node {node.name} is back")
                self._tell(ev.NodeUp(time_s=self.now_s(), node=index))
            elif node.name not in up and state.nodes.up[index]:
                now = self.now_s()
                hit = [
                    job.name for job in state.running.values() if any(n == index for n, _ in job.allocation)
                ]
                self.say(
                    f"node {node.name} is gone"
                    + (f", and with it {', '.join(hit)}, to be started again elsewhere" if hit else "")
                )
                self._tell(
                    *(ev.Preempted(time_s=now, name=name, done=self._kept(name)) for name in hit),
                    ev.NodeDown(time_s=now, node=index),
                )

    def _kept(self, name: str) -> float:
        """Work that the last checkpoint of a job holds."""
        found = progress(self.driver.state, self.ledger.place(name))
        return min(found[1], self.machine.state.jobs[name].job.work) if found else 0.0

    def _report(self, name: str, now: float) -> None:
        done, record = self._look(name, now), self.machine.state.jobs.get(name)
        if (
            done is not None
            and record is not None
            and abs(done - record.done_at(now)) > 1e-6 * record.job.work
        ):
            self._tell(ev.Report(time_s=now, name=name, done=done, phase=record.phase))

    def _ended(self, ending: Ending) -> None:
        """A run is over: what that means for its job."""
        known = self.ledger.runs[ending.run.token]  # it may have been told to stop since it was looked at
        run, name = replace(known, state=RUN_OVER, outcome=ending.outcome), known.job
        record = self.machine.state.jobs.get(name)
        now = self.now_s()
        # cancelled or over; or over before the model's time for it
        if record is None or (ending.outcome == "completed" and self.model):
            self.ledger.put(run)
        elif ending.outcome in ("completed", "failed"):
            self.say(f"{now:10.1f} s  {ending.text}")
            self._tell(ev.Ended(time_s=now, name=name, outcome=ending.outcome), over=run)
        elif known.state == STOPPING:
            self.ledger.put(run)
            if not self.model:
                self._report(name, now)
        else:
            self._preempted(run, ending.text, now)

    def _preempted(self, run: Attempt, text: str, now: float) -> None:
        """A run was killed or lost: its job waits again, unless that happened too often without its coming
        any further.
        """
        kept, record = self._kept(run.job), self.ledger.records[run.job]
        misses = 1 if kept > record.get("kept", -1.0) else record.get("misses", 0) + 1
        retries = self.ledger.specs[run.job].retries
        if misses > retries:
            self.say(f"{now:10.1f} s  {text}, {misses} times in a row without coming further: given up")
            self._tell(ev.Ended(time_s=now, name=run.job, outcome="failed"), over=run)
            return
        self.say(f"{now:10.1f} s  {text}; it goes on from its checkpoint")
        self.ledger.note(run.job, misses=misses, kept=kept)
        self._tell(ev.Preempted(time_s=now, name=run.job, done=kept), over=run)

    # -- what users ask --------------------------------------------------------------------------------

    def submit(self, specs: Iterable[JobSpec]) -> list[str]:
        """Takes in jobs; those that are there already stay as they are. Returns the names of new ones."""
        known = self.ledger.specs
        new = [
            spec if spec.name in known else spec.resolved(self.ledger.shape).with_history(self._past(spec))
            for spec in specs
        ]
        names = self.ledger.plan(new, self.now_s())
        for name in names:
            if (place := self.ledger.place(name)) != name:
                self.say(
                    f"{name} begins anew, in jobs/{place}: jobs/{name} holds an earlier job of that name, "
                    "of which no record is left"
                )
        return names

    def _past(self, spec: JobSpec) -> list[float]:
        """Shares of their work that past jobs of the same tenant did; 1 is success."""
        rows = [
            self._row(name)
            for name, record in self.ledger.records.items()
            if record["state"] == "over"
            and self.ledger.specs[name].fields.get("tenant") == spec.fields.get("tenant")
        ]
        return [
            1.0 if row["state"] == "completed" else min(row["done"] / row["work"], 1 - 1e-9)
            for row in rows
            if row["attempts"]
        ]

    def cancel(self, name: str) -> str:
        """Ends a job: TERM, then force; returns how it counts."""
        record = self._known(name)
        if record["state"] == "over":
            raise SpecError(f"job {name!r} is over already ({record['outcome']})")
        now = self.now_s()
        if record["state"] == "planned":
            self.ledger.note(name, state="over", outcome="cancelled", end_s=now)
            return "cancelled"
        outcome = "killed" if name in self.machine.state.running else "cancelled"
        self.say(f"{now:10.1f} s  {name} is {outcome} by its user")
        self._tell(ev.Ended(time_s=now, name=name, outcome=outcome))
        return outcome

    def eta(self, name: str) -> forecast.Eta:
        """When a job will be over, with an interval. With many jobs it takes seconds: see `ask`."""
        return self.ask(name).answer()

    def ask(self, name: str) -> forecast.EtaQuery:
        """The question when a job will be over, for another thread to answer while the loop goes on."""
        record = self._known(name)
        if record["state"] == "over":
            raise SpecError(f"job {name!r} is over already ({record['outcome']})")
        planned = [(at, self._job(other, at)) for at, other in self.ledger.planned()]
        now = self.now_s()
        done = {
            other: found
            for other in self.machine.state.running
            if (found := self._look(other, now)) is not None and not self.model
        }
        machine, seen = copy.deepcopy((self.machine, self._seen))
        return forecast.EtaQuery(machine=machine, planned=planned, name=name, now_s=now, seen=seen, done=done)

    def _look(self, name: str, now: float) -> float | None:
        """Work done by a job as it says; None where it never did."""
        found = progress(self.driver.state, self.ledger.place(name))
        record = self.machine.state.jobs.get(name)
        if found is None or record is None:
            return None
        done = min(found[0], record.job.work)
        if not self.model and name in self.machine.state.running and name in self.ledger.last:
            self._seen.setdefault(name, forecast.ObservedSpeed()).look(
                record, self.ledger.last[name].attempt, done, now
            )
        return done

    def _known(self, name: str) -> dict[str, Any]:
        if name not in self.ledger.records:
            raise UnknownName("job", name, self.ledger.records, "see: paceline queue")
        return self.ledger.records[name]

    def queue(self) -> list[dict[str, Any]]:
        """All jobs in the order of their submission."""
        return [self._row(name) for name in self.ledger.records]

    def _row(self, name: str) -> dict[str, Any]:
        record, active = self.ledger.records[name], self.machine.state.jobs.get(name)
        reported = progress(self.driver.state, self.ledger.place(name))
        last = self.ledger.last.get(name)
        state = "planned" if active is None else active.status
        if record["state"] == "over":
            state = record["outcome"]
        nodes = [self.ledger.nodes[node].name for node, _ in active.allocation] if active is not None else []
        work = self.ledger.job(name).work
        done = 0.0
        if state == "completed":
            done = work
        elif reported:
            done = min(reported[0], work)
        elif active is not None:
            done = active.done_at(self.now_s())
        return {
            "job": name,
            "state": state,
            "unit": self.ledger.specs[name].unit,
            "reported": reported is not None or active is None,
            "devices": active.devices if active is not None else 0,
            "nodes": nodes,
            "work": work,
            "done": done,
            "submit_s": record["submit_s"],
            "end_s": record.get("end_s"),
            "attempts": last.attempt if last else 0,
        }

    def summary(self) -> dict[str, Any]:
        """What ran and what was decided, for --json."""
        start = self.ledger.era["log_from"]
        log = [entry for key, entry in self.store.rows["log"].items() if int(key) >= start]
        return {
            "engine": self.ledger.era["engine"],
            "policy": self.ledger.era["policy"],
            "jobs": self.queue(),
            "decisions": [
                {"time_s": entry["time_s"], **decision} for entry in log for decision in entry["decisions"]
            ],
        }
