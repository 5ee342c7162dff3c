"""Runs one rank of one attempt: `python -I attempt.py FOLDER RANK`. Stands alone, so that a node needs
nothing but Python.

It takes the rank by making its folder (whoever comes second leaves at once), runs the command, hands TERM and
the files `stop` and `kill` on to it, and writes how it ended. Where the disk is full it waits until that can
be written: an end is never lost.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

TAKEN, POLL_S = 75, 0.2


def main(folder: str, rank: str) -> int:
    """The command's life; `rank` is a number, or `slurm` for the one that Slurm gave."""
    rank = os.environ["SLURM_PROCID"] if rank == "slurm" else rank
    place = Path(folder) / rank
    told: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        told.append(number)

    waker, wake = os.pipe()
    for end in (waker, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, note if number != signal.SIGCHLD else lambda *_: None)
    run = json.loads(Path(folder, "run.json").read_text(encoding="utf-8"))
    try:
        place.mkdir()
    except FileExistsError:
        return TAKEN
    with contextlib.suppress(OSError):  # a full disk: it is then found by its environment
        _write(place / "pid", str(os.getpid()))
    code = _watch(Path(folder), int(rank), run, told, waker)
    while True:
        try:
            _write(place / "exit.json", json.dumps({"code": code, "told": bool(told)}))
            return 0
        except OSError:
            time.sleep(1.0)


def _watch(folder: Path, rank: int, run: dict, told: list[int], waker: int) -> int:  # type: ignore[type-arg]
    """Starts the command, hands on what it is told, returns its exit code."""
    environment = {**os.environ, **run["common"], **run["ranks"][rank]}
    # programs beside this Python (paceline, torchrun) are found though nobody activated its environment
    environment["PATH"] = os.pathsep.join(
        filter(None, (environment.get("PATH"), str(Path(sys.executable).parent)))
    )
    with (folder / f"{rank}.log").open("ab", buffering=0) as log:
        try:
            child = subprocess.Popen(
                run["command"],
                cwd=run["folder"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        except OSError as error:
            with contextlib.suppress(OSError):
                log.write(f"cannot run {run['command'][0]}: {error.strerror}\n".encode())
            return 127
    passed = False
    while child.poll() is None:
        if (folder / "kill").exists():
            told.append(signal.SIGKILL)
            _signal(child.pid, signal.SIGKILL)
        elif not passed and (told or (folder / "stop").exists()):
            told.append(signal.SIGTERM)
            child.terminate()
            passed = True
        select.select([waker], [], [], POLL_S)
        with contextlib.suppress(BlockingIOError):
            os.read(waker, 512)
    _signal(child.pid, signal.SIGKILL)  # what it left behind
    return child.returncode


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _write(path: Path, text: str) -> None:
    beside = path.with_name(f"{path.name}.tmp")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
