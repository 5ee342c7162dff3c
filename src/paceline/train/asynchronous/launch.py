"""Workers and servers of one run on this machine: started, watched, ended. On many machines, start workers with torchrun.

    with Local(workers=4, servers=2) as run:
        run.start([sys.executable, "train.py"])
        run.wait()
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from paceline.errors import RunError, SpecError
from paceline.train.asynchronous import server
from paceline.train.asynchronous.wire import Rendezvous, TCPStore, serve_store


class Supervisor:
    """Starts the servers of a run once a worker has said what they serve, and starts them again when they die."""

    def __init__(self, place: Rendezvous, *, most_lives: int = 10) -> None:
        self._place, self._most = place, most_lives
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        store, lives = self._place.store(), 0
        while not self._stop.is_set():
            if store.check(["servers"]):
                for number in range(int(store.get("servers"))):
                    known = self.processes.get(number)
                    if known is None or (known.poll() not in (None, 0) and lives < self._most):
                        lives += known is not None
                        self.processes[number] = self._start(number)
            time.sleep(0.02)

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        where = self._place
        command = [sys.executable, "-m", "paceline.train.asynchronous.server", where.host, str(where.port), where.run, str(number)]
        return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def close(self) -> list[dict[str, Any]]:
        """Tells servers to save and end; what each reports."""
        store = self._place.store()
        server.stop(store)
        self._stop.set()
        self._thread.join(timeout=5.0)
        reports = []
        for number, process in sorted(self.processes.items()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10.0)
            if process.poll() is None:
                process.kill()
                process.wait()
            if store.check([f"end/{number}"]):
                reports.append(json.loads(store.get(f"end/{number}")))
        self.processes.clear()
        return reports


_kept: list[Any] = []


def keep(place: Rendezvous) -> None:
    """Keeps the store and the servers of a run inside this process (rank 0 of torchrun) until all workers have left."""
    if _kept:
        return
    store = serve_store(place.host, place.port, place.timeout_s)
    supervisor = Supervisor(place)
    _kept.extend([store, supervisor])

    def end() -> None:
        client, deadline = place.store(), time.monotonic() + place.timeout_s
        while int(client.add("left", 0)) < int(client.add("workers", 0)) and time.monotonic() < deadline:
            time.sleep(0.02)
        supervisor.close()

    atexit.register(end)


class Local:
    """A run on this machine. Workers may be added, killed and waited for; servers that die are started again."""

    def __init__(self, *, workers: int, servers: int = 1, checkpoint: Path | None = None) -> None:
        if workers < 1 or servers < 1:
            raise SpecError(f"a run needs at least one worker and one server, got {workers} and {servers}")
        self.count, self.servers, self._checkpoint = workers, servers, checkpoint
        self._store: TCPStore | None = None
        self.workers: list[subprocess.Popen[bytes]] = []
        self.reports: list[dict[str, Any]] = []

    def __enter__(self) -> Local:
        self._store = serve_store()
        self.place = Rendezvous(host="127.0.0.1", port=self._store.port, run=f"run{os.getpid()}")
        self.supervisor = Supervisor(self.place)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
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
            **os.environ, **extra, "PACELINE_RENDEZVOUS": f"{self.place.host}:{self.place.port}:{self.place.run}",
            "PACELINE_WORKERS": str(self.count), "PACELINE_SERVERS": str(self.servers), "OMP_NUM_THREADS": "1",
        }

    def start(self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, output: IO[bytes] | None = None) -> None:
        """Starts the workers."""
        for _ in range(self.count):
            self.add(command, environment=environment, output=output)

    def add(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, output: IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Starts one more worker; it joins as soon as it is ready."""
        variables = {**self.environment(), "PACELINE_WORKER": str(len(self.workers)), "RANK": str(len(self.workers)),
                     "WORLD_SIZE": str(self.count), **(environment or {})}
        process = subprocess.Popen(list(command), env=variables, stdout=output, stderr=subprocess.STDOUT if output else None)
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
