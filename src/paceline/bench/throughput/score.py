"""How far the throughput models are off, on runs that they have not seen."""

from __future__ import annotations

import gzip
import json
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.bench.emulate.cluster import _BURST_S, _LEAST_BURST
from paceline.bench.validate.case import csv_rows
from paceline.errors import DataError
from paceline.queueing import baselines
from paceline.queueing.coarse import coarse
from paceline.queueing.estimate import fine, knee
from paceline.queueing.profile import JobProfile, Link, from_rows
from paceline.queueing.synchronous import Measured, SynchronousModel

SET = Path(__file__).parents[1] / "data" / "throughput" / "parameter_server.csv"
MODELS = ("fine", "coarse", "linear", "optimus")
ELSEWHERE, ALL = "profile of a faster machine", "all"
_POLLUX = ("cifar10", "imagenet", "bert", "deepspeech2", "yolov3", "ncf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Relative errors of one model on one group of runs."""

    group: str
    model: str
    runs: int
    mean: float
    worst: float
    #: share of curves whose saturation point is right within one worker; None where it does not apply
    saturation: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """A table of errors."""

    title: str
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"title": self.title, "rows": [{name: getattr(row, name) for name in Row.__slots__} for row in self.rows]}

    def markdown(self) -> str:
        """The table of the docs."""
        lines = ["| runs | model | number | mean error | worst | saturation within one worker |", "|---|---|---:|---:|---:|---:|"]
        for row in self.rows:
            saturation = "" if row.saturation is None else f"{100 * row.saturation:.0f} %"
            lines.append(f"| {row.group} | {row.model} | {row.runs} | {100 * row.mean:.1f} % | {100 * row.worst:.1f} % | {saturation} |")
        return "\n".join(lines)

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table(title=self.title, title_justify="left")
        for name in ("runs", "model", "number", "mean error", "worst", "saturation within one"):
            table.add_column(name, justify="left" if name in ("runs", "model") else "right")
        for row in self.rows:
            table.add_row(row.group, row.model, str(row.runs), f"{100 * row.mean:.1f} %", f"{100 * row.worst:.1f} %",
                          "" if row.saturation is None else f"{100 * row.saturation:.0f} %")
        return table


