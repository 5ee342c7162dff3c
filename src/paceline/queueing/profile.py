"""What a job does, step by step, on one or two workers: enough to say what it does on many.

Distributions are kept, not means: barriers wait for the slowest, and queues form because steps differ. Times
in seconds, sizes in bytes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError, SpecError
from paceline.spec.vocabulary import ServerMode, member

Vector = NDArray[np.float64]
#: the share of a full Ethernet frame that TCP payload fills: 1448 bytes of 1514
WIRE = 1514 / 1448
#: the first steps of a run warm caches, connections and congestion windows
WARM_UP = 2
#: a worker that computes this many times as long as the fastest of the profile is a slow one, and not only
#: unlucky
UNEVEN = 1.5
#: what a file holds of a step; the last two came later
FIELDS = (
    "at_s",
    "compute_s",
    "round_s",
    "up_s",
    "update_s",
    "down_s",
    "waited_s",
    "staleness",
    "leads",
    "lead_s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledStep:
    """One step of one worker: its own compute, then the round trip to the servers and what that was
    made of.
    """

    at_s: float
    compute_s: float
    round_s: float
    up_s: float
    update_s: float
    down_s: float
    waited_s: float
    staleness: int = 0
    #: by server, how long before the end of the compute its part was sent off; and of the slowest. None where
    #: sending starts after the compute
    leads: tuple[float, ...] = ()
    lead_s: float = 0.0

    @property
    def other_s(self) -> float:
        """Of the round trip: packing, messages, threads."""
        return max(0.0, self.lead_s + self.round_s - self.up_s - self.update_s - self.down_s - self.waited_s)

    def lead(self, server: int, servers: int) -> float:
        """How long before the end of the compute the part of a server is sent off; between parts that were
        profiled on a line.
        """
        if not self.leads:
            return 0.0
        if servers == len(self.leads):
            return self.leads[server]
        places = (np.arange(len(self.leads)) + 0.5) / len(self.leads)
        return float(np.interp((server + 0.5) / servers, places, self.leads))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledRun:
    """Steps of each worker of one run."""

    steps: tuple[tuple[ProfiledStep, ...], ...]

    @property
    def workers(self) -> int:
        return len(self.steps)

    @property
    def throughput(self) -> float:
        """Steps per second of all workers, while all of them were warm and running."""
        start = max(steps[min(WARM_UP, len(steps) - 2)].at_s for steps in self.steps)
        end = min(steps[-1].at_s for steps in self.steps)
        rate = 0.0
        for steps in self.steps:
            inside = [step.at_s for step in steps if start <= step.at_s <= end]
            rate += (len(inside) - 1) / (inside[-1] - inside[0]) if len(inside) > 1 else 0.0
        return rate

    def warm_by_worker(self) -> list[tuple[ProfiledStep, ...]]:
        """Steps after the warm-up, of each worker."""
        return [steps[min(WARM_UP, len(steps) - 1) :] for steps in self.steps]

    def warm(self) -> Iterable[ProfiledStep]:
        """Steps after the warm-up, of all workers."""
        return itertools.chain.from_iterable(self.warm_by_worker())


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """A host's link, each way. `burst_bytes` pass at once after a pause, where a token bucket shapes it."""

    rate_Bps: float
    burst_bytes: float = 0.0

    def __post_init__(self) -> None:
        if not self.rate_Bps > 0 or self.burst_bytes < 0:
            raise SpecError(
                f"a link needs a rate above zero, got {self.rate_Bps} B/s with a burst of {self.burst_bytes}"
                " bytes"
            )

    def seconds(self, size: float) -> float:
        """Seconds that `size` bytes of payload keep the link busy, headers included."""
        return WIRE * size / self.rate_Bps


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProfile:
    """A job as profiled: how it was set up, and one or more short runs of few workers."""

    name: str
    batch: int
    up_bytes: float
    down_bytes: float
    mode: ServerMode
    servers: int
    link: HostLink
    runs: tuple[ProfiledRun, ...]
    #: of modes that have them
    staleness: int = 8
    backups: int = 1
    #: how many of the workers, whatever their number, are like the slow ones of the profile
    slow_workers: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", member(ServerMode, "job: mode", self.mode, SpecError))
        if not self.runs or any(len(steps) < 3 for run in self.runs for steps in run.steps):
            raise DataError(
                f"profile {self.name!r} needs a run with at least 3 steps per worker; profile for longer"
            )
        if self.servers < 1 or min(self.up_bytes, self.down_bytes) < 0:
            raise SpecError(
                f"profile {self.name!r} needs at least one server and sizes of zero or more bytes"
            )
        if self.slow_workers < 0 or (self.slow_workers and not self.kinds()[1].size):
            raise DataError(
                f"profile {self.name!r} has no slow workers; profile two workers of which one is slow"
                " (paceline profile --slow)"
            )

    def samples(self, field: str) -> Vector:
        """All warm values of a field of `Step`; of the smallest run where others would distort them, of
        workers that are not slow.
        """
        if field == "compute_s":
            return self.kinds()[0]
        return np.array([getattr(step, field) for step in min(self.runs, key=lambda run: run.workers).warm()])

    def kinds(self) -> tuple[Vector, Vector]:
        """Seconds of compute of the usual workers, and of the slow ones of a job that has some: those of the
        profile that take `UNEVEN` times as long as its fastest."""
        usual, slow = (np.array([step.compute_s for step in steps]) for steps in self.steps_by_kind())
        return usual, slow

    def steps_by_kind(self) -> tuple[list[ProfiledStep], list[ProfiledStep]]:
        """Warm steps of the usual workers and of the slow ones."""
        workers = [steps for run in self.runs for steps in run.warm_by_worker()]
        middle = [float(np.median([step.compute_s for step in steps])) for steps in workers]
        kinds: tuple[list[ProfiledStep], list[ProfiledStep]] = [], []
        for steps, took in zip(workers, middle, strict=True):
            kinds[self.slow_workers > 0 and took > UNEVEN * min(middle)].extend(steps)
        return kinds

    def steps(self, workers: int) -> list[list[ProfiledStep]]:
        """Profiled steps that each of `workers` replays, the slow ones last."""
        usual, slow = self.steps_by_kind()
        last = min(self.slow_workers, workers - 1)
        return [usual] * (workers - last) + [slow] * last

    def computes(self, workers: int) -> list[Vector]:
        """Seconds of compute of each of `workers`, the slow ones last."""
        usual, slow = self.kinds()
        last = min(self.slow_workers, workers - 1)
        return [usual] * (workers - last) + [slow] * last

    def measured(self, workers: int) -> float | None:
        """Steps per second of a profiled run of that many workers."""
        return next((run.throughput for run in self.runs if run.workers == workers), None)

    def few(self) -> tuple[ProfiledRun, ...]:
        """Runs that still say something about the job on other links or servers: the smallest, and those that
        show what slow workers compute. How several workers shared the old links says little about the new
        ones."""
        return self.runs if self.slow_workers else (min(self.runs, key=lambda run: run.workers),)

    def with_link(self, link: HostLink) -> JobProfile:
        """The same job on other links: transfers take as long as their bytes, everything else as it did."""
        return replace(self, link=link, runs=tuple(_relinked(run, self, link) for run in self.few()))

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "paceline job profile",
            "version": 1,
            "name": self.name,
            "batch": self.batch,
            "up_bytes": self.up_bytes,
            "down_bytes": self.down_bytes,
            "mode": self.mode,
            "servers": self.servers,
            "staleness": self.staleness,
            "backups": self.backups,
            "slow_workers": self.slow_workers,
            "link": {"rate_Bps": self.link.rate_Bps, "burst_bytes": self.link.burst_bytes},
            "fields": list(FIELDS),
            "runs": [
                [
                    [[_rounded(getattr(step, name)) for name in FIELDS] for step in steps]
                    for steps in run.steps
                ]
                for run in self.runs
            ],
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> JobProfile:
        try:
            runs = tuple(
                from_rows([[dict(zip(raw["fields"], row, strict=True)) for row in steps] for steps in run])
                for run in raw["runs"]
            )
            rest = {
                key: raw[key]
                for key in (
                    "name",
                    "batch",
                    "up_bytes",
                    "down_bytes",
                    "mode",
                    "servers",
                    "staleness",
                    "backups",
                )
            }
            return cls(
                link=HostLink(**raw["link"]), runs=runs, slow_workers=raw.get("slow_workers", 0), **rest
            )
        except (KeyError, TypeError, ValueError) as error:
            raise SpecError(f"not a job profile: {error!r}; take one with `paceline profile`") from None

    def save(self, path: Path | str) -> None:
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(self.to_dict()))
        partial.replace(path)

    @classmethod
    def load(cls, path: Path | str) -> JobProfile:
        path = Path(path)
        try:
            raw = json.loads(path.read_text())
        except OSError as error:
            raise SpecError(f"cannot read profile {str(path)!r}: {error.strerror}") from None
        except json.JSONDecodeError as error:
            raise SpecError(f"{path} is not a job profile: line {error.lineno}: {error.msg}") from None
        return cls.from_dict(raw if isinstance(raw, dict) else {})


