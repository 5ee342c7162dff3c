"""Brings the engine to the state that the scheduler decided: starts attempts once their devices are free,
asks others to stop, and kills those that do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from paceline.sched.live.clocks import Clocks
from paceline.sched.live.driver import ABSENT, OVER, AttemptStatus, Driver
from paceline.sched.live.ledger import Ledger
from paceline.sched.live.run import LIVE, STOPPING, VOID, WANTED, Attempt, RankExit, progress

#: times that a run is handed to an engine that does not begin it
_LAUNCHES = 5
#: seconds after which a run that was asked to stop is asked again
_NUDGE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended, and what to tell the user."""

    run: Attempt
    outcome: str
    text: str


class Reconciler:
    """Drives an engine towards the attempts that the ledger wants.

    Each action is recorded before it is taken, so that a restarted daemon can repeat it.
    """

    def __init__(self, ledger: Ledger, driver: Driver, grace_s: float, clocks: Clocks) -> None:
        self.ledger, self.driver, self.clocks = ledger, driver, clocks
        #: seconds from being asked to stop to being forced
        self.grace_s = grace_s
        #: last observed status, by token
        self.seen: dict[str, AttemptStatus] = {}
        self._launches: dict[str, int] = {}
        #: monotonic seconds, by token: when this process first asked a run to stop, when it last did,
        #: and when a rank of it was first seen to have ended badly
        self._stopping: dict[str, float] = {}
        self._nudged: dict[str, float] = {}
        self._broke: dict[str, float] = {}

    def observe(self) -> Iterator[Ending]:
        """Observes every launched attempt; yields those that ended, stops or restarts others."""
        launched = [run for run in self.ledger.runs.values() if run.state != WANTED]
        self.seen = self.driver.observe(launched)
        for run in launched:
            seen = self.seen[run.token]
            if seen.state == OVER:
                yield self._judge(run, seen)
            elif run.state == STOPPING:
                self._stop(run)
            elif seen.state == ABSENT:
                yield from self._again(run)
            elif any(exit_ is not None and exit_.code for exit_ in seen.exits):
                self._broken(run)

    def begin(self) -> None:
        """Starts the runs that are wanted and whose devices are free, in the order of their decisions."""
        for run in [run for run in self.ledger.runs.values() if run.state == WANTED]:
            slots = self._slots(run)
            if slots is not None:
                self._start(self.ledger.put(replace(run, state=LIVE, slots=slots)))

    def settled(self) -> bool:
        """Whether all that was decided has happened: nothing waits to begin or to end."""
        return all(
            run.state == LIVE and self.seen.get(run.token, AttemptStatus(state=ABSENT)).state == "running"
            for run in self.ledger.runs.values()
        )

    def _start(self, run: Attempt) -> None:
        names = [self.ledger.nodes[node].name for node, _ in run.allocation]
        spec = self.ledger.specs[run.job]
        self.driver.start(
            run, replace(spec, environment={**spec.environment, **self.ledger.batch_environment(run)}), names
        )

    def _slots(self, run: Attempt) -> tuple[tuple[int, ...], ...] | None:
        """Free device numbers on each node, None while others (or an earlier run of the same job) still hold
        them.
        """
        taken: dict[int, set[int]] = {}
        for other in self.ledger.runs.values():
            if other.state != WANTED:
                if other.job == run.job:
                    return None
                for (node, _), ids in zip(other.allocation, other.slots, strict=True):
                    taken.setdefault(node, set()).update(ids)
        out = []
        for node, count in run.allocation:
            free = [i for i in range(self.ledger.shape.devices[node]) if i not in taken.get(node, ())]
            if len(free) < count:
                return None
            out.append(tuple(free[:count]))
        return tuple(out)

    def _again(self, run: Attempt) -> Iterator[Ending]:
        """The engine does not have a run that it was given: it is given once more, a few times."""
        count = self._launches[run.token] = self._launches.get(run.token, 0) + 1
        if count <= _LAUNCHES:
            self._start(run)
        else:
            self.driver.stop(run)
            yield Ending(
                run=run,
                outcome="preempted",
                text=f"the engine did not begin {run.token} in {_LAUNCHES} trials",
            )

    def _stop(self, run: Attempt) -> None:
        """Asks, and after the grace period forces; repeated, as an earlier daemon may not have come to it.

        The grace period begins when this process first asks: a daemon that comes back gives all of it again.
        """
        now_s = self.clocks.monotonic_s()
        kill = now_s > self._stopping.setdefault(run.token, now_s) + self.grace_s
        if kill or now_s > self._nudged.get(run.token, -math.inf) + _NUDGE_S:
            self._nudged[run.token] = now_s
            runs = self.ledger.runs.values()
            new = next((other for other in runs if other.job == run.job and other.state == WANTED), None)
            if new is None or kill:
                self.driver.stop(run, kill=kill)
            else:
                self.driver.resize(run, new)

    def _broken(self, run: Attempt) -> None:
        """A rank failed: the other ranks cannot continue without it."""
        now_s = self.clocks.monotonic_s()
        since_s = self._broke.setdefault(run.token, now_s)
        self.driver.stop(run, kill=now_s > since_s + min(self.grace_s, 10.0))

    def _judge(self, run: Attempt, seen: AttemptStatus) -> Ending:
        """The outcome of an attempt, from the exits of its ranks."""
        exits = [exit_ for exit_ in seen.exits if exit_ is not None]
        real = [exit_ for exit_ in exits if exit_.code != VOID]
        if (
            len(exits) == len(real) == run.ranks
            and all(exit_.code == 0 for exit_ in real)
            and self._all_done(run, real)
        ):
            return Ending(run=run, outcome="completed", text=f"{run.job} completed")
        if run.state == STOPPING:
            return Ending(run=run, outcome=run.outcome, text=f"{run.job} stopped")
        killed = next((exit_ for exit_ in real if exit_.killed), None)
        if killed is not None:
            number = -killed.code if killed.code < 0 else killed.code - 128
            return Ending(run=run, outcome="preempted", text=f"{run.job} was killed by signal {number}")
        failed = next((exit_ for exit_ in real if exit_.code), None)
        if failed is not None and len(exits) == run.ranks:
            place = run.folder(self.driver.state)
            return Ending(
                run=run,
                outcome="failed",
                text=f"{run.job} failed with exit code {failed.code}; see {place}/*.log",
            )
        return Ending(
            run=run, outcome="preempted", text=f"{run.job} was lost with its node or taken off by the engine"
        )

    def _all_done(self, run: Attempt, exits: list[RankExit]) -> bool:
        """Code 0 after TERM may mean that a checkpoint was written; then the progress tells."""
        if not any(exit_.asked_to_stop for exit_ in exits):
            return True
        done = progress(self.driver.state, self.ledger.place(run.job))
        return done is not None and done[0] >= self.ledger.job(run.job).work * (1 - 1e-9)
