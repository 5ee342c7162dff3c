"""How far the throughput models are off, on runs that they have not seen."""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.bench.throughput.dataset import SET, MeasuredCurve, curves
from paceline.bench.throughput.runs import PROFILED, STALENESS_MBPS
from paceline.errors import DataError
from paceline.queueing import baselines
from paceline.queueing.coarse import coarse
from paceline.queueing.estimate import fine, knee
from paceline.queueing.profile import JobProfile, ProfiledRun
from paceline.queueing.simulate import simulate
from paceline.queueing.synchronous import SynchronousModel
from paceline.sched.throughput import measured as pollux_rows

MODELS = ("fine", "coarse", "linear", "optimus")
#: the fine model, told how long the run that it predicts computed: what is left is not for lack of a better
#: profile
TOLD = "fine, compute of the run known"
ALL = "all"
#: every combination once: predictions and measurements averaged over the machines that took it
REPEATED = "all, repeats averaged"
#: curves that one process is given at a time
_MANY = 4
_POLLUX = ("cifar10", "imagenet", "bert", "deepspeech2", "yolov3", "ncf")


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRow:
    """Relative errors of one model on one group of runs."""

    group: str
    model: str
    runs: int
    mean: float
    worst: float
    #: share of curves whose saturation point is right within one worker; None where it does not apply
    saturation: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorTable:
    """A table of errors."""

    title: str
    rows: tuple[ErrorRow, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "rows": [{name: getattr(row, name) for name in ErrorRow.__slots__} for row in self.rows],
        }

    def cells(self) -> Iterator[tuple[str, ...]]:
        """What the table shows, the names of its columns first."""
        yield "runs", "model", "number", "mean error", "worst", "saturation within one worker"
        for row in self.rows:
            saturation = "" if row.saturation is None else f"{100 * row.saturation:.0f} %"
            yield (
                row.group,
                row.model,
                str(row.runs),
                f"{100 * row.mean:.1f} %",
                f"{100 * row.worst:.1f} %",
                saturation,
            )

    def __rich__(self) -> Any:
        return table(self.title, self.cells())


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessRow:
    """Asynchronous runs of some workers: steps per second and staleness, measured and predicted."""

    model: str
    link_Mbps: float
    workers: int
    #: how many times as long the last worker computes
    slow: float
    machine: str
    rate: float
    predicted_rate: float
    staleness: float
    predicted_staleness: float
    #: half of the summed differences between the two histograms as shares: 0 where they are equal, 1 where
    #: nothing overlaps
    distance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessTable:
    """Predicted staleness beside measured."""

    rows: tuple[StalenessRow, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"rows": [{name: getattr(row, name) for name in StalenessRow.__slots__} for row in self.rows]}

    def cells(self) -> Iterator[tuple[str, ...]]:
        """What the table shows, the names of its columns first."""
        yield (
            "model",
            "link",
            "workers",
            "slow worker",
            "machine",
            "steps/s",
            "predicted",
            "error",
            "mean staleness",
            "predicted",
            "distance of histograms",
        )
        for row in self.rows:
            yield (
                row.model,
                f"{row.link_Mbps:g} Mbit/s",
                str(row.workers),
                f"{row.slow:g} x" if row.slow > 1 else "none",
                row.machine,
                f"{row.rate:.2f}",
                f"{row.predicted_rate:.2f}",
                f"{100 * abs(row.predicted_rate / row.rate - 1):.1f} %",
                f"{row.staleness:.2f}",
                f"{row.predicted_staleness:.2f}",
                f"{row.distance:.3f}",
            )

    def __rich__(self) -> Any:
        return table("staleness, predicted from a profile of one and two workers", self.cells())


