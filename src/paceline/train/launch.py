"""Runs a function as the ranks of one group: processes of this machine, or of the hosts of an emulated cluster.

    results = run("paceline.train.tasks.worker:train", world=2, arguments={"task": "digits-cnn"})

For tasks, benchmarks and tests. A training script of one's own is launched by torchrun, Slurm or Ray.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from paceline.errors import RunError

#: where a rank leaves what its function returned
RESULTS = "PACELINE_RESULTS"


class Hosts(Protocol):
    """Somewhere to run ranks: `paceline.bench.emulate.EmulatedCluster` is one."""

    def launch(
        self, command: Sequence[str], *, ranks_per_host: int = 1, environment: Mapping[str, str] | None = None, timeout_s: float = 600.0,
    ) -> list[str]:
        """Runs one process per rank to its end; what each printed."""


def run(
    target: str, *, world: int, arguments: Mapping[str, Any] | None = None, on: Hosts | None = None, ranks_per_host: int = 1,
    environment: Mapping[str, str] | None = None, timeout_s: float = 600.0,
) -> list[Any]:
    """What `module:function` returns on each of `world` ranks, with `arguments` (JSON); they have joined a gloo group when it is called."""
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        command = [sys.executable, "-m", "paceline.train.worker", target, json.dumps(dict(arguments or {}))]
        variables = {**(environment or {}), RESULTS: folder}
        if on is not None:
            on.launch(command, ranks_per_host=ranks_per_host, environment=variables, timeout_s=timeout_s)
        else:
            _here(command, world, variables, timeout_s)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]


def _here(command: Sequence[str], world: int, environment: Mapping[str, str], timeout_s: float) -> None:
    port = str(free_port())

    def start(rank: int, output: IO[bytes]) -> subprocess.Popen[bytes]:
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        return subprocess.Popen(command, env={**os.environ, **own, **environment}, stdout=output, stderr=subprocess.STDOUT)

    supervise(start, world, timeout_s)


def elastic(module: str, arguments: Sequence[str], *, world: int, restarts: int = 3, output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """Starts a module under torchrun, which starts all ranks again, up to `restarts` times, when one of them dies.

    Each start gets a store of its own: ranks that meet in the old one may find addresses of the dead (pytorch issues 135712, 167288).
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), "--rdzv-backend", "c10d",
               "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--max-restarts", str(restarts), "--monitor-interval", "0.1", "-m", module, *arguments]
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(command, env={**os.environ, **variables}, stdout=output, stderr=subprocess.STDOUT if output is not None else None)


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def supervise(start: Callable[[int, IO[bytes]], subprocess.Popen[bytes]], world: int, timeout_s: float) -> list[str]:
    """Starts `world` ranks and waits for them; what each printed. A rank that fails or is late ends the others and is named."""
    with contextlib.ExitStack() as files:
        outputs = [files.enter_context(tempfile.TemporaryFile()) for _ in range(world)]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            ranks += [start(rank, output) for rank, output in enumerate(outputs)]
            failed = _first_failure(ranks, time.monotonic() + timeout_s)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        texts = []
        for output in outputs:
            output.seek(0)
            texts.append(output.read().decode(errors="replace"))
    if failed is not None:
        number, code = failed
        why = f"ended with {code}" if code else f"did not end within {timeout_s:g} s"
        raise RunError(f"rank {number} {why}; its last line: {_last_line(texts[number])}")
    return texts


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
