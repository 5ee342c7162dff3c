"""Jobs of the Pollux study (OSDI 2021): measured step times of six models on nodes of four T4, and how their
epochs go at each batch size.

Files are those of the artifact's `traces` folder, one folder for each application: `placements.csv` (step and
synchronisation time by devices per node), `scalability.csv` (the same by number of nodes and devices),
`validation-BATCH.csv` (progress, iterations and gradient statistics by epoch). Progress counts steps at the
initial batch size; a larger batch advances more per step by its statistical efficiency.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from paceline.errors import DataError, UnknownName
from paceline.sched.speed import packed
from paceline.spec.tables import csv_rows

#: epochs that a job of each application trains (the artifact's settings); where given, the largest batch on
#: one device and the most devices
APPLICATIONS: dict[str, dict[str, int]] = {
    "bert": {"epochs": 2},
    "cifar10": {"epochs": 100},
    "deepspeech2": {"epochs": 80},
    "imagenet": {"epochs": 90},
    "ncf": {"epochs": 10, "most_devices": 1},
    "yolov3": {"epochs": 50, "most_local": 8},
}
#: batch sizes tried for the best goodput, evenly spaced in logarithm
CANDIDATES = 50


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """How a batch is run: on one device at a time, so many further times before each synchronisation."""

    local: int
    accumulations: int
    batch: int


class Application:
    """What was measured of one model. Times are seconds."""

    def __init__(self, folder: Path, *, epochs: int, most_local: int = 0, most_devices: int = 64) -> None:
        self.name = folder.name
        self.epochs = epochs
        self.most_devices = most_devices
        rows = csv_rows(folder / "placements.csv", ("placement", "local_bsz", "step_time", "sync_time"))
        self._placed: dict[tuple[int, ...], list[tuple[int, float, float]]] = defaultdict(list)
        for row in rows:
            key = tuple(int(digit) for digit in row["placement"])
            self._placed[key].append(
                (int(row["local_bsz"]), float(row["step_time"]), float(row["sync_time"]))
            )
        wider = csv_rows(
            folder / "scalability.csv", ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
        )
        self._wider = [
            tuple(float(row[c]) for c in ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time"))
            for row in wider
        ]
        self.least_local = min(int(row["local_bsz"]) for row in rows)
        self.most_local = most_local or max(int(row["local_bsz"]) for row in rows)
        self._curves = self._read_curves(folder)
        self.first_batch, self.last_batch = min(self._curves), max(self._curves)
        #: progress at the end of each epoch
        self.progress = tuple(
            min(float(curve[epoch]["progress"]) for curve in self._curves.values()) for epoch in range(epochs)
        )
        self._interpolator: Any = None
        self._times: dict[tuple[tuple[int, ...], int], tuple[float, float]] = {}

    def _read_curves(self, folder: Path) -> dict[int, list[Mapping[str, Any]]]:
        found = {}
        for path in folder.glob("validation-*.csv"):
            rows = csv_rows(path, ("progress", "iteration", "grad_sqr", "grad_var"))
            if len(rows) < self.epochs:
                raise DataError(
                    f"{path} has {len(rows)} epochs, but a job of {self.name} trains {self.epochs}"
                )
            found[int(path.stem.split("-")[1])] = rows
        if not found:
            raise DataError(f"{folder} has no validation-BATCH.csv")
        return dict(sorted(found.items()))

    def times(self, counts: tuple[int, ...], local: int) -> tuple[float, float]:
        """(step, synchronisation) seconds at `local` samples on each device; not a number where nothing near
        was measured.
        """
        key = min(counts[i:] + counts[:i] for i in range(len(counts))), local
        if key not in self._times:
            self._times[key] = self._measured(*key) if key[0] in self._placed else self._between(*key)
        return self._times[key]

    def _measured(self, counts: tuple[int, ...], local: int) -> tuple[float, float]:
        rows = self._placed[counts]
        for (low, *slow), (high, *shigh) in zip(rows, rows[1:] or rows, strict=False):
            if low <= local <= high:
                w = (local - low) / (high - low) if high > low else 0.0
                return slow[0] + (shigh[0] - slow[0]) * w, slow[1] + (shigh[1] - slow[1]) * w
        return math.nan, math.nan

    def _between(self, counts: tuple[int, ...], local: int) -> tuple[float, float]:
        """Linear between measured (nodes, devices, local batch), over a triangulation."""
        if self._interpolator is None:
            from scipy.interpolate import LinearNDInterpolator

            groups: dict[tuple[float, ...], list[tuple[float, float]]] = defaultdict(list)
            for placed, rows in self._placed.items():
                for size, step, sync in rows:
                    groups[len(placed), sum(placed), size].append((step, sync))
            points = [
                (*key, *(sum(v) / len(v) for v in zip(*groups[key], strict=True))) for key in sorted(groups)
            ] + self._wider
            self._interpolator = LinearNDInterpolator([p[:3] for p in points], [p[3:] for p in points])
        step, sync = self._interpolator([(min(len(counts), 16), sum(counts), local)])[0]
        return float(step), float(sync)

    def _between_curves(self, batch: int, epoch: int, column: str) -> float:
        low = max((b for b in self._curves if b <= batch), default=None)
        high = min((b for b in self._curves if b >= batch), default=None)
        if low is None or high is None:
            raise DataError(
                f"{self.name}: batch {batch} is outside the {self.first_batch} to {self.last_batch} that were"
                " measured"
            )
        left, right = (float(self._curves[b][epoch][column]) for b in (low, high))
        return left if low == high else ((batch - low) * right + (high - batch) * left) / (high - low)

    @cache  # noqa: B019  (applications live as long as the process)
    def gain(self, batch: int, epoch: int) -> float:
        """Progress per step at that batch, in steps at the initial one: (var + sqr) / (var / scale + sqr)."""
        square, variance = (
            self._between_curves(batch, epoch, "grad_sqr"),
            self._between_curves(batch, epoch, "grad_var"),
        )
        return (variance + square) / (variance * self.first_batch / batch + square)

    @cache  # noqa: B019
    def iterations(self, batch: int, epoch: int) -> float:
        """Steps made by the end of an epoch at that batch."""
        return self._between_curves(batch, epoch, "iteration")

    def split(self, devices: int, batch: int, two_passes: bool | None = None) -> BatchSplit:
        """How a batch is spread; one device that runs more than the initial batch does so in at least two
        passes, to see its gradients' noise.
        """
        local = math.ceil(batch / devices - 1e-8)
        more = math.ceil(local / self.most_local - 1e-8) - 1
        if devices == 1 and (batch > self.first_batch if two_passes is None else two_passes):
            more = max(1, more)
        passes = more + 1
        each = min(math.ceil(local / passes - 1e-8), int(self.last_batch / (devices * passes)))
        return BatchSplit(each, more, devices * each * passes)

    def step_s(self, counts: tuple[int, ...], split: BatchSplit) -> float:
        """Seconds of one step, its accumulations among them."""
        step, sync = self.times(counts, split.local)
        return step + (step - sync) * split.accumulations

    @cache  # noqa: B019
    def choices(self, counts: tuple[int, ...]) -> tuple[tuple[int, float], ...]:
        """(batch, seconds per step) of the batches that can be chosen on these devices."""
        devices = sum(counts)
        low = max(self.first_batch, self.least_local * devices)
        if low > self.last_batch:
            return ()
        ratio = (self.last_batch / low) ** (1 / (CANDIDATES - 1))
        found: dict[int, float] = {}
        for i in range(CANDIDATES):
            split = self.split(devices, round(low * ratio**i))
            seconds = self.step_s(counts, split)
            if (
                self.least_local <= split.local <= self.most_local
                and self.first_batch <= split.batch <= self.last_batch
                and seconds > 0
            ):
                found[split.batch] = min(seconds, found.get(split.batch, math.inf))
        return tuple(found.items())


class PolluxSpeed:
    """The speed of a job of an application at the batch it was submitted with, or at the batch of the best
    goodput.
    """

    __slots__ = ("application", "batch", "left", "memo", "rates")

    def __init__(self, application: Application, batch: int) -> None:
        self.application = application
        self.batch = batch
        self.rates: dict[tuple[tuple[int, ...], int, bool], float] = {}
        self.memo: dict[tuple[int, int, int], float] = {}
        self.left: dict[tuple[int, int], tuple[float, ...]] = {}

    def ends(self, work: float) -> tuple[float, ...]:
        return self.application.progress

    def rate(self, counts: tuple[int, ...], kind: str, phase: int, adaptive: bool) -> float:
        key = counts, phase, adaptive
        if key not in self.rates:
            self.rates[key] = self._goodput(counts, phase) if adaptive else self._fixed(counts, phase)
        return self.rates[key]

    def _fixed(self, counts: tuple[int, ...], phase: int) -> float:
        split = self.application.split(sum(counts), self.batch)
        rate = self.application.gain(split.batch, phase) / self.application.step_s(counts, split)
        return rate if rate > 0 else 0.0

    def _goodput(self, counts: tuple[int, ...], phase: int) -> float:
        application = self.application
        if application.most_devices == 1:  # trained at the batch it came with
            return self._fixed(counts, phase)
        return max(
            (application.gain(batch, phase) / seconds for batch, seconds in application.choices(counts)),
            default=0.0,
        )

    def seconds(self, left: float, phase: int, devices: int, node_devices: int, adaptive: bool) -> float:
        if adaptive:
            return self._adaptive_seconds(left, phase, devices, node_devices)
        key = phase, devices, node_devices
        if key not in self.memo:
            app, last = self.application, self.application.epochs - 1
            steps = (
                app.iterations(self.batch, last) - app.iterations(self.batch, phase) if phase < last else 1.0
            )
            step_s = app.step_s(
                packed(devices, node_devices), app.split(devices, self.batch, two_passes=True)
            )
            self.memo[key] = steps * step_s if step_s > 0 else math.inf
        return self.memo[key]

    def _adaptive_seconds(self, left: float, phase: int, devices: int, node_devices: int) -> float:
        """The present epoch at its rate, the later ones at theirs."""
        ends = self.application.progress
        key = devices, node_devices
        if key not in self.left:
            counts, later = packed(devices, node_devices), [0.0]
            for i in range(len(ends) - 1, 0, -1):
                rate = self.rate(counts, "", i, True)
                later.append(later[-1] + ((ends[i] - ends[i - 1]) / rate if rate > 0 else math.inf))
            self.left[key] = tuple(reversed(later))
        rate = self.rate(packed(devices, node_devices), "", phase, True)
        here = max(0.0, left - (ends[-1] - ends[phase]))
        return here / rate + self.left[key][phase] if rate > 0 else math.inf


@cache
def application(folder: Path, name: str) -> Application:
    """An application by name, read from the folder that holds those of the study."""
    if name not in APPLICATIONS:
        raise UnknownName("application", name, APPLICATIONS, f"allowed: {', '.join(APPLICATIONS)}")
    return Application(folder / name, **APPLICATIONS[name])


@cache
def speed(folder: Path, name: str, batch: int) -> PolluxSpeed:
    """The speed of that application at that batch, one object for all jobs that share it."""
    return PolluxSpeed(application(folder, name), batch)