Key = tuple[str, str, float, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job of the measured set: its profile on one and two workers, and steps per second by workers."""

    model: str
    mode: str
    link_Mbps: float
    servers: int
    profile: JobProfile
    rates: dict[int, float]
    #: worker counts that were measured on another machine than the profile, one that computes more slowly
    elsewhere: frozenset[int]


def jobs(path: Path = SET) -> Iterator[Job]:
    """The measured set."""
    rows = csv_rows(path, ("model", "mode", "link_Mbps", "servers", "workers", "steps_per_s", "batch", "machine"))
    measured: dict[Key, dict[int, float]] = {}
    machines: dict[Key, dict[int, str]] = {}
    batches = {str(row["model"]): int(row["batch"]) for row in rows}
    for row in rows:
        key = (str(row["model"]), str(row["mode"]), float(row["link_Mbps"]), int(row["servers"]))
        measured.setdefault(key, {})[int(row["workers"])] = float(row["steps_per_s"])
        machines.setdefault(key, {})[int(row["workers"])] = row["machine"]
    runs: dict[Key, dict[int, Mapping[str, Any]]] = {}
    with gzip.open(path.with_suffix(".profiles.jsonl.gz"), "rt") as f:
        for line in f:
            raw = json.loads(line)
            runs.setdefault((raw["model"], raw["mode"], raw["link_Mbps"], raw["servers"]), {})[raw["workers"]] = raw
    for key, found in sorted(runs.items()):
        model, mode, link, servers = key
        elsewhere = frozenset(n for n, machine in machines[key].items() if machine != machines[key][1])
        yield Job(model=model, mode=mode, link_Mbps=link, servers=servers, profile=_profile(key, found, batches[model]), rates=measured[key],
                  elsewhere=elsewhere)


def _profile(key: Key, found: Mapping[int, Mapping[str, Any]], batch: int) -> JobProfile:
    model, mode, link, servers = key
    rate = link * 1e6 / 8
    size = 4.0 * next(iter(found.values()))["parameters"]
    return JobProfile(name=model, batch=batch, up_bytes=size, down_bytes=size, mode=mode, servers=servers,
                      link=Link(rate_Bps=rate, burst_bytes=max(_LEAST_BURST, rate * _BURST_S)),
                      runs=tuple(from_rows(found[n]["steps"]) for n in sorted(found)))


def measured(path: Path = SET, most: int = 8) -> Scores:
    """Both models and both guesses, on 3 and more workers of the measured set."""
    errors: dict[tuple[str, str], list[float]] = {}
    knees: dict[tuple[str, str], list[bool]] = {}
    for one in jobs(path):
        counts = sorted(n for n in one.rates if n <= most)
        curves = _curves(one.profile, counts)
        real = knee(counts, [one.rates[n] for n in counts])
        home = f"{one.mode}, {one.servers} server{'s' if one.servers > 1 else ''}"
        for name in MODELS:
            for n, predicted in zip(counts, curves[name], strict=True):
                if n > 2:
                    for group in (ELSEWHERE if n in one.elsewhere else home, ALL):
                        errors.setdefault((group, name), []).append(predicted / one.rates[n] - 1)
            if not one.elsewhere:
                for group in (home, ALL):
                    knees.setdefault((group, name), []).append(abs(knee(counts, curves[name]) - real) <= 1)
    rows = [_row(group, name, found, statistics.mean(knees[group, name]) if (group, name) in knees else None)
            for (group, name), found in sorted(errors.items(), key=_order)]
    return Scores(title="steps per second of 3 to 8 workers, from a profile of one and two", rows=tuple(rows))


def _curves(job: JobProfile, counts: Sequence[int]) -> dict[str, list[float]]:
    most = max(counts)
    quick = {"coarse": coarse(job, most).throughput, "linear": baselines.linear(job, most), "optimus": baselines.optimus(job, most)}
    return {"fine": [fine(job, n)[0] for n in counts], **{name: [float(curve[n - 1]) for n in counts] for name, curve in quick.items()}}


def _order(item: tuple[tuple[str, str], Any]) -> tuple[int, str, int]:
    (group, name), _ = item
    return (ELSEWHERE, ALL).index(group) if group in (ELSEWHERE, ALL) else -1, group, MODELS.index(name)


def _row(group: str, model: str, found: Sequence[float], saturation: float | None = None) -> Row:
    sizes = [abs(error) for error in found]
    return Row(group=group, model=model, runs=len(sizes), mean=statistics.mean(sizes), worst=max(sizes), saturation=saturation)


def pollux_rows(folder: Path, model: str) -> list[Measured]:
    """Measured steps of one model of the Pollux artifact."""
    out = []
    for row in csv_rows(folder / model / "placements.csv", ("placement", "local_bsz", "step_time")):
        nodes = [int(digit) for digit in row["placement"]]
        out.append(Measured(nodes=len(nodes), replicas=sum(nodes), widest=max(nodes), batch=float(row["local_bsz"]), step_s=float(row["step_time"])))
    for row in csv_rows(folder / model / "scalability.csv", ("num_nodes", "num_replicas", "local_bsz", "step_time")):
        count, replicas = int(row["num_nodes"]), int(row["num_replicas"])
        out.append(Measured(nodes=count, replicas=replicas, widest=-(-replicas // count), batch=float(row["local_bsz"]),
                            step_s=float(row["step_time"])))
    return out


def pollux(data: Path | None = None) -> Scores:
    """The synchronous model fitted on one and two nodes of the Pollux measurements, scored on four and more."""
    root = data or (Path(os.environ["PACELINE_DATA"]) if "PACELINE_DATA" in os.environ else None)
    folder = root / "traces" / "pollux" if root else None
    if folder is None or not folder.is_dir():
        raise DataError("the Pollux measurements are not here; give the folder that holds traces/pollux by --data or PACELINE_DATA")
    rows = []
    for model in _POLLUX:
        steps = pollux_rows(folder, model)
        fitted = SynchronousModel.fit(step for step in steps if step.nodes <= 2)
        far = [step for step in steps if step.nodes >= 4]
        column: Callable[[str], Any] = lambda name, far=far: np.array([getattr(step, name) for step in far])  # type: ignore[misc] # noqa: E731
        predicted = fitted.throughput(column("nodes"), column("replicas"), column("batch"), column("widest"))
        real = column("replicas") * column("batch") / column("step_s")
        rows.append(_row(f"{model}, 4 to 16 nodes", "synchronous", (predicted / real - 1).tolist()))
    return Scores(title="samples per second on 4 to 16 nodes, fitted on one and two (Pollux)", rows=tuple(rows))


if __name__ == "__main__":  # the tables of docs/asynchronous.md
    print(measured().markdown())
    if "PACELINE_DATA" in os.environ:
        print(pollux().markdown())
