"""Writes `src/paceline/catalog/validated.csv.gz`: every measured step with how wrong its prediction is.

    python benchmarks/validated_rows.py DATA        # a folder of measurement sets, as for paceline validate

Answers name the rows that are nearest to them.
"""

from __future__ import annotations

import csv
import gzip
import io
import sys
from pathlib import Path
from typing import Any

from paceline import api
from paceline.bench.validate.sets import SETS
from paceline.errors import PacelineError
from paceline.predict import simulated, step

TARGET = Path(__file__).parents[1] / "src" / "paceline" / "catalog" / "validated.csv.gz"
COLUMNS = (
    "set",
    "name",
    "model",
    "parameters",
    "unit",
    "device",
    "devices",
    "precision",
    "error_pct",
    "inside",
)


def recorded(module: Any, seen: list[Any]) -> None:
    """Keeps each prediction that a module makes."""
    run = module.predict

    def predict(*arguments: Any, **options: Any) -> Any:
        found = run(*arguments, **options)
        seen.append(found)
        return found

    module.predict = predict


def rows(folder: Path) -> list[dict[str, Any]]:
    seen: list[Any] = []
    for module in (api, simulated, step):
        recorded(module, seen)
    out = []
    for name, read in SETS.items():
        for case in read(folder, False) or ():
            if case.skip or case.predict is None or not {"step_s", "step_multi_s"} & case.measured.keys():
                continue
            seen.clear()
            try:
                answers = case.predict()
            except PacelineError:
                continue
            metric = "step_s" if "step_s" in case.measured else "step_multi_s"
            if metric in answers:
                out.append(
                    row(name, case, answers[metric], case.measured[metric], seen[-1] if seen else None)
                )
        print(f"{name}: {len(out)} rows so far", flush=True)
    return out


def row(name: str, case: Any, found: Any, measured: float, prediction: Any) -> dict[str, Any]:
    return {
        "set": name,
        "name": case.name,
        "model": getattr(prediction, "model", case.name),
        "parameters": getattr(prediction, "parameters", 0),
        "unit": getattr(prediction, "unit", ""),
        "device": case.device,
        "devices": getattr(prediction, "devices", 1),
        "precision": getattr(prediction, "precision", ""),
        "error_pct": round(100 * (found.value / measured - 1), 2),
        "inside": int(found.low <= measured <= found.high),
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: validated_rows.py DATA")
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    writer.writerows(rows(Path(sys.argv[1])))
    TARGET.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))
    print(f"written: {TARGET} ({TARGET.stat().st_size:,} bytes)")
