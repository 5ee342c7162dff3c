"""Workers and servers of one run on this machine: started, watched, ended. On many machines, start workers
with torchrun.

    with Local(workers=4, servers=2) as run:
        run.start([sys.executable, "train.py"])
        run.wait()
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from paceline.errors import RunError, SpecError
from paceline.train.asynchronous import server
from paceline.train.asynchronous.store import VARIABLE, Rendezvous, TCPStore, secret, serve_store


class Supervisor:
    """Starts the servers of each run once a worker has said what they serve, and again when they die.

    Those of a run whose workers have all left end when the next run begins, the others with the session.
    """

    def __init__(self, place: Rendezvous, *, most_lives: int = 10) -> None:
        self._place, self._most = place, most_lives
        #: optimizers that servers may run beside the usual ones
        self.trusted: set[str] = set()
        self._runs: list[_Run] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @property
    def processes(self) -> dict[int, subprocess.Popen[bytes]]:
        """Servers of the last run, by number."""
        return self._runs[-1].processes if self._runs else {}

    def _watch(self) -> None:
        session = self._place.session()
        while not self._stop.wait(0.02):
            key = f"announced/{len(self._runs) + 1}"
            if session.check([key]):
                self._runs.append(_Run(replace(self._place, number=int(session.get(key))), self._most))
            for run in self._runs[:-1]:
                if run.processes and run.left():
                    run.end()
            for run in self._runs:
                run.keep_up(self.trusted)

    def wait_for_workers(self, timeout_s: float) -> None:
        """Until the workers of all runs have left."""
        deadline = time.monotonic() + timeout_s
        while not all(run.left() for run in self._runs) and time.monotonic() < deadline:
            time.sleep(0.02)

    def close(self) -> list[dict[str, Any]]:
        """Tells servers to save and end; what each reports."""
        self._stop.set()
        self._thread.join()  # it may be ending the servers of an earlier run
        for run in self._runs:
            run.stop()
        for run in self._runs:
            run.end()
        reports = [report for run in self._runs for report in run.reports]
        self._runs.clear()
        return reports


def announce(place: Rendezvous, *, workers: int, servers: int = 0) -> None:
    """Tells the supervisor of a session of a run, whose servers may start; its first worker does."""
    place.store().set("size", f"{workers} {servers}")
    session = place.session()
    session.set(f"announced/{session.add('announced', 1)}", str(place.number))


class _Run:
    """A run and its servers, as the supervisor sees it."""

    def __init__(self, place: Rendezvous, most_lives: int) -> None:
        self._place, self._store, self._most = place, place.store(), most_lives
        self._workers, self._servers = (int(word) for word in self._store.get("size").split())
        self._scratch = tempfile.mkdtemp(prefix="paceline-servers-") if self._servers else None
        self._lives = 0
        self._ended = False
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        #: what its servers said at their end
        self.reports: list[dict[str, Any]] = []

    def keep_up(self, trusted: Collection[str]) -> None:
        """Starts its servers, and again those that have died."""
        for number in range(0 if self._ended else self._servers):
            known = self.processes.get(number)
            if known is None:
                self.processes[number] = self._start(number, trusted)
            elif known.poll() not in (None, 0, server.CANNOT) and self._lives < self._most:
                self._lives += 1
                self.processes[number] = self._start(number, trusted)

    def _start(self, number: int, trusted: Collection[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "paceline.train.asynchronous.server", str(number)]
        allowed = ",".join(filter(None, (os.environ.get(server.OPTIMIZERS), *sorted(trusted))))
        told = {
            VARIABLE: str(self._place),
            server.RUN_NUMBER: str(self._place.number),
            server.OPTIMIZERS: allowed,
            server.SCRATCH: str(self._scratch),
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.Popen(command, env={**os.environ, **told})

    def left(self) -> bool:
        """Whether all workers have come and gone."""
        joined = max(self._workers, self._store.add("workers", 0))
        return self._store.add("left", 0) >= joined

    def stop(self) -> None:
        """Tells its servers to save and end."""
        server.stop(self._store)

    def end(self) -> None:
        """Ends its servers, and takes what they report."""
        if self._ended:
            return
        self._ended = True
        self.stop()
        for number, process in sorted(self.processes.items()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10.0)
            if process.poll() is None:
                process.kill()
                process.wait()
            if self._store.check([f"end/{number}"]):
                self.reports.append(json.loads(self._store.get(f"end/{number}")))
        self.processes.clear()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class _Kept:
    """What rank 0 keeps for the runs of its processes."""

    store: TCPStore
    place: Rendezvous
    supervisor: Supervisor


_kept: list[_Kept] = []


def keep(host: str, trusted: str | None = None) -> Rendezvous:
    """Keeps the store and the servers of a session inside this process (rank 0) until all workers have left.

    The store listens on `host`; `trusted` is an optimizer that its servers may run.
    """
    if not _kept:
        store = serve_store(host)
        place = Rendezvous(host=host, port=store.port, run=secret())
        _kept.append(_Kept(store, place, Supervisor(place)))
        atexit.register(_end)
    if trusted is not None:
        _kept[0].supervisor.trusted.add(trusted)
    return _kept[0].place


def _end() -> None:
    kept = _kept.pop()
    if not hasattr(sys, "last_value"):  # else this process ends by an error, and the run with it
        kept.supervisor.wait_for_workers(kept.place.timeout_s)
    kept.supervisor.close()


class Local:
    """A run on this machine.

    Workers may be added, killed and waited for; servers that die are started again.
    """

    def __init__(self, *, workers: int, servers: int = 1, checkpoint: Path | None = None) -> None:
        if workers < 1 or servers < 1:
            raise SpecError(f"a run needs at least one worker and one server, got {workers} and {servers}")
        self.count, self.servers, self._checkpoint = workers, servers, checkpoint
        self._store: TCPStore | None = None
        self.workers: list[subprocess.Popen[bytes]] = []
        self.reports: list[dict[str, Any]] = []

    def __enter__(self) -> Local:
        self._store = serve_store()
        self.place = Rendezvous(host="127.0.0.1", port=self._store.port, run=secret())
        self.supervisor = Supervisor(self.place)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.workers:
            if process.poll() is None:
                process.kill()
            process.wait()
        self.reports = self.supervisor.close()
        self._store = None

    def environment(self) -> dict[str, str]:
        """What a worker of this run finds in its environment."""
        extra = {"PACELINE_CHECKPOINT": str(self._checkpoint)} if self._checkpoint else {}
        return {
            **os.environ,
            **extra,
            VARIABLE: str(self.place),
            "PACELINE_WORKERS": str(self.count),
            "PACELINE_SERVERS": str(self.servers),
            "OMP_NUM_THREADS": "1",
        }

    def start(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        output: IO[bytes] | None = None,
    ) -> None:
        """Starts the workers."""
        for _ in range(self.count):
            self.add(command, environment=environment, output=output)

    def add(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        output: IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Starts one more worker; it joins as soon as it is ready."""
        variables = {
            **self.environment(),
            "PACELINE_WORKER": str(len(self.workers)),
            "RANK": str(len(self.workers)),
            "WORLD_SIZE": str(self.count),
            **(environment or {}),
        }
        process = subprocess.Popen(
            list(command), env=variables, stdout=output, stderr=subprocess.STDOUT if output else None
        )
        self.workers.append(process)
        return process

    def wait(self, timeout_s: float = 600.0, *, lost: int = 0) -> None:
        """Until all workers have ended; at most `lost` of them may fail."""
        deadline = time.monotonic() + timeout_s
        for process in self.workers:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise RunError(f"workers did not end within {timeout_s:g} s") from None
        failed = [process.returncode for process in self.workers if process.returncode]
        if len(failed) > lost:
            raise RunError(f"{len(failed)} of {len(self.workers)} workers failed, the first with {failed[0]}")
