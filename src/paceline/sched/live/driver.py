"""What the daemon asks of an engine: {nodes, start, stop with checkpoint, resize, observe}.

No engine here can change the nodes of a running gang (Slurm can only shrink it, Ray's placement groups are
fixed), so a resize is a stop with checkpoint, and a start elsewhere once that has ended. Runs and the daemon
meet in files (see `run`): the state folder must be one that all nodes see. An engine adds two things: it
begins processes on nodes, and it knows which it still has.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import RunError
from paceline.sched.live import attempt
from paceline.sched.live.clocks import Clocks
from paceline.sched.live.job_spec import JobSpec
from paceline.sched.live.run import Attempt, AttemptFolder, RankExit

#: how a run looks from outside: the engine does not have it and nobody began it; it waits in the engine; it
#: runs; it is over
ABSENT, PENDING, RUNNING, OVER = "absent", "pending", "running", "over"


class EngineAway(RunError):
    """The engine does not answer; nothing is known until it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node as the engine reports it."""

    name: str
    devices: int
    kind: str = "cpu"
    up: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStatus:
    """A run as it was observed; `exits` has None for a rank that ended without a trace (or still runs)."""

    state: str
    exits: tuple[RankExit | None, ...] = ()


class Driver(ABC):
    """An engine. Every call may be repeated: after a crash the daemon does not know which ones it made."""

    name: str = ""
    #: seconds between looks at it
    poll_s: float = 0.2
    #: seconds that a rank without its engine has to see that it is called off, before it counts as dead
    fence_s: float = 10.0

    def __init__(self, state: Path) -> None:
        self.state = state.absolute()
        self.clocks = Clocks()
        #: runs that the engine lost: when this was noticed
        self._lost: dict[str, float] = {}

    @abstractmethod
    def nodes(self) -> list[Node]:
        """All nodes, in an order that does not change."""

    @abstractmethod
    def launch(self, run: Attempt, folder: AttemptFolder, node_names: Sequence[str]) -> None:
        """Begins the processes of a run, one on each node of its allocation."""

    @abstractmethod
    def has(self, runs: Sequence[tuple[Attempt, AttemptFolder]]) -> dict[str, str]:
        """PENDING or RUNNING by token, for the runs that the engine has now."""

    def destroy(self, run: Attempt, folder: AttemptFolder) -> None:  # noqa: B027  (the files may be enough)
        """Takes a run off the engine by force; the files have asked it to go."""

    def close(self) -> None:  # noqa: B027
        """Lets go of the engine; runs stay."""

    def start(self, run: Attempt, spec: JobSpec, node_names: Sequence[str]) -> None:
        """Begins a run on its nodes, at once or when the engine can. Told twice, it is still begun once."""
        folder = AttemptFolder(self.state, run)
        folder.write(spec, run, node_names)
        self.launch(run, folder, node_names)

    def stop(self, run: Attempt, *, kill: bool = False) -> None:
        """Asks a run to checkpoint and end, or (`kill`) ends it; a run that has not begun never will."""
        folder = AttemptFolder(self.state, run)
        folder.ask("kill" if kill else "stop")
        begun = [not folder.void(rank) for rank in range(run.ranks)]
        if kill or not any(begun):
            self.destroy(run, folder)

    def resize(self, old: Attempt, new: Attempt) -> None:
        """Makes way for a job to go on as `new` in place of `old`. By default `old` is asked to checkpoint
        and end; the daemon starts `new` when nothing of it runs any more and the devices are free. An engine
        that can do better in between may."""
        self.stop(old)

    def observe(self, runs: Iterable[Attempt]) -> dict[str, AttemptStatus]:
        """How each run is, by token."""
        pairs = [(run, AttemptFolder(self.state, run)) for run in runs]
        # asked before the files are read: what ends in between is then seen as running once more, never as
        # lost
        known = self.has(pairs) if pairs else {}
        return {run.token: self._seen(run, folder, known.get(run.token)) for run, folder in pairs}

    def _seen(self, run: Attempt, folder: AttemptFolder, state: str | None) -> AttemptStatus:
        exits = tuple(folder.exits())
        if all(exits):
            self._lost.pop(run.token, None)
            return AttemptStatus(state=OVER, exits=exits)
        if state is not None:
            self._lost.pop(run.token, None)
            return AttemptStatus(state=state, exits=exits)
        if not any(folder.claimed(rank) for rank in range(run.ranks)):
            return AttemptStatus(state=ABSENT, exits=exits)
        # the engine lost it: ranks that may still run see `kill` and say so; those that never began never
        # will
        folder.ask("kill")
        for rank in range(run.ranks):
            folder.void(rank)
        now_s = self.clocks.monotonic_s()
        since_s = self._lost.setdefault(run.token, now_s)
        dead = all(found or self.dead(folder, rank) for rank, found in enumerate(exits))
        gone = dead or now_s - since_s > self.fence_s
        return AttemptStatus(state=OVER if gone else RUNNING, exits=tuple(folder.exits()))

    def dead(self, folder: AttemptFolder, rank: int) -> bool:
        """Whether it is certain that nothing of a rank runs any more."""
        return False


def command(folder: AttemptFolder, rank: int | str) -> list[str]:
    """What runs a rank."""
    return [sys.executable, "-I", "-S", str(Path(attempt.__file__)), str(folder.path), str(rank)]
