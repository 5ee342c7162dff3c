"""The throughput models against runs that are taken now: `paceline bench throughput --hosts 6`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench.throughput.dataset import curves
from paceline.bench.throughput.jobs import JOBS
from paceline.bench.throughput.measure import take
from paceline.bench.throughput.runs import MODES, PROFILED, grid
from paceline.bench.throughput.score import predict, table
from paceline.errors import DataError, SpecError, UnknownName


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRun:
    """Steps per second of all workers, measured and by both models; runs that the models were fed are
    `profiled`.
    """

    model: str
    mode: str
    workers: int
    profiled: bool
    steps_per_s: float
    fine: float
    coarse: float
    linear: float
    optimus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputComparison:
    """Predictions beside runs of this machine."""

    link_Mbps: float
    rows: tuple[PredictedRun, ...]
    #: runs that did not fit in the time
    left: int

    def to_dict(self) -> dict[str, Any]:
        rows = [{name: getattr(row, name) for name in PredictedRun.__slots__} for row in self.rows]
        return {"link_Mbps": self.link_Mbps, "left": self.left, "rows": rows}

    def cells(self) -> Iterator[tuple[str, ...]]:
        """What the table shows, the names of its columns first."""
        yield (
            "model",
            "mode",
            "workers",
            "steps/s",
            "fine",
            "error",
            "coarse",
            "error",
            "linear",
            "Optimus form",
        )
        for row in self.rows:
            errors = [
                "profiled" if row.profiled else f"{100 * (value / row.steps_per_s - 1):+.1f} %"
                for value in (row.fine, row.coarse)
            ]
            yield (
                row.model,
                row.mode,
                str(row.workers),
                f"{row.steps_per_s:.2f}",
                f"{row.fine:.2f}",
                errors[0],
                f"{row.coarse:.2f}",
                errors[1],
                f"{row.linear:.2f}",
                f"{row.optimus:.2f}",
            )

    def __rich__(self) -> Any:
        left = f"; {self.left} runs did not fit in the time" if self.left else ""
        return table(
            f"measured here and predicted from one and two workers, {self.link_Mbps:g} Mbit/s, one"
            f" server{left}",
            self.cells(),
        )


def compare(
    hosts: int,
    *,
    models: Sequence[str],
    link_Bps: float,
    modes: Sequence[str] = MODES,
    seconds: float = 120.0,
) -> ThroughputComparison:
    """Measures one server and 1 to `hosts` - 2 workers on an emulated cluster of this machine, and predicts
    all of them from the first two runs.
    """
    if not PROFILED + 3 <= hosts <= 64:
        raise SpecError(
            f"give 5 to 64 hosts: one conducts, one serves, and two workers are the profile; got {hosts}"
        )
    for kind, names, known in (("model", models, tuple(JOBS)), ("mode", modes, MODES)):
        for name in names:
            if name not in known:
                raise UnknownName(kind, name, known, f"{kind}s: {', '.join(known)}")
    runs = grid(models=models, modes=modes, links=[link_Bps * 8e-6], servers=[1], workers=range(1, hosts - 1))
    with tempfile.TemporaryDirectory(prefix="paceline-throughput-") as folder:
        out = Path(folder, "runs.csv")
        left = take(runs, out, hosts=hosts, seconds=seconds)
        if len(left) == len(runs):
            raise DataError(f"no run ended within {seconds:g} s; give more by --seconds")
        rows: list[PredictedRun] = []
        for curve in curves(out):
            counts = sorted(curve.rates)
            found = predict(curve.profile, counts)
            rows += [
                PredictedRun(
                    model=curve.model,
                    mode=curve.mode,
                    workers=n,
                    profiled=n <= PROFILED,
                    steps_per_s=curve.rates[n],
                    **{name: values[i] for name, values in found.items()},
                )
                for i, n in enumerate(counts)
            ]
    return ThroughputComparison(link_Mbps=link_Bps * 8e-6, rows=tuple(rows), left=len(left))
