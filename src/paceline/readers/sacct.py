"""Dumps of Slurm's accounting: jobs with their devices, times and ends.

Format: `sacct --parsable2` (or `--parsable`), https://slurm.schedmd.com/sacct.html: a line of column names,
values
between bars. A line per job and one per step; steps (`123.batch`) are left out. For example:

    sacct --allusers --parsable2 --starttime 2025-01-01 \\
        --format JobID,JobName,User,Submit,Start,End,ElapsedRaw,State,AllocTRES,NNodes,Priority
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from paceline.errors import DataError
from paceline.readers.stream import opened, printable

NEEDED = ("JobID", "Submit", "Start", "State")
#: first word of a state -> how a job was over
_ENDS = {
    "COMPLETED": "completed",
    "TIMEOUT": "killed",
    "DEADLINE": "killed",
    "PREEMPTED": "killed",
    "CANCELLED": "cancelled",
    "FAILED": "failed",
    "OUT_OF_MEMORY": "failed",
    "NODE_FAIL": "failed",
    "BOOT_FAIL": "failed",
}
_GPUS = re.compile(r"(?:^|,)gres/gpu(?::(?P<kind>[^=,]+))?=(?P<count>\d+)")
_ELAPSED = re.compile(r"(?:(?P<d>\d+)-)?(?:(?P<h>\d+):)?(?P<m>\d+):(?P<s>\d+)(?:\.\d+)?")
_LONGEST = 10_000
#: devices of a job at the most
_MOST_DEVICES = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """A job that ran: seconds since the first submission, devices."""

    name: str
    submit_s: float
    start_s: float
    seconds: float
    devices: int
    nodes: int
    #: as Slurm calls the devices; empty: not said
    kind: str
    user: str
    #: completed, killed, cancelled, failed
    outcome: str
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJobs:
    """The jobs of a dump by submission, and how many lines were left out, by the reason."""

    path: str
    jobs: tuple[SlurmJob, ...]
    left_out: Mapping[str, int] = field(default_factory=dict)


def read(path: Path | str) -> SlurmJobs:
    """The jobs with devices in a dump; DataError where it is none."""
    left_out: Counter[str] = Counter()
    found: list[tuple[datetime, dict[str, str]]] = []
    with opened(path) as file:
        columns = _columns(file.readline(_LONGEST), str(path))
        for number, line in enumerate(file, 2):
            row = _row(line, columns)
            if row is None:
                raise DataError(f"{path}: line {number}: {len(columns)} columns wanted: was it cut off?")
            reason = _unfit(row)
            submit = None if reason else _time(row["Submit"])
            if reason or submit is None:
                left_out[reason or "submission time is not known"] += 1
            else:
                found.append((submit, row))
    if not found:
        why = ", ".join(f"{count} {reason}" for reason, count in left_out.items()) or "it is empty"
        raise DataError(f"{path}: no job with devices that ran ({why})")
    first = min(submit for submit, _ in found)
    jobs = [_job(row, (submit - first).total_seconds(), first, str(path)) for submit, row in found]
    return SlurmJobs(
        path=str(path), jobs=tuple(sorted(jobs, key=lambda job: job.submit_s)), left_out=dict(left_out)
    )


def _columns(line: str, path: str) -> list[str]:
    columns = printable(line.rstrip("\r\n")).rstrip("|").split("|")
    missing = [name for name in NEEDED if name not in columns]
    if missing:
        raise DataError(
            f"{path}: no column {missing[0]!r} in its first line; write it with sacct --parsable2"
        )
    if not {"AllocTRES", "ReqTRES", "AllocGRES", "ReqGRES"} & set(columns):
        raise DataError(f"{path}: no column 'AllocTRES', which says how many devices a job had")
    if not {"ElapsedRaw", "Elapsed", "End"} & set(columns):
        raise DataError(f"{path}: no column 'ElapsedRaw', 'Elapsed' or 'End', which says how long a job ran")
    return columns


def _row(line: str, columns: list[str]) -> dict[str, str] | None:
    """A line by column; job names may hold bars, and take what is too much."""
    values = line.rstrip("\r\n").split("|")
    if len(values) == len(columns) + 1 and not values[-1]:
        values.pop()
    extra = len(values) - len(columns)
    if extra > 0 and "JobName" in columns:
        at = columns.index("JobName")
        values[at : at + extra + 1] = ["|".join(values[at : at + extra + 1])]
    return dict(zip(columns, values, strict=True)) if len(values) == len(columns) else None


def _unfit(row: Mapping[str, str]) -> str:
    """Why a line is no job to simulate; empty where it is."""
    if "." in row["JobID"]:
        return "steps of jobs"
    state = row["State"].split(" ")[0]
    if state not in _ENDS:
        return f"jobs that are {printable(state).lower() or 'without a state'}"
    if not _devices(row)[0]:
        return "jobs without devices"
    if _time(row["Start"]) is None or not _seconds(row):
        return "jobs that never ran"
    return ""


def _devices(row: Mapping[str, str]) -> tuple[int, str]:
    """How many, and what kind; the total comes with one entry per kind."""
    for column in ("AllocTRES", "ReqTRES", "AllocGRES", "ReqGRES"):
        text = row.get(column, "")
        if column.endswith("GRES") and text.startswith("gpu"):
            text = f"gres/{text}" if "=" in text else "gres/" + "=".join(text.rsplit(":", 1))
        found = list(_GPUS.finditer(text))
        if found:
            kinds = [match["kind"] for match in found if match["kind"]]
            whole = [int(match["count"]) for match in found if not match["kind"]]
            count = whole[0] if whole else sum(int(match["count"]) for match in found)
            return min(count, _MOST_DEVICES), printable(kinds[0]) if kinds else ""
    return 0, ""


def _seconds(row: Mapping[str, str]) -> float:
    """How long a job ran; 0 where it did not, or that is not known."""
    raw = row.get("ElapsedRaw", "")
    if raw.isdigit():
        return float(raw)
    match = _ELAPSED.fullmatch(row.get("Elapsed", ""))
    if match:
        days, hours, minutes, seconds = (int(match[part] or 0) for part in "dhms")
        return 86400.0 * days + 3600.0 * hours + 60.0 * minutes + seconds
    start, end = _time(row["Start"]), _time(row.get("End", ""))
    return max(0.0, (end - start).total_seconds()) if start and end else 0.0


def _time(text: str) -> datetime | None:
    """A time of Slurm; None for Unknown and None. Times without a zone are compared with one another only."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _job(row: Mapping[str, str], submit_s: float, first: datetime, path: str) -> SlurmJob:
    devices, kind = _devices(row)
    start = _time(row["Start"])
    number, nodes = row.get("Priority", ""), row.get("NNodes", "")
    name = printable(row["JobID"])
    title = printable(row.get("JobName", "")).strip()
    return SlurmJob(
        name=f"{name} {title}".strip()[:200],
        submit_s=submit_s,
        start_s=(start - first).total_seconds() if start is not None else submit_s,
        seconds=_seconds(row),
        devices=devices,
        nodes=int(nodes) if nodes.isdigit() else 0,
        kind=kind,
        user=printable(row.get("User", "")).strip(),
        outcome=_ENDS[row["State"].split(" ")[0]],
        priority=int(number) if number.isdigit() else 0,
    )
