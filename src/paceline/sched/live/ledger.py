"""What the daemon knows, and the order in which it comes to know it: an event and the decisions that follow
are written before anything is carried out. A daemon that was killed reads the log, asks the same policy the
same questions, and finds the runs that it wanted."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, RunError, SpecError
from paceline.sched import event as ev
from paceline.sched import policies
from paceline.sched.decision import Decision, Resize, Start, Stop, devices
from paceline.sched.job import Job
from paceline.sched.live.clocks import ClockOrigin, Clocks
from paceline.sched.live.driver import Node
from paceline.sched.live.job_spec import JobSpec
from paceline.sched.live.run import LIVE, OVER, STOPPING, WANTED, Attempt
from paceline.sched.live.store import Row, Store, StoreError, free_place, place_of
from paceline.sched.machine import StateMachine
from paceline.sched.nodes import ClusterShape
from paceline.sched.policy import Policy
from paceline.spec.names import file_name

#: clocks: seconds of the wall, or those of the throughput model (see `daemon`)
WALL, MODEL = "wall", "model"
#: most seconds between rounds of a policy on the wall's clock, unless the user says otherwise: rounds cost
#: nothing here
_PATIENCE_S = 2.0


def _policy(era: Mapping[str, Any]) -> Policy:
    """A fresh policy, with the quotas of an era."""
    quotas = era.get("quotas")
    try:
        return policies.get(era["policy"], **({"quotas": quotas} if quotas else {}))
    except SpecError as error:
        if quotas and "quotas" in str(error):
            raise SpecError(
                f"policy {era['policy']!r} does not keep quotas; choose another, such as marginal, srtf or"
                " fifo"
            ) from None
        raise


class Ledger:
    """The state machine, the submitted jobs and their attempts, kept in a store."""

    def __init__(
        self,
        store: Store,
        *,
        engine: str,
        policy: str,
        clock: str,
        nodes: Sequence[Node],
        interval_s: float | None = None,
        quotas: Mapping[str, int] | None = None,
        clocks: Clocks | None = None,
    ) -> None:
        self.store = store
        self._clocks = clocks or Clocks()
        rows = store.rows
        self.specs: dict[str, JobSpec] = {}
        #: state of each job: planned, submitted or over; outcome, times in seconds, misses in a
        #: row
        self.records: dict[str, dict[str, Any]] = {}
        for name, row in rows["orders"].items():
            self.specs[name] = JobSpec.of(row["given"], Path(row["given"]["folder"]))
            self.records[name] = {key: value for key, value in row.items() if key != "given"}
        self.last: dict[str, Attempt] = {}
        #: runs that are not over, by token, in the order in which they were decided
        self.runs: dict[str, Attempt] = {}
        for value in rows["runs"].values():
            self._keep(Attempt.from_dict(value))
        busy = any(record["state"] != "over" for record in self.records.values()) or bool(self.runs)
        self.era = self._era(rows["meta"].get("era"), busy, engine, policy, clock, nodes, interval_s, quotas)
        known = [Node(**node) for node in self.era["nodes"]]
        self.nodes = known
        self.shape = ClusterShape(
            devices=tuple(n.devices for n in known),
            kinds=tuple(n.kind for n in known),
            racks=(0,) * len(known),
            name=self.era["engine"],
        )
        self.count = len(rows["log"])
        self.machine = self._replayed()
        self._origin = ClockOrigin(self._clocks, self.era, least_s=self.machine.state.now_s)

    def _era(
        self,
        found: dict[str, Any] | None,
        busy: bool,
        engine: str,
        policy: str,
        clock: str,
        nodes: Sequence[Node],
        interval_s: float | None,
        quotas: Mapping[str, int] | None,
    ) -> dict[str, Any]:
        """The settings under which the log is read; new ones only while no job is left."""
        if found is not None and busy:
            for what, asked in (
                ("engine", engine),
                ("policy", policy),
                ("clock", clock),
                ("quota", dict(quotas or {})),
            ):
                known = found.get("quotas", {}) if what == "quota" else found[what]
                if asked and asked != known:
                    raise SpecError(
                        f"jobs in {self.store.folder} are under {what} {known!r}, got {asked!r}; leave"
                        f" --{what} out, wait until they are over, or use another folder with --state"
                    )
            return found
        era: dict[str, Any] = {
            "engine": engine or "local",
            "policy": policy or "marginal",
            "clock": clock or WALL,
            **ClockOrigin.now(self._clocks),
            "log_from": len(self.store.rows["log"]),
            "nodes": [{"name": n.name, "devices": n.devices, "kind": n.kind} for n in nodes],
        }
        if not nodes:
            raise RunError(f"engine {era['engine']!r} has no nodes")
        if quotas:
            era["quotas"] = dict(quotas)
        if interval_s is None:
            usual = _policy(era).interval_s
            interval_s = usual if era["clock"] == MODEL else min(usual, _PATIENCE_S)
        era["interval_s"] = interval_s
        self.store.commit([("meta", "era", era)])
        return era

    def _replayed(self) -> StateMachine:
        """A machine that was told the log: the policy is asked the same again, and must answer as it did."""
        policy = _policy(self.era)
        policy.interval_s = self.era["interval_s"]
        machine = StateMachine(self.shape, policy, log=False)
        for key, entry in list(self.store.rows["log"].items()):
            if int(key) < self.era["log_from"]:
                continue
            plain = {k: v for k, v in entry.items() if k not in ("decisions", "quiet")}
            event = ev.from_dict(plain, {plain["job"]: self.job(plain["job"])} if "job" in plain else {})
            if entry.get("quiet"):
                machine.tell_quietly(event)
                continue
            answers = [decision.to_dict() for decision in machine.handle(event)]
            if answers != entry["decisions"]:
                raise RunError(
                    f"policy {self.era['policy']!r} no longer decides as it did at {entry['time_s']:g} s "
                    f"({entry['event']}, event {key}); put back the version of it that wrote the log, "
                    "or use another folder with --state"
                )
        return machine

    def job(self, name: str) -> Job:
        """The job of an order, as submitted; one that asks for more devices than there are asks for all of
        them.
        """
        return self._capped(self.specs[name].job(self.shape.kinds, self.records[name]["submit_s"]))

    def _capped(self, job: Job) -> Job:
        """A job that asks for more devices than there are asks for all of them."""
        most = max(self.most, job.least)
        return job if job.devices <= self.most else replace(job, devices=most, most=most)

    def place(self, name: str) -> str:
        """The folder of a job, in `jobs` of the state folder."""
        return place_of(name, self.records[name])

    @property
    def most(self) -> int:
        """Devices of the kind that has most."""
        return max(
            sum(d for d, k in zip(self.shape.devices, self.shape.kinds, strict=True) if k == kind)
            for kind in self.shape.kinds
        )

    def now_s(self) -> float:
        """Seconds on the scheduler's clock; it never goes back."""
        now_s = self.machine.state.now_s
        return now_s if self.era["clock"] == MODEL else max(now_s, self._origin.passed_s())

    # -- what happens ----------------------------------------------------------------------------------

    def plan(self, specs: Sequence[JobSpec], now_s: float) -> list[str]:
        """Takes in orders, to be submitted at their times; those that are there already, the same, are left.
        Returns the names of new ones.
        """
        rows: list[Row] = []
        new: dict[str, JobSpec] = {}
        taken = self.store.places()
        for spec in specs:
            if spec.name in new:
                raise SpecError(f"two jobs are named {spec.name!r}")
            if spec.name in self.specs:
                if self.specs[spec.name].written != spec.written:
                    raise SpecError(
                        f"a job named {spec.name!r} was submitted before, with other settings; "
                        "choose another name"
                    )
                continue
            self._check(spec)
            new[spec.name] = spec
            row = {
                "given": dict(spec.fields),
                "state": "planned",
                "submit_s": now_s + spec.submit_s,
                "place": free_place(file_name(spec.name), taken),
            }
            rows.append(("orders", spec.name, row))
        if rows:
            self.store.commit(rows)
        for _, name, row in rows:
            self.specs[name] = new[name]
            self.records[name] = {key: value for key, value in row.items() if key != "given"}
        return list(new)

    def _check(self, spec: JobSpec) -> None:
        """Refuses what the cluster or a quota can never hold."""
        job = spec.job(self.shape.kinds)
        if job.least > self.most:
            raise SpecError(
                f"job {spec.name!r} needs {job.least} devices of one kind, but the cluster has {self.most}"
            )
        quota = self.era.get("quotas", {}).get(job.tenant, self.most)
        if job.least > quota:
            raise SpecError(
                f"job {spec.name!r} needs {job.least} devices, "
                f"but tenant {job.tenant!r} has a quota of {quota}"
            )
        spec.check_speed(self._capped(job), self.shape)

    def batch_environment(self, run: Attempt) -> dict[str, str]:
        """Environment variables on the batch of an attempt."""
        kind = self.shape.kinds[run.allocation[0][0]]
        return self.specs[run.job].batch_environment(
            devices(run.allocation), kind, self.machine.policy.adaptive
        )

    def planned(self) -> list[tuple[float, str]]:
        """(seconds, name) of orders that are not submitted yet, in that order."""
        index = {name: i for i, name in enumerate(self.specs)}
        found = [
            (record["submit_s"], index[name], name)
            for name, record in self.records.items()
            if record["state"] == "planned"
        ]
        return [(at, name) for at, _, name in sorted(found)]

    def tell(self, *events: ev.Event, over: Attempt | None = None) -> list[Decision]:
        """Tells the machine events of one time, writes them with what was decided, and notes the runs that
        follow; `over` ended with them.
        """
        decisions = self._decide(events)
        rows: list[Row] = []
        if over is not None:
            rows.append(self._keep(over))
        for event in events:
            last = event is events[-1]
            entry = {
                **event.to_dict(),
                **({} if last else {"quiet": True}),
                "decisions": [d.to_dict() for d in decisions] if last else [],
            }
            rows += [("log", str(self.count), entry), *self._follow(event)]
            self.count += 1
        for decision in decisions:
            rows += self._decided(decision)
        self.store.commit(rows)
        return decisions

    def _decide(self, events: Sequence[ev.Event]) -> list[Decision]:
        """What the policy says; where it fails, the machine is made anew from what is written."""
        try:
            for event in events[:-1]:
                self.machine.tell_quietly(event)
            return self.machine.handle(events[-1])
        except Exception as error:
            try:
                self.machine = self._replayed()
            except Exception as second:
                raise StoreError(f"{error}; and what is written cannot be read again: {second}") from None
            what = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
            raise RunError(
                f"policy {self.era['policy']!r} failed: {what}; running jobs go on: "
                "mend the policy and start the scheduler again"
            ) from None

    def put(self, run: Attempt) -> Attempt:
        """Writes a run that changed."""
        self.store.commit([self._keep(run)])
        return run

    def note(self, name: str, **what: Any) -> None:
        """Writes something about an order."""
        self.store.commit([self._record(name, **what)])

    def current(self, name: str) -> Attempt | None:
        """The run of a job that is not over and not being stopped."""
        return next(
            (run for run in self.runs.values() if run.job == name and run.state in (WANTED, LIVE)), None
        )

    def _record(self, name: str, **what: Any) -> Row:
        self.records[name] |= what
        return "orders", name, {"given": dict(self.specs[name].fields), **self.records[name]}

    def _keep(self, run: Attempt) -> Row:
        if run.state == OVER:
            self.runs.pop(run.token, None)
        else:
            self.runs[run.token] = run
        if run.job not in self.last or self.last[run.job].attempt <= run.attempt:
            self.last[run.job] = run
        return "runs", run.token, run.to_dict()

    def _follow(self, event: ev.Event) -> list[Row]:
        """What an event means for orders and runs."""
        if isinstance(event, ev.Submit):
            return [self._record(event.job.name, state="submitted", submit_s=event.job.submit_s)]
        if isinstance(event, ev.Ended):
            return [
                self._record(event.name, state="over", outcome=event.outcome, end_s=event.time_s),
                *self._stop(event.name, "cancelled"),
            ]
        if isinstance(event, ev.Preempted):
            return self._stop(event.name, "preempted")
        return []

    def _decided(self, decision: Decision) -> list[Row]:
        rows: list[Row] = []
        if isinstance(decision, (Stop, Resize)):
            rows += self._stop(decision.name, "checkpointed")
        if isinstance(decision, (Start, Resize)):
            attempt = self.last[decision.name].attempt + 1 if decision.name in self.last else 1
            run = Attempt(
                job=decision.name,
                attempt=attempt,
                allocation=decision.allocation,
                nonce=secrets.token_hex(4),
                place=self.place(decision.name),
            )
            rows.append(self._keep(run))
        return rows

    def _stop(self, name: str, outcome: str) -> list[Row]:
        """The run of a job is to end; one that was never handed to the engine just does not happen."""
        run = self.current(name)
        if run is None:
            return []
        if run.state == WANTED:
            return [self._keep(replace(run, state=OVER, outcome="void"))]
        return [self._keep(replace(run, state=STOPPING, outcome=outcome))]