def table(title: str, cells: Iterator[tuple[str, ...]]) -> Any:
    """A table for a terminal; the first row of `cells` names the columns."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, name in enumerate(next(cells)):
        table.add_column(name, justify="left" if i < 2 else "right")
    for row in cells:
        table.add_row(*row)
    return table


def measured(path: Path = SET, *, kind: str = "even") -> ErrorTable:
    """Both models and both guesses, on 3 and more workers of a measured set: one kind of its runs
    (`Curve.kind`).
    """
    errors: dict[tuple[str, str], list[float]] = {}
    knees: dict[tuple[str, str], list[bool]] = {}
    chosen = [
        one
        for one in curves(path)
        if one.kind == kind and max(one.rates) > PROFILED and one.link_Mbps != STALENESS_MBPS
    ]
    whole = list(range(1, max((max(one.rates) for one in chosen), default=0) + 1))
    places: dict[tuple[Any, ...], list[_Predicted]] = {}
    for one, found in zip(chosen, _all_predicted(chosen), strict=True):
        counts = sorted(one.rates)
        places.setdefault((one.model, one.mode, one.link_Mbps, one.servers), []).append((one, found))
        real = knee(counts, [one.rates[n] for n in counts])
        for name, group in itertools.product(found, (one.label, ALL)):
            off = [
                predicted / one.rates[n] - 1
                for n, predicted in zip(counts, found[name], strict=True)
                if n > PROFILED
            ]
            errors.setdefault((group, name), []).extend(off)
            if counts == whole and name != TOLD:
                knees.setdefault((group, name), []).append(abs(knee(counts, found[name]) - real) <= 1)
    if len(places) < len(chosen):
        for name in MODELS:
            errors[REPEATED, name], knees[REPEATED, name] = _averaged(name, list(places.values()), whole)
    rows = [
        _row(group, name, found, statistics.mean(knees[group, name]) if knees.get((group, name)) else None)
        for (group, name), found in sorted(errors.items(), key=_order)
    ]
    return ErrorTable(
        title="steps per second of 3 and more workers, from a profile of one and two", rows=tuple(rows)
    )


def _all_predicted(chosen: Sequence[MeasuredCurve]) -> list[dict[str, list[float]]]:
    """Of each curve; on all cores where it is many: a simulation of eight workers takes a tenth of a
    second.
    """
    if len(chosen) < 2 * _MANY:
        return [_predicted(one) for one in chosen]
    with ProcessPoolExecutor() as pool:
        return list(pool.map(_predicted, chosen, chunksize=_MANY))


def _predicted(one: MeasuredCurve) -> dict[str, list[float]]:
    """By model, for each number of workers that was measured."""
    counts = sorted(one.rates)
    found = predict(one.profile, counts)
    if one.kind == "even":
        found[TOLD] = [fine(_told(one, n), n)[0] if n > PROFILED else 0.0 for n in counts]
    return found


#: a curve, and by model what was predicted for each of its numbers of workers
_Predicted = tuple[MeasuredCurve, dict[str, list[float]]]


def _averaged(
    name: str, places: Sequence[Sequence[_Predicted]], whole: Sequence[int]
) -> tuple[list[float], list[bool]]:
    """Errors of one model after geometric means over machines, and whether saturation is right within one
    worker where machines took all numbers.
    """
    errors, knees = [], []
    for some in places:
        by_count = [dict(zip(sorted(one.rates), found[name], strict=True)) for one, found in some]
        for n in whole[PROFILED:]:
            ratios = [
                predicted[n] / one.rates[n]
                for (one, _), predicted in zip(some, by_count, strict=True)
                if n in predicted
            ]
            if ratios:
                errors.append(statistics.geometric_mean(ratios) - 1)
        complete = [
            (one.rates, predicted)
            for (one, _), predicted in zip(some, by_count, strict=True)
            if sorted(predicted) == whole
        ]
        if complete:
            real, guess = (
                knee(whole, [statistics.geometric_mean([pair[i][n] for pair in complete]) for n in whole])
                for i in (0, 1)
            )
            knees.append(abs(guess - real) <= 1)
    return errors, knees


def _told(one: MeasuredCurve, workers: int) -> JobProfile:
    """The profile with compute scaled to the mean of a run that is to be predicted."""
    factor = one.compute_s[workers] / float(one.profile.samples("compute_s").mean())
    return replace(
        one.profile,
        runs=tuple(
            ProfiledRun(
                steps=tuple(
                    tuple(replace(step, compute_s=step.compute_s * factor) for step in steps)
                    for steps in run.steps
                )
            )
            for run in one.profile.runs
        ),
    )


def predict(job: JobProfile, counts: Sequence[int]) -> dict[str, list[float]]:
    """Steps per second by each model for numbers of workers."""
    most = max(counts)
    quick = {
        "coarse": coarse(job, most).throughput,
        "linear": baselines.linear(job, most),
        "optimus": baselines.optimus(job, most),
    }
    return {
        "fine": [fine(job, n)[0] for n in counts],
        **{name: [float(curve[n - 1]) for n in counts] for name, curve in quick.items()},
    }


def _order(item: tuple[tuple[str, str], Any]) -> tuple[int, str, int]:
    (group, name), _ = item
    return (
        (ALL, REPEATED).index(group) + 1 if group in (ALL, REPEATED) else 0,
        group,
        (*MODELS[:1], TOLD, *MODELS[1:]).index(name),
    )


def _row(group: str, model: str, found: Sequence[float], saturation: float | None = None) -> ErrorRow:
    sizes = [abs(error) for error in found]
    return ErrorRow(
        group=group,
        model=model,
        runs=len(sizes),
        mean=statistics.mean(sizes),
        worst=max(sizes),
        saturation=saturation,
    )


def staleness(
    path: Path = SET, *, links_Mbps: Sequence[float] = (100.0, 1200.0), workers: int = 4
) -> StalenessTable:
    """Staleness of asynchronous runs on one server by the fine model: on links that are full, and on links
    that are not.
    """
    rows = [
        _stale(one, workers)
        for one in curves(path)
        if (one.mode, one.servers, one.overlap) == ("async", 1, False)
        and one.link_Mbps in links_Mbps
        and workers in one.rates
    ]
    return StalenessTable(
        rows=tuple(sorted(rows, key=lambda row: (row.link_Mbps, row.slow, row.model, row.machine)))
    )


def _stale(one: MeasuredCurve, workers: int) -> StalenessRow:
    runs = [simulate(one.profile, workers, steps=100, seed=seed) for seed in range(3)]
    predicted: dict[int, float] = {}
    for run in runs:
        for value, count in run.staleness.items():
            predicted[value] = predicted.get(value, 0.0) + count
    real = one.staleness[workers]
    return StalenessRow(
        model=one.model,
        link_Mbps=one.link_Mbps,
        workers=workers,
        slow=one.slow,
        machine=one.machine,
        rate=one.rates[workers],
        predicted_rate=statistics.mean(run.throughput for run in runs),
        staleness=_mean(real),
        predicted_staleness=_mean(predicted),
        distance=distance(real, predicted),
    )


def _mean(histogram: Mapping[int, float]) -> float:
    return sum(value * count for value, count in histogram.items()) / sum(histogram.values())


def distance(a: Mapping[int, float], b: Mapping[int, float]) -> float:
    """Total variation distance of two histograms.

    >>> distance({1: 2, 2: 2}, {1: 10, 3: 10})
    0.5
    """
    total_a, total_b = sum(a.values()), sum(b.values())
    return 0.5 * sum(abs(a.get(value, 0) / total_a - b.get(value, 0) / total_b) for value in {*a, *b})


def pollux(data: Path | None = None) -> ErrorTable:
    """The synchronous model fitted on one and two nodes of the Pollux measurements, scored on four and
    more.
    """
    root = data or (Path(os.environ["PACELINE_DATA"]) if "PACELINE_DATA" in os.environ else None)
    folder = root / "traces" / "pollux" if root else None
    if folder is None or not folder.is_dir():
        raise DataError(
            "the Pollux measurements are not here; give the folder that holds traces/pollux by --data or"
            " PACELINE_DATA"
        )
    rows = []
    for model in _POLLUX:
        steps = pollux_rows(folder / model)
        fitted = SynchronousModel.fit(step for step in steps if step.nodes <= 2)
        far = [step for step in steps if step.nodes >= 4]
        column: Callable[[str], Any] = lambda name, far=far: np.array([getattr(step, name) for step in far])  # type: ignore[misc] # noqa: E731
        predicted = fitted.throughput(column("nodes"), column("replicas"), column("batch"), column("widest"))
        real = column("replicas") * column("batch") / column("step_s")
        rows.append(_row(f"{model}, 4 to 16 nodes", "synchronous", (predicted / real - 1).tolist()))
    return ErrorTable(
        title="samples per second on 4 to 16 nodes, fitted on one and two (Pollux)", rows=tuple(rows)
    )
