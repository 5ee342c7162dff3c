"""What pruning costs in accuracy, by granularity and density, on the tasks that ship.

    python benchmarks/pruning.py                        # 5 seeds of digits-cnn and text-mlp: about 5 minutes
    python benchmarks/pruning.py --out measurements/pruning.jsonl
    python benchmarks/pruning.py --show measurements/pruning.jsonl

One line per task, granularity and density: accuracy of each seed as trained, right after pruning, and after
retraining over an eighth of the task's steps.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.report.sparsity import pruned_table
from paceline.spec.sparsity import Granularity, PrunedRun

#: tasks, and the steps of their training, where they learn most in fewer than those of their own course
TASKS: dict[str, int | None] = {"digits-cnn": None, "text-mlp": 1500}


def read(path: Path) -> list[PrunedRun]:
    """The runs of a file that this program wrote."""
    return [_run(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def _run(row: dict[str, Any]) -> PrunedRun:
    lists = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    return PrunedRun(**{**lists, "granularity": Granularity.of(row["granularity"])})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", type=Path, help="show the runs of a file instead")
    args = parser.parse_args()
    if args.show is not None:
        found = read(args.show)
    else:
        import torch

        from paceline.train.tasks.pruned import pruned_runs

        torch.set_num_threads(1)
        found = [run for task in args.tasks for run in pruned_runs(task, range(args.seeds), TASKS[task])]
    if args.out is not None:
        args.out.write_text("".join(json.dumps(asdict(run)) + "\n" for run in found), encoding="utf-8")
    for task in dict.fromkeys(run.task for run in found):
        Console(width=110).print(pruned_table([run for run in found if run.task == task]))


if __name__ == "__main__":
    main()
