"""The measured set: curves of throughput against workers, each with the profile of its one- and two-worker
runs on the same machine.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench.emulate.cluster import burst_bytes
from paceline.bench.validate.case import csv_rows
from paceline.errors import DataError
from paceline.queueing.profile import HostLink, JobProfile, from_rows
from paceline.spec.tables import Row
from paceline.spec.vocabulary import ServerMode

#: what a run is
KEY = ("model", "mode", "link_Mbps", "servers", "workers", "slow", "overlap")
SET = Path(__file__).parents[1] / "data" / "throughput" / "parameter_server.csv"

#: model, mode, Mbit/s, servers, machine, overlap; and how much slower the slow worker is (1: none is)
Key = tuple[str, str, float, int, str, bool, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCurve:
    """One job on one machine: its profile, and by number of workers steps per second, seconds of compute and
    how often an update was how stale.
    """

    model: str
    mode: str
    link_Mbps: float
    servers: int
    machine: str
    overlap: bool
    slow: float
    profile: JobProfile
    rates: dict[int, float]
    compute_s: dict[int, float]
    staleness: dict[int, dict[int, int]]

    @property
    def kind(self) -> str:
        """Which part of the set it belongs to: equal workers, one that is slow, sending that overlaps."""
        if self.slow > 1:
            return "uneven"
        return "overlap" if self.overlap else "even"

    @property
    def label(self) -> str:
        return f"{self.mode}, {self.servers} server{'s' if self.servers > 1 else ''}"


def curves(path: Path = SET) -> Iterator[MeasuredCurve]:
    """All curves of a measured set.

    Those with a slow worker are predicted from one usual worker and two of which one is slow.
    """
    rows = csv_rows(path, (*KEY, "steps_per_s", "compute_s", "batch", "machine", "stalenesses", "shaping"))
    measured: dict[Key, dict[int, Row]] = {}
    for row in rows:
        measured.setdefault(_key(row), {})[int(row["workers"])] = row
    runs: dict[Key, dict[int, Mapping[str, Any]]] = {}
    for raw in _profiles(path):
        runs.setdefault(_key(raw), {})[raw["workers"]] = raw
    for key, found in sorted(measured.items()):
        model, mode, link, servers, machine, overlap, slow = key
        own = {
            **{n: run for n, run in runs.get((*key[:6], 1.0), {}).items() if slow == 1 or n == 1},
            **runs.get(key, {}),
        }
        if not own:
            raise DataError(
                f"{path.name}: {model}, {mode}, {link:g} Mbit/s, {servers} servers has no profile of machine"
                f" {machine}; measure one and two workers there"
            )
        yield MeasuredCurve(
            model=model,
            mode=mode,
            link_Mbps=link,
            servers=servers,
            machine=machine,
            overlap=overlap,
            slow=slow,
            profile=_profile(key, own, next(iter(found.values()))),
            rates={n: float(row["steps_per_s"]) for n, row in found.items()},
            compute_s={n: float(row["compute_s"]) for n, row in found.items()},
            staleness={n: _histogram(row["stalenesses"]) for n, row in found.items()},
        )


def _key(row: Mapping[str, Any]) -> Key:
    return (
        str(row["model"]),
        str(row["mode"]),
        float(row["link_Mbps"]),
        int(row["servers"]),
        str(row["machine"]),
        bool(int(row["overlap"])),
        float(row["slow"]),
    )


def _histogram(text: str) -> dict[int, int]:
    return {int(value): int(count) for value, _, count in (word.partition(":") for word in text.split())}


def _profiles(path: Path) -> Iterator[dict[str, Any]]:
    """Steps of small runs: compressed where the set is published, plain where it was just taken."""
    packed, plain = path.with_suffix(".profiles.jsonl.gz"), path.with_suffix(".profiles.jsonl")
    with gzip.open(packed, "rt") if packed.exists() else plain.open() as f:
        yield from map(json.loads, f)


def _profile(key: Key, found: Mapping[int, Mapping[str, Any]], row: Row) -> JobProfile:
    model, mode, megabits, servers, _, _, slow = key
    rate = megabits * 1e6 / 8
    size = 4.0 * next(iter(found.values()))["parameters"]
    link = HostLink(rate_Bps=rate, burst_bytes=burst_bytes(rate) if row["shaping"] == "tbf" else 0.0)
    return JobProfile(
        name=model,
        batch=int(row["batch"]),
        up_bytes=size,
        down_bytes=size,
        mode=ServerMode(mode),
        servers=servers,
        slow_workers=int(slow > 1),
        link=link,
        runs=tuple(from_rows(found[n]["steps"]) for n in sorted(found)),
    )
