"""Predict every row of the chosen sets and sum up the errors."""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.bench.validate.case import Case
from paceline.bench.validate.peers import PEERS, Peer
from paceline.bench.validate.sets import SETS
from paceline.bench.validate.sweeps import Sweeps, summary
from paceline.errors import DataError, PacelineError, UnknownName

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Errors of one metric of one set, in per cent; `skipped` counts rows by reason."""

    set: str
    metric: str
    rows: int
    skipped: Mapping[str, int]
    mean_abs_pct: float
    median_abs_pct: float
    p90_abs_pct: float
    bias_pct: float
    coverage_pct: float
    naive_mean_abs_pct: float
    naive_median_abs_pct: float
    #: how well plans are told apart, where a set holds sweeps of them
    sweeps: Sweeps | None = None
    #: what others reach on the source of the set
    peers: tuple[Peer, ...] = ()


@dataclass(frozen=True, slots=True)
class _Result:
    case: Case
    metric: str
    measured: float
    predicted: float
    low: float
    high: float
    naive: float


def run(
    names: Sequence[str] = (),
    data: Path | None = None,
    *,
    rows_file: Path | None = None,
    leave_out_device: bool = False,
) -> list[Score]:
    """Scores of the named sets (all that are found, where none is named) in a data folder (by default what
    ships).
    """
    chosen = [_named(name) for name in names] or list(SETS)
    folder = Path(str(files("paceline.bench") / "data")) if data is None else data
    if not folder.is_dir():
        raise DataError(
            f"no folder {str(folder)!r}; --data (or PACELINE_DATA) takes one that holds h200/, kernels/,"
            " kernels_fp16/ or published/"
        )
    scores: list[Score] = []
    everything: list[tuple[str, _Result]] = []
    for name in chosen:
        cases = SETS[name](folder, leave_out_device)
        if cases is None:
            if names:
                raise DataError(f"set {name!r} is not in {folder}")
            continue
        results, skipped = _predict(cases)
        everything += [(name, r) for r in results]
        scores += _summary(name, results, skipped)
    if not scores and not names:
        raise DataError(f"{folder} holds none of the sets {', '.join(SETS)}")
    if rows_file is not None:
        _write_rows(rows_file, everything)
    return scores


def _named(name: str) -> str:
    folded = name.lower().replace("/", "_").replace(" ", "_").replace("-", "_").split(".")[0]
    for known in SETS:
        if folded in (known, known.removeprefix("h200_")):
            return known
    raise UnknownName("set", name, SETS, f"sets: {', '.join(SETS)}")


def _predict(cases: Iterable[Case]) -> tuple[list[_Result], Counter[str]]:
    results: list[_Result] = []
    skipped: Counter[str] = Counter()
    for case in cases:
        if case.skip is not None or case.predict is None:
            skipped[case.skip or "nothing to predict"] += 1
            continue
        try:
            answers = case.predict()
            naive = case.naive() if case.naive is not None else {}
        except PacelineError as error:
            skipped[str(error).splitlines()[0][:120]] += 1
            continue
        results += [
            _Result(
                case,
                metric,
                measured,
                answers[metric].value,
                answers[metric].low,
                answers[metric].high,
                naive.get(metric, float("nan")),
            )
            for metric, measured in case.measured.items()
            if metric in answers
        ]
    return results, skipped


def _summary(name: str, results: Sequence[_Result], skipped: Counter[str]) -> list[Score]:
    by_metric: dict[str, list[_Result]] = defaultdict(list)
    for result in results:
        by_metric[result.metric].append(result)
    out = []
    for metric, rows in by_metric.items() or {"": []}.items():
        measured, predicted = (np.array([getattr(r, f) for r in rows]) for f in ("measured", "predicted"))
        low, high = (np.array([getattr(r, f) for r in rows]) for f in ("low", "high"))
        error = 100 * (predicted / measured - 1) if rows else np.array([np.nan])
        naive = _naive_error(measured, np.array([r.naive for r in rows]))
        out.append(
            Score(
                set=name,
                metric=metric or "none",
                rows=len(rows),
                skipped=dict(skipped),
                mean_abs_pct=float(np.abs(error).mean()),
                median_abs_pct=float(np.median(np.abs(error))),
                p90_abs_pct=float(np.quantile(np.abs(error), 0.9)),
                bias_pct=float(np.median(error)),
                coverage_pct=(
                    float(100 * ((low <= measured) & (measured <= high)).mean()) if rows else float("nan")
                ),
                naive_mean_abs_pct=float(np.abs(naive).mean()),
                naive_median_abs_pct=float(np.median(np.abs(naive))),
                sweeps=(
                    summary((r.case.sweep, r.measured, r.predicted) for r in rows)
                    if metric == "step_s"
                    else None
                ),
                peers=PEERS.get(name, ()) if metric == "step_s" else (),
            )
        )
    return out


def _naive_error(measured: Array, proportional: Array) -> Array:
    """Per cent error of `proportional` times the one constant that makes its mean error least."""
    usable = np.isfinite(proportional) & (proportional > 0)
    if not usable.any():
        return np.array([np.nan])
    ratio = measured[usable] / proportional[usable]
    constants = np.quantile(ratio, np.linspace(0.01, 0.99, 99))
    errors = np.abs(constants[:, None] / ratio[None, :] - 1).mean(axis=1)
    best = constants[int(errors.argmin())]
    return np.asarray(100 * (best / ratio - 1))


def _write_rows(path: Path, everything: Sequence[tuple[str, _Result]]) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", newline="") as f:
            writer = csv.writer(f)
            writer.writerow(
                ("set", "row", "device", "metric", "measured", "predicted", "low", "high", "error_pct")
            )
            for name, r in everything:
                error = 100 * (r.predicted / r.measured - 1)
                writer.writerow(
                    (
                        name,
                        r.case.name,
                        r.case.device,
                        r.metric,
                        r.measured,
                        r.predicted,
                        r.low,
                        r.high,
                        error,
                    )
                )
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DataError(f"cannot write {str(path)!r}: {error.strerror}") from None


def board(scores: Sequence[Score]) -> dict[str, Any]:
    """The scoreboard as plain data, for `--json`."""

    def finite(value: float) -> float | None:
        return value if np.isfinite(value) else None

    def sweeps(found: Sweeps | None) -> dict[str, Any] | None:
        return None if found is None else {key: finite(value) for key, value in asdict(found).items()}

    return {
        "sets": [
            {
                "set": s.set,
                "metric": s.metric,
                "rows": s.rows,
                "skipped": sum(s.skipped.values()),
                "skipped_why": dict(s.skipped),
                "mean_abs_pct": finite(s.mean_abs_pct),
                "median_abs_pct": finite(s.median_abs_pct),
                "p90_abs_pct": finite(s.p90_abs_pct),
                "bias_pct": finite(s.bias_pct),
                "coverage_pct": finite(s.coverage_pct),
                "naive": {
                    "mean_abs_pct": finite(s.naive_mean_abs_pct),
                    "median_abs_pct": finite(s.naive_median_abs_pct),
                },
                "sweeps": sweeps(s.sweeps),
                "peers": [asdict(peer) for peer in s.peers],
            }
            for s in scores
        ]
    }
