"""A table as the document that `paceline audit` reads: every run with all its evaluations, and the claims."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.bench.tta.outcome import TargetRow, TargetRun, TargetTable


def write(table: TargetTable, path: Path) -> None:
    """Writes the document."""
    path.write_text(json.dumps(document(table), indent=1) + "\n", encoding="utf-8")


def document(table: TargetTable) -> dict[str, Any]:
    """Runs, claims (medians, and speedups over the baseline where most runs of both met the target), and the
    axes of the page.
    """
    first = next(iter(table.rules.values()))
    return {
        "stated": {
            "metric": "accuracy",
            "target_fixed": first.fixed,
            "seeds": table.seeds,
            "clock": "wall",
            "devices": table.world,
            "device": "cpu",
            "precision": "fp32",
            "tuned_on": "validation",
            "evaluated_on": "test",
        },
        "contestants": [_contestant(table, row) for row in _firsts(table)],
        "runs": [_run(table, row, run) for row in table.rows for run in row.runs],
        "claims": [claim for row in table.rows for claim in _claims(table, row)],
        "charts": [
            {
                "title": "time to target, each run a dot",
                "kind": "dots",
                "x": "seconds",
                "x_scale": "linear",
                "x_from": 0,
                "x_label": "seconds to the target, evaluations included",
            }
        ],
    }


def _firsts(table: TargetTable) -> list[TargetRow]:
    return list({row.contestant: row for row in reversed(table.rows)}.values())[::-1]


def _contestant(table: TargetTable, row: TargetRow) -> dict[str, Any]:
    return {
        "name": row.contestant,
        "role": "baseline" if row.contestant == table.baseline else "contestant",
        "source": "measured here",
        "tuning_trials": row.trials,
        "tuned_on": "validation",
    }


def _run(table: TargetTable, row: TargetRow, run: TargetRun) -> dict[str, Any]:
    return {
        "contestant": row.contestant,
        "task": row.task,
        "target": table.rules[row.task].target,
        "seed": run.seed,
        "batch": row.batch,
        "lr": run.lr,
        "optimizer": row.optimizer,
        "started_at": run.started_at,
        "precision": "fp32",
        "device": "cpu",
        "devices": table.world,
        "wall_s": run.wall_s,
        "evaluations": [dict(one) for one in run.evaluations],
    }


def _claims(table: TargetTable, row: TargetRow) -> Iterator[dict[str, Any]]:
    if not math.isfinite(row.median_s):
        return
    about = {"contestant": row.contestant, "task": row.task, "batch": row.batch}
    claim = {**about, "quantity": "time to target", "statistic": "median"}
    yield {**claim, "value": row.median_s}
    base = next((one for one in table.places[row.place] if one.contestant == table.baseline), row)
    if base is not row and math.isfinite(base.median_s):
        yield {**claim, "over": base.contestant, "speedup": base.median_s / row.median_s}