def _relinked(run: ProfiledRun, job: JobProfile, link: HostLink) -> ProfiledRun:
    """Steps with transfers of another link; the times at which they ended move along."""
    up = link.seconds(job.up_bytes) - job.link.seconds(job.up_bytes)
    down = link.seconds(job.down_bytes) - job.link.seconds(job.down_bytes)
    out = []
    for steps in run.steps:
        shift, moved = 0.0, []
        for step in steps:
            longer = max(up, -step.up_s) + max(down, -step.down_s)
            shift += longer
            moved.append(
                replace(
                    step,
                    at_s=step.at_s + shift,
                    round_s=step.round_s + longer,
                    up_s=max(0.0, step.up_s + up),
                    down_s=max(0.0, step.down_s + down),
                )
            )
        out.append(tuple(moved))
    return ProfiledRun(steps=tuple(out))


def _rounded(value: float | tuple[float, ...]) -> Any:
    return [round(part, 7) for part in value] if isinstance(value, tuple) else round(value, 7)


def from_rows(workers: Sequence[Sequence[Mapping[str, Any]]]) -> ProfiledRun:
    """Steps of each worker from records of a run, ordered in time; records may hold more, and those without
    overlap hold no leads.
    """
    return ProfiledRun(steps=tuple(tuple(_step(row) for row in rows) for rows in workers))


def _step(row: Mapping[str, Any]) -> ProfiledStep:
    needed = {name: row[name] for name in FIELDS[:8]}
    return ProfiledStep(**needed, leads=tuple(row.get("leads", ())), lead_s=row.get("lead_s", 0.0))
