"""Jobs as processes of this machine. They outlive the daemon; a daemon that comes back finds them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import SpecError
from paceline.sched.live.driver import ABSENT, PENDING, RUNNING, Driver, Node, command
from paceline.sched.live.run import Attempt, AttemptFolder

_WRITTEN = re.compile(r"^\s*(\d+)\s*x\s*(\d+)(?:\s*x\s*([A-Za-z][\w.-]*))?\s*$", re.IGNORECASE)


class LocalDriver(Driver):
    """Nodes are parts of this machine: `4x2` is four of two devices each. Names listed in the file `down` of
    the state folder are out of use.
    """

    name = "local"
    poll_s = 0.1

    def __init__(self, state: Path, nodes: str = "") -> None:
        super().__init__(state)
        parts = [_WRITTEN.match(part) for part in (nodes or f"1x{os.cpu_count() or 1}").split("+")]
        if not all(parts) or any(int(m[1]) < 1 or int(m[2]) < 1 for m in parts if m):
            raise SpecError(
                f"nodes of this machine are written NODESxDEVICES, such as 4x2 (or 4x2xa100), got {nodes!r}"
            )
        groups = [(int(m[1]), int(m[2]), m[3] or "cpu") for m in parts if m]
        flat = [(devices, kind) for count, devices, kind in groups for _ in range(count)]
        self._nodes = [
            Node(name=f"local{i}", devices=devices, kind=kind) for i, (devices, kind) in enumerate(flat)
        ]
        self._begun: dict[str, list[subprocess.Popen[bytes]]] = {}

    def nodes(self) -> list[Node]:
        try:
            down = set((self.state / "down").read_text().split())
        except OSError:
            return self._nodes
        return [Node(name=n.name, devices=n.devices, kind=n.kind, up=n.name not in down) for n in self._nodes]

    def launch(self, run: Attempt, folder: AttemptFolder, node_names: Sequence[str]) -> None:
        begun = self._begun.setdefault(run.token, [])
        environment = {**os.environ, "PACELINE_RUN": str(folder.path)}
        with (folder.path / "attempt.log").open("ab") as log:
            for rank in range(run.ranks):
                if not folder.claimed(rank):
                    begun.append(
                        subprocess.Popen(
                            command(folder, rank),
                            env=environment,
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=log,
                            cwd="/",
                            start_new_session=True,
                        )
                    )

    def has(self, runs: Sequence[tuple[Attempt, AttemptFolder]]) -> dict[str, str]:
        for processes in self._begun.values():
            # nobody else reaps them
            processes[:] = [process for process in processes if process.poll() is None]
        self._begun = {token: processes for token, processes in self._begun.items() if processes}
        out = {}
        for run, folder in runs:
            begun = self._begun.get(run.token)
            claimed = [folder.claimed(rank) for rank in range(run.ranks)]
            if all(
                self._runs(folder, rank, bool(begun))
                for rank in range(run.ranks)
                if claimed[rank] and not folder.exit(rank)
            ):
                if all(claimed):
                    out[run.token] = RUNNING
                elif begun:
                    out[run.token] = PENDING
                else:
                    # a daemon was killed between two ranks: the rest is begun when it is started again
                    out[run.token] = ABSENT
        return out

    def _runs(self, folder: AttemptFolder, rank: int, begun: bool) -> bool:
        pid = folder.pid(rank)
        return _is(pid, folder) if pid else begun or bool(_marked(folder))

    def destroy(self, run: Attempt, folder: AttemptFolder) -> None:
        """What still carries its mark goes, whoever its parent is now."""
        for pid in _marked(folder):
            # the watchers stay, to say how it ended
            if not any(pid == folder.pid(rank) for rank in range(run.ranks)):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Jobs outlive the daemon: their watchers are nobody's to wait for now."""
        for process in (process for processes in self._begun.values() for process in processes):
            process.returncode = 0
        self._begun.clear()

    def dead(self, folder: AttemptFolder, rank: int) -> bool:
        """Kills what a killed watcher left behind; certain once nothing carries the mark."""
        left = _marked(folder)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        return not left


def _is(pid: int, folder: AttemptFolder) -> bool:
    """Whether a process number belongs to the run: numbers are used again, so its environment must say so."""
    if pid <= 0:
        return False
    try:
        found = Path(f"/proc/{pid}/environ").read_bytes()
    except FileNotFoundError:
        return not Path("/proc/self").exists() and _exists(pid)  # no /proc: the number is all there is
    except OSError:
        return False
    return f"PACELINE_RUN={folder.path}".encode() in found.split(b"\0") and not _zombie(pid)


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (OSError, IndexError):
        return True


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _marked(folder: AttemptFolder) -> list[int]:
    """Processes of a run, by the mark in their environment."""
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if _is(int(entry.name), folder)]
