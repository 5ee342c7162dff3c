"""Runs a function as the ranks of one group: processes of this machine, or of the hosts of an emulated
cluster.

    results = run("paceline.train.tasks.worker:train", world=2, arguments={"task": "digits-cnn"})

For tasks, benchmarks and tests. A training script of one's own is launched by torchrun, Slurm or Ray.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, Protocol

from paceline import extend
from paceline.errors import RunError
from paceline.train.asynchronous.shared_file import sweep

#: where a rank leaves what its function returned
RESULTS = "PACELINE_RESULTS"
#: the socket that rank 0 was given for the store, listening on MASTER_PORT: a port that is only named may be
#: another's before rank 0 has imported torch
LISTENER = "PACELINE_LISTENER"
#: lines of a rank that are for the user also where all went well
NOTE = "paceline: "


def local_ranks(world: int) -> int:
    """Ranks on this node, as the launcher says; all `world` of them where nobody does."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this process stands in a job of `paceline schedule`, which starts it once on each node."""

    nodes: int
    node_rank: int
    #: devices of all nodes, of this one, and of those before it: one rank each
    world: int
    here: int
    first: int
    #: `init_method` of torch.distributed
    rendezvous: str

    @staticmethod
    def given() -> Place | None:
        """As the environment says; None where no scheduler started this process."""
        told = os.environ
        if not told.get("PACELINE_RENDEZVOUS") or "PACELINE_NODES" not in told:
            return None
        nodes, node_rank = int(told["PACELINE_NODES"]), int(told.get("PACELINE_NODE_RANK", "0"))
        world = int(told.get("PACELINE_DEVICES", str(nodes)))
        here = int(told.get("PACELINE_NODE_DEVICES", str(world // nodes)))
        first = int(told.get("PACELINE_FIRST_DEVICE", str(node_rank * here)))
        return Place(
            nodes=nodes,
            node_rank=node_rank,
            world=world,
            here=here,
            first=first,
            rendezvous=told["PACELINE_RENDEZVOUS"],
        )


class Hosts(Protocol):
    """Somewhere to run ranks: `paceline.bench.emulate.EmulatedCluster` is one."""

    def launch(
        self,
        command: Sequence[str],
        *,
        ranks_per_host: int = 1,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
    ) -> list[str]:
        """Runs one process per rank to its end; what each printed."""


def run(
    target: str,
    *,
    world: int,
    arguments: Mapping[str, Any] | None = None,
    on: Hosts | None = None,
    ranks_per_host: int = 1,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 600.0,
    place: Place | None = None,
) -> list[Any]:
    """What `module:function` returns on each of `world` ranks, with `arguments` (JSON); they have joined a
    gloo group when it is called.

    In the `place` of a scheduled job, its ranks on this node; those of other nodes are started there.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        worker = [sys.executable, "-m", "paceline.train.worker", *extend.words()]
        command = [*worker, target, json.dumps(dict(arguments or {}))]
        variables = {**(environment or {}), RESULTS: folder}
        try:
            if on is not None:
                on.launch(command, ranks_per_host=ranks_per_host, environment=variables, timeout_s=timeout_s)
            else:
                _here(command, world, variables, timeout_s, place)
        finally:
            sweep()  # what ranks that were killed shared
        ranks = range(place.first, place.first + place.here) if place is not None else range(world)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in ranks]


def _here(
    command: Sequence[str], world: int, environment: Mapping[str, str], timeout_s: float, place: Place | None
) -> None:
    first, here = (place.first, place.here) if place is not None else (0, world)
    # else they are no job's
    inherited = {
        name: value for name, value in os.environ.items() if place is not None or name != "PACELINE_NODES"
    }
    near = {"GLOO_SOCKET_IFNAME": "lo"} if place is None or place.nodes == 1 else {}

    def start(rank: int, output: IO[bytes]) -> subprocess.Popen[bytes]:
        keeps = rank == 0
        own = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(listener.getsockname()[1]),
            "RANK": str(first + rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(here),
            "OMP_NUM_THREADS": "1",
            **({LISTENER: str(listener.fileno())} if keeps else {}),
        }
        return subprocess.Popen(
            command,
            env={**inherited, **near, **own, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(listener.fileno(),) if keeps else (),
        )

    if place is not None and threading.current_thread() is threading.main_thread():
        # from when its ranks have ended, or a TERM that came late would fail a run that is over
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with socket.create_server(("127.0.0.1", 0), backlog=max(128, 2 * world)) as listener:
        texts = supervise(start, here, timeout_s)
    for line in dict.fromkeys(line for text in texts for line in text.splitlines() if line.startswith(NOTE)):
        print(line, file=sys.stderr)


def elastic(
    module: str, arguments: Sequence[str], *, world: int, restarts: int = 3, output: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Starts a module under torchrun, which starts all ranks again, up to `restarts` times, when one of them
    dies.

    Each start gets a store of its own: ranks that meet in the old one may find addresses of the dead (pytorch
    issues 135712, 167288).
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(world),
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
        "--max-restarts",
        str(restarts),
        "--monitor-interval",
        "0.1",
        "-m",
        module,
        *arguments,
    ]
    variables = {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return subprocess.Popen(
        command,
        env={**os.environ, **variables},
        stdout=output,
        stderr=subprocess.STDOUT if output is not None else None,
    )


def supervise(
    start: Callable[[int, IO[bytes]], subprocess.Popen[bytes]], world: int, timeout_s: float
) -> list[str]:
    """Starts `world` ranks and waits for them; what each printed. A rank that fails or is late ends the
    others and is named. TERM goes to all.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as files:
        outputs = [files.enter_context(tempfile.TemporaryFile()) for _ in range(world)]
        told = files.enter_context(_handing_on(ranks))
        try:
            for rank, output in enumerate(outputs):
                ranks.append(start(rank, output))
            if told:  # while they were being started
                _terminate(ranks)
            failed = _first_failure(ranks, time.monotonic() + timeout_s)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        texts = []
        for output in outputs:
            output.seek(0)
            texts.append(output.read().decode(errors="replace"))
    if failed is not None:
        number, code = failed
        why = f"ended with {code}" if code else f"did not end within {timeout_s:g} s"
        error = RunError(f"rank {number} {why}; its last line: {_last_line(texts[number])}")
        error.signal = max(0, -code)
        raise error
    return texts


def _terminate(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """TERM for all of them: they write a checkpoint and end, or just end."""
    for process in ranks:
        process.terminate()


@contextlib.contextmanager
def _handing_on(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """TERM to this process goes on to the ranks that there are, and is noted."""
    told: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield told
        return

    def note(number: int, frame: FrameType | None) -> None:
        told.append(number)
        _terminate(ranks)

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, before)


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")


def _first_failure(ranks: Sequence[subprocess.Popen[bytes]], deadline: float) -> tuple[int, int] | None:
    """Waits for all; the first rank that failed and its exit code, or one that is late and 0, or None."""
    waiting = dict(enumerate(ranks))
    while waiting:
        for number, process in list(waiting.items()):
            if (code := process.poll()) is not None:
                if code:
                    return number, code
                del waiting[number]
        if waiting and time.monotonic() > deadline:
            return min(waiting), 0
        time.sleep(0.01)
    return None
