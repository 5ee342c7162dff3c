"""The names that fields of benchmarks go by, and rows of a file as runs, claims and charts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from paceline.errors import DataError
from paceline.spec.benchmark import BenchmarkReport, ReportedRow, ReportedRun, ReportedValue

#: field -> other names of it, as columns or keys of reports have them
ALIASES: dict[str, str] = {
    "contestant": "strategy system method name framework algorithm variant approach entry",
    "task": "model dataset workload benchmark",
    "seed": "random_seed rng_seed",
    "count": "seeds n runs repeats repetitions number_of_runs number_of_seeds",
    "batch": "batch_size global_batch global_batch_size bs gbs",
    "precision": "dtype number_format",
    "target": "threshold target_accuracy goal",
    "metric_name": "",
    "metric": "accuracy acc top1 top_1 score accuracy_mean mean_accuracy test_accuracy",
    "seconds": "time time_s elapsed elapsed_s duration runtime training_time train_time train_s",
    "reached_s": "time_to_target time_to_accuracy tta ttt reached_seconds",
    "evaluation_s": "eval_s evaluation_time eval_time evaluation_seconds eval_seconds validation_s",
    "wall_s": "total_s total_time wall_time wall_clock total_seconds",
    "step": "iteration iter update epoch",
    "tuning_trials": "trials tuning tuning_budget hyperparameter_trials hpo_trials",
    "source": "baseline_source",
    "reference": "published reference_value",
    "devices": "gpus workers world ranks",
    "device": "hardware gpu accelerator",
    "throughput": "samples_per_s images_per_s tokens_per_s samples_s images_s tokens_s",
    "watts": "power power_w",
    "usd": "cost price dollars",
    "over": "baseline versus compared_to relative_to",
    "per": "normalised_by normalized_by",
    "lr": "learning_rate",
    "x": "x_quantity",
    "y": "y_quantity",
}
#: texts and places that stay as they are
_PLAIN = (
    *("record", "role", "title", "kind", "quantity", "value", "speedup", "statistic", "clock", "better"),
    *("tuned_on", "evaluated_on", "target_fixed", "started_at", "reference_source", "interval", "optimizer"),
    *("weight_decay", "steps", "run", "x_scale", "y_scale", "x_from", "y_from", "x_to", "y_to", "x_ticks"),
    *("x_label", "y_label", "low", "high"),
)
_FIELDS = {other: name for name, others in ALIASES.items() for other in (name, *others.split())}
_FIELDS |= {name: name for name in _PLAIN}
#: what a row describes
RECORDS = ("stated", "contestant", "run", "evaluation", "claim", "chart")
#: fields of a run, not of one of its evaluations
_RUN_FIELDS = {*ALIASES, *_PLAIN} - {"metric", "seconds", "step", "evaluation_s"}


def field_of(column: str) -> tuple[str, str]:
    """The field that a column or key means, and the unit that its values then carry; unknown ones stay."""
    unit = "%" if "%" in column or column.lower().endswith(("_pct", "_percent")) else ""
    plain = re.sub(r"\([^)]*\)", " ", column.lower())
    plain = re.sub(r"(_pct|_percent)$", "", plain)
    name = re.sub(r"[^a-z0-9]+", "_", plain).strip("_")
    if re.match(r"(seconds|time)_to_", name) and name not in _FIELDS:
        return "reached_s", ""
    if name.endswith("interval"):
        return "interval", ""
    if name.startswith("accuracy_"):
        return "metric", unit
    if name.endswith("_ms") or "(ms)" in column.lower():
        stem = name.removesuffix("_ms")
        return _FIELDS.get(stem, _FIELDS.get(f"{stem}_s", stem)), "ms"
    return _FIELDS.get(name, name), unit


def row_of(cells: Iterable[tuple[str, str | float | bool | None, int, str]], file: str = "") -> ReportedRow:
    """A row from (column, value, line, place); empty cells are left out, and of two columns for one field the
    one with the field's own name is taken, else the first.
    """
    row: dict[str, ReportedValue] = {}
    for column, value, line, place in cells:
        if value is None or (isinstance(value, str) and not value.strip(" -")):
            continue
        name, unit = field_of(column)
        found = ReportedValue(value=_with_unit(value, unit), line=line, column=place, file=file)
        name = "metric_name" if name == "metric" and found.number is None else name
        if name not in row or column.lower() == name:
            row[name] = found
    if "contestant" not in row and "optimizer" in row:
        row["contestant"] = row["optimizer"]
    return row


def _with_unit(value: str | float | bool, unit: str) -> str | float | bool:
    """A number with the unit of its column, if it has none of its own."""
    bare = not isinstance(value, bool) and str(value).strip()[-1:].isdigit()
    return f"{value} {unit}" if unit and bare else value


def assembled(source: str, rows: Iterable[ReportedRow]) -> BenchmarkReport:
    """Rows of a table as a report."""
    parts: dict[str, list[ReportedRow]] = {name: [] for name in RECORDS}
    for row in rows:
        kind = row["record"].text.lower() if "record" in row else _kind(row)
        if kind not in parts:
            allowed = ", ".join(RECORDS)
            raise DataError(f"{source}, {row['record']}: a record is one of {allowed}")
        parts[kind].append(row)
    stated: dict[str, ReportedValue] = {}
    for row in parts["stated"]:
        stated.update(row)
    report = BenchmarkReport(
        source=source,
        stated=stated,
        contestants=tuple(parts["contestant"]),
        runs=(*(ReportedRun(fields=row) for row in parts["run"]), *grouped(parts["evaluation"])),
        claims=tuple(parts["claim"]),
        charts=tuple(parts["chart"]),
    )
    return checked(report)


def _kind(row: ReportedRow) -> str:
    return "evaluation" if "step" in row and "metric" in row else "run"


def grouped(rows: Iterable[ReportedRow]) -> list[ReportedRun]:
    """Evaluations of the same run, which have its contestant, seed and settings, as that run."""
    found: dict[tuple[str, ...], list[ReportedRow]] = {}
    names = sorted(_RUN_FIELDS)
    for row in rows:
        key = tuple(row[name].text if name in row else "" for name in names)
        found.setdefault(key, []).append(row)
    return [ReportedRun(fields=_settings(group[0]), evaluations=tuple(group)) for group in found.values()]


def _settings(row: ReportedRow) -> ReportedRow:
    return {name: value for name, value in row.items() if name in _RUN_FIELDS}


def checked(report: BenchmarkReport) -> BenchmarkReport:
    """The report, if it has runs and each has a contestant."""
    if not report.runs:
        raise DataError(
            f"{report.source}: no runs; give a row for each run or evaluation, with its contestant"
            " (docs/benchmarks.md)"
        )
    nameless = next((run for run in report.runs if not run.contestant), None)
    if nameless is not None:
        value = next(iter(nameless.fields.values()), None)
        where = f" ({value})" if value is not None else ""
        names = ", ".join(("contestant", *ALIASES["contestant"].split()[:4]))
        raise DataError(f"{report.source}: a run without a contestant{where}; name it in one of: {names}")
    return report


def named(run: ReportedRun, fields: Mapping[str, ReportedValue]) -> ReportedRun:
    """The run with more fields; its own stay."""
    return replace(run, fields={**fields, **run.fields})
