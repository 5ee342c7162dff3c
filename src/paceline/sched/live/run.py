"""One attempt at a job on given devices, and the folder in which it and the daemon meet.

    jobs/NAME/progress          lines `DONE` or `DONE CHECKPOINTED`, written by the job
    jobs/NAME/limit             on the model's clock: work beyond which it should wait, see `daemon`
    jobs/NAME/checkpoint/       the job's own
    jobs/NAME/ATTEMPT/run.json  what to run
    jobs/NAME/ATTEMPT/stop      asks it to checkpoint and end; `kill` to end at once
    jobs/NAME/ATTEMPT/RANK/     made by whoever runs that rank first: nobody else will; holds pid, then
                                exit.json
    jobs/NAME/ATTEMPT/RANK.log  what it printed

ATTEMPT is a number and a random nonce, such as 1-9f3a2b1c: what is left of an attempt that the scheduler has
no record of (its database was lost, or restored from a backup) is never taken for one that it decides now.
For the same reason NAME becomes NAME.2 where jobs/NAME holds an earlier job of which no record is left.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.sched.decision import Allocation, devices
from paceline.sched.live.job_spec import JobSpec
from paceline.sched.live.permissions import opener
from paceline.spec.names import file_name

#: states of a run: decided, handed to the engine, asked to stop, over
WANTED, LIVE, STOPPING, OVER = "wanted", "live", "stopping", "over"
#: exit code that stands for a rank that was never begun, because its run was called off
VOID = -1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Attempt number `attempt` (from 1) at a job; together they are its token: an engine begins it once,
    however often it is told.
    """

    job: str
    attempt: int
    allocation: Allocation
    state: str = WANTED
    #: device numbers on each node of the allocation, once it is live
    slots: tuple[tuple[int, ...], ...] = ()
    #: how it was over: completed, checkpointed, preempted, failed, void
    outcome: str = ""
    #: tells it from attempts of that number whose records are lost; empty in records of earlier versions
    nonce: str = ""
    #: the job's folder in `jobs`; empty: its name
    place: str = ""

    @property
    def token(self) -> str:
        """Names the attempt."""
        return f"{self.job}.{self.attempt}"

    @property
    def ranks(self) -> int:
        """Processes: one on each node."""
        return len(self.allocation)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "job": self.job,
            "attempt": self.attempt,
            "allocation": [list(pair) for pair in self.allocation],
            "state": self.state,
            "slots": [list(ids) for ids in self.slots],
            "outcome": self.outcome,
            "nonce": self.nonce,
            "place": self.place,
        }

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> Attempt:
        """From plain values; those that only earlier versions knew are left."""
        known = {key: found for key, found in value.items() if key in Attempt.__dataclass_fields__}
        allocation = tuple((node, count) for node, count in value["allocation"])
        return Attempt(**{**known, "allocation": allocation, "slots": tuple(map(tuple, value["slots"]))})

    def folder(self, state: Path) -> Path:
        """Where its files are."""
        attempt = f"{self.attempt}-{self.nonce}" if self.nonce else str(self.attempt)
        return state / "jobs" / file_name(self.place or self.job) / attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """How a rank ended: its code (minus the signal that killed it), and whether it had been asked to stop."""

    code: int
    asked_to_stop: bool = False

    @property
    def killed(self) -> bool:
        """Whether a signal ended it, as Python or a shell tells."""
        return self.code < 0 or self.code > 128


class AttemptFolder:
    """The files of one run."""

    __slots__ = ("path", "ranks")

    def __init__(self, state: Path, run: Attempt) -> None:
        self.path = run.folder(state)
        self.ranks = run.ranks

    @property
    def name(self) -> str:
        """Unique on the engine, whoever else uses it."""
        checksum = zlib.crc32(str(self.path).encode())
        return file_name(f"{self.path.parent.name}-{self.path.name}-{checksum:08x}")

    def write(self, spec: JobSpec, run: Attempt, node_names: Sequence[str]) -> None:
        """Says what to run; the same at each call."""
        job = self.path.parent
        (job / "checkpoint").mkdir(parents=True, exist_ok=True)
        self.path.mkdir(exist_ok=True)
        port = 20000 + zlib.crc32(str(self.path).encode()) % 10000
        common = {
            **spec.environment,
            "PACELINE_JOB": run.job,
            "PACELINE_RUN": str(self.path),
            "PACELINE_DEVICES": str(devices(run.allocation)),
            "PACELINE_NODES": str(run.ranks),
            "PACELINE_PROGRESS": str(job / "progress"),
            "PACELINE_CHECKPOINT": str(job / "checkpoint"),
            "PACELINE_LIMIT": str(job / "limit"),
            "PACELINE_RENDEZVOUS": f"file://{self.path}/rendezvous",
            "MASTER_ADDR": node_names[0],
            "MASTER_PORT": str(port),
        }
        each = [
            {
                "PACELINE_NODE_RANK": str(rank),
                "PACELINE_NODE": name,
                "PACELINE_NODE_DEVICES": str(count),
                "PACELINE_FIRST_DEVICE": str(sum(before for _, before in run.allocation[:rank])),
                "PACELINE_DEVICE_IDS": ",".join(map(str, ids)),
            }
            for rank, ((_, count), ids, name) in enumerate(
                zip(run.allocation, run.slots, node_names, strict=True)
            )
        ]
        replace_text(
            self.path / "run.json",
            json.dumps({"command": spec.command, "folder": spec.folder, "common": common, "ranks": each}),
        )

    def ask(self, what: str) -> None:
        """Leaves a `stop` or a `kill` for the processes."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / what).touch()

    def claimed(self, rank: int) -> bool:
        """Whether somebody runs, or ran, that rank."""
        return (self.path / str(rank)).is_dir()

    def pid(self, rank: int) -> int:
        """The process that watches a rank; 0 where it is not known."""
        try:
            return int((self.path / str(rank) / "pid").read_text())
        except (OSError, ValueError):
            return 0

    def exit(self, rank: int) -> RankExit | None:
        """How a rank ended, None while it has not."""
        try:
            found = json.loads((self.path / str(rank) / "exit.json").read_text())
        except (OSError, ValueError):
            return None
        return RankExit(code=found["code"], asked_to_stop=found["told"])

    def exits(self) -> list[RankExit | None]:
        """Of each rank."""
        return [self.exit(rank) for rank in range(self.ranks)]

    def void(self, rank: int) -> bool:
        """Takes a rank that nobody has begun, so that nobody will; False where somebody has it."""
        self.path.mkdir(parents=True, exist_ok=True)
        place = self.path / str(rank)
        try:
            place.mkdir()
        except FileExistsError:
            return False
        replace_text(place / "exit.json", json.dumps({"code": VOID, "told": True}))
        return True


def progress(state: Path, place: str) -> tuple[float, float] | None:
    """(work done, work that the last checkpoint holds) as the job in that folder last wrote it, if it did."""
    try:
        with (state / "jobs" / place / "progress").open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 256))
            lines = file.read().split(b"\n")[:-1]  # the last one may be half written
    except OSError:
        return None
    for line in reversed(lines):
        try:
            numbers = [float(word) for word in line.split()]
        except ValueError:
            continue
        if numbers and all(0 <= number < float("inf") for number in numbers):
            return numbers[0], numbers[1] if len(numbers) > 1 else numbers[0]
    return None


def replace_text(path: Path, text: str) -> None:
    """Writes a file that is whole or not there, and on the disk when this returns."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(beside, "w", encoding="utf-8", opener=opener) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
