"""How good is the H200 fit on models it has not seen? Fit without a fold of models, predict their steps, for
every fold.

    python benchmarks/cross_validate.py [--folds 3]

Models are dealt to folds by name, so that a model's profiles and its steps are left out together.
Takes about as long as `--folds` fits.
"""

from __future__ import annotations

import argparse
import re
import statistics
import zlib
from dataclasses import replace
from pathlib import Path

from paceline.bench import models
from paceline.bench.fit import hopper
from paceline.bench.validate.case import json_rows
from paceline.catalog import devices
from paceline.cost.curves import curves_for, from_tables
from paceline.predict.step import Conditions, predict

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "src" / "paceline" / "bench" / "data" / "h200"


def family(model: str) -> str:
    """Sizes of one network are left out together: resnet18 says much about resnet152."""
    return re.split(r"[-_\d]", model.lower())[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folds", type=int, default=3)
    folds = parser.parse_args().folds
    device = devices.get("h200")
    complete = curves_for(device)
    profiles = hopper.from_profiles(ROOT / "measurements" / "h200" / "profiled_steps.jsonl.gz")
    operators = hopper.from_microbenchmarks(SHIPPED / "ops.jsonl.gz")
    steps = [row for row in json_rows(SHIPPED / "steps.jsonl.gz") if not row["compile"]]
    seen: list[float] = []
    unseen: list[float] = []
    for fold in range(folds):

        def inside(model: str, fold: int = fold) -> bool:
            return zlib.crc32(family(model).encode()) % folds == fold

        rows = [row for row in steps if inside(row["model"])]
        if not rows:
            continue
        tables = hopper.fit([o for o in profiles if not inside(o.source)] + operators, [])
        # a group that only the models left out use has no curve now: finding a stand-in for it is part of the
        # test
        fitted = from_tables("fold", {"fold": {"source": "", **tables}})
        for row in rows:
            workload = models.h200_step(row)
            for curves, errors in ((complete, seen), (replace(fitted, name="hopper"), unseen)):
                errors.append(
                    100
                    * (predict(workload, device, Conditions(curves=curves)).kernel_s / row["kernel_s"] - 1)
                )
            name = f"{row['model']:24s} b{row['batch']:<5d} {row['precision']:9s}"
            print(f"fold {fold}  {name} seen {seen[-1]:+6.1f} %  unseen {unseen[-1]:+6.1f} %", flush=True)
    for name, errors in (("seen", seen), ("unseen", unseen)):
        absolute = [abs(e) for e in errors]
        print(
            f"{name:7s} rows {len(errors)}  mean {statistics.mean(absolute):.1f} %  median"
            f" {statistics.median(absolute):.1f} %"
        )


if __name__ == "__main__":
    main()
