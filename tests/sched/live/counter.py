"""A job that counts: `counter.py STEPS SECONDS_PER_STEP [OVERHEAD]`, with an overhead faster on more devices.

Checkpoints every ten steps and on TERM; says when it finds itself run twice.

Where the disk is full it waits for room, as a job that is to survive that has to.
"""

import errno
import fcntl
import os
import signal
import sys
import time
from pathlib import Path

steps, each_s = int(sys.argv[1]), float(sys.argv[2])
if len(sys.argv) > 3:
    devices = int(os.environ["PACELINE_DEVICES"])
    each_s *= (1 + float(sys.argv[3]) * (devices - 1)) / devices
folder, rank = Path(os.environ["PACELINE_CHECKPOINT"]), os.environ["PACELINE_NODE_RANK"]
stop: list[int] = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))


def patiently(act):
    """What `act` returns once there is room on the disk."""
    while True:
        try:
            return act()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            time.sleep(0.02)


def append(file, text: str) -> None:
    """Writes to an unbuffered file, all of it."""
    left = text.encode()
    while left:
        left = left[patiently(lambda: file.write(left)) :]  # noqa: B023


lock = patiently(lambda: (folder / f"lock-{rank}").open("w"))
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    (folder / "twice").touch()
    sys.exit(9)
with patiently(lambda: (folder / "starts").open("ab", buffering=0)) as starts:
    append(starts, f"{os.environ['PACELINE_RUN'].rpartition('/')[2]}:{rank}\n")

limit = Path(os.environ["PACELINE_LIMIT"])
saved = folder / f"step-{rank}"
done = int(saved.read_text()) if saved.exists() else 0


def save() -> None:
    beside = folder / f"step-{rank}.tmp"
    patiently(lambda: beside.write_text(str(done)))
    beside.replace(saved)


with patiently(lambda: Path(os.environ["PACELINE_PROGRESS"]).open("ab", buffering=0)) as progress:
    while done < steps and not stop:
        time.sleep(each_s)
        if limit.exists() and done >= int(limit.read_text()):
            continue
        done += 1
        if done % 10 == 0:
            save()
        if rank == "0":
            append(progress, f"{done} {done - done % 10}\n")
    save()
    if rank == "0":
        append(progress, f"{done} {done}\n")
sys.exit(0)
