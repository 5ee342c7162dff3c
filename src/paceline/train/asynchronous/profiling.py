"""A quick profile of a training script: one worker, then two, for a few tens of steps each."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import RunError, SpecError
from paceline.queueing.profile import UNEVEN, WARM_UP, WIRE, HostLink, JobProfile, ProfiledRun, from_rows
from paceline.spec.vocabulary import ServerMode
from paceline.train.asynchronous.launch import Local
from paceline.train.asynchronous.record import VARIABLE
from paceline.train.asynchronous.remote import SLOW


def profile(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    workers: int = 2,
    servers: int = 1,
    steps: int = 30,
    batch: int = 1,
    link_Bps: float | None = None,
    slow: float = 1.0,
    timeout_s: float = 300.0,
) -> JobProfile:
    """Runs a script that uses a parameter-server strategy with 1..`workers` workers on this machine, and
    stops it after `steps` steps each.

    `batch` is samples per worker and step; `link_Bps` the rate of the links between worker and server, by
    default what transfers showed. `slow` is how many times as long the last of several workers is to compute:
    the profile of a job in which one worker is slow.
    """
    if not script.is_file():
        raise SpecError(f"no training script {str(script)!r}")
    if not 1 <= workers <= 64 or steps < 5:
        raise SpecError(f"a profile takes 1 to 64 workers and at least 5 steps, got {workers} and {steps}")
    if slow != 1 and (slow < UNEVEN or workers < 2):
        raise SpecError(
            f"a slow worker takes at least {UNEVEN:g} times as long and is one of at least two; got {slow:g}"
            f" times, {workers} workers"
        )
    runs: list[ProfiledRun] = []
    facts: dict[str, Any] = {}
    rows: list[list[dict[str, Any]]] = []
    for count in range(1, workers + 1):
        rows, facts = _run(
            script, arguments, count, servers, steps + WARM_UP, slow if count > 1 else 1.0, timeout_s
        )
        runs.append(from_rows(rows))
    first = rows[0][-1]
    if facts["mode"] == ServerMode.BACKUP and workers <= facts["backups"]:
        raise SpecError("backup workers need more workers than backups in the profile")
    rate = link_Bps if link_Bps is not None else _rate(runs[0], first["up_bytes"])
    return JobProfile(
        name=script.stem,
        batch=batch,
        up_bytes=first["up_bytes"],
        down_bytes=first["down_bytes"],
        mode=facts["mode"],
        servers=facts["servers"],
        staleness=facts["staleness"],
        backups=facts["backups"],
        link=HostLink(rate_Bps=rate),
        runs=tuple(runs),
        slow_workers=int(slow > 1),
    )


def _rate(run: ProfiledRun, size: float) -> float:
    """Bytes per second of a lone upload."""
    return WIRE * size / max(statistics.median(step.up_s for step in run.warm()), 1e-6)


def _run(
    script: Path,
    arguments: Sequence[str],
    workers: int,
    servers: int,
    steps: int,
    slow: float,
    timeout_s: float,
) -> tuple[list[list[dict[str, Any]]], dict[str, Any]]:
    """Steps of each worker and what the run said it is."""
    with tempfile.TemporaryDirectory(prefix="paceline-profile-") as folder:
        log = Path(folder, "log")
        with (
            log.open("wb") as output,
            Local(workers=workers, servers=servers, checkpoint=Path(folder)) as local,
        ):
            for number in range(workers):
                variables = {
                    VARIABLE: str(Path(folder, "{worker}.jsonl")),
                    SLOW: str(slow if number == workers - 1 else 1.0),
                }
                local.add([sys.executable, str(script), *arguments], environment=variables, output=output)
            deadline = time.monotonic() + timeout_s
            while not _enough(folder, workers, steps):
                ended = all(process.poll() is not None for process in local.workers)
                if ended or time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        if not _enough(folder, workers, 3):
            last = (log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
            raise RunError(
                f"{script} with {workers} workers recorded too few steps; does it use a parameter-server"
                f" strategy? Its last line: {last}"
            )
        files = [
            [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
            for path in _files(folder)
        ]
    exchanged = [[row for row in rows if "round_s" in row] for rows in files]
    return [rows[:steps] for rows in exchanged], files[0][0]


def _files(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("*.jsonl"))


def _enough(folder: str, workers: int, steps: int) -> bool:
    counts = [sum('"round_s"' in line for line in path.read_text().splitlines()) for path in _files(folder)]
    return len(counts) >= workers and min(counts) >= steps
