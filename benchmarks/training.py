"""Figures of docs/training.md, measured here: python benchmarks/training.py [--only steps,accuracy,faults]
[--jobs 8] [--quick]

steps       seconds per step under each strategy on emulated links, predicted and measured (needs root on
Linux, and pyroute2) recipe      learning rates and epochs of the tasks, with float32 on seeds that are not
reported accuracy    mean accuracy over seeds of each strategy on every task, against float32 seed by seed
large       LARS and SGD at a large batch faults      a rank killed with -9 at random moments: the final loss
against that of a run that was left alone matrix      scripts as people write them under every strategy: what
comes of each (tests/train/matrix) replicas    every strategy, 1, 3 and 20 buckets, 2 to 4 ranks, 100 steps,
20 times in a row: no hang, replicas identical

Writes the tables between the markers of docs/training.md.
"""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path

import replicas
import training_matrix
import training_runs
import training_steps
from document import DOCS, fill

RUNS = {
    "steps": training_steps.steps,
    "recipe": training_runs.recipe,
    "accuracy": training_runs.accuracy,
    "large": training_runs.large,
    "faults": training_runs.faults,
    "replicas": replicas.replicas,
    "matrix": training_matrix.matrix,
}
PARTS = tuple(RUNS)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="groups of two ranks at a time"
    )
    parser.add_argument("--tasks", default="digits-cnn,digits-deep,text-mlp", help="for recipe and accuracy")
    parser.add_argument(
        "--alone",
        action="store_true",
        help="for recipe, accuracy and large: one process acts out the ranks of a run",
    )
    parser.add_argument("--known", action="store_true", help="tables of what --raw holds, nothing run")
    parser.add_argument("--times", type=int, default=20, help="for replicas")
    parser.add_argument("--worlds", default="2,3,4", help="for replicas: numbers of ranks, side by side")
    parser.add_argument(
        "--shares",
        type=int,
        default=1,
        help="for replicas: groups of processes that share the strategies of each world",
    )
    parser.add_argument(
        "--budget-s", type=float, default=550.0, help="for replicas: no further round after so many seconds"
    )
    parser.add_argument(
        "--raw",
        type=Path,
        help="file of JSON lines to which runs are appended, and whose runs are not done again",
    )
    parser.add_argument(
        "--rows",
        type=Path,
        nargs="+",
        help="for steps: files of lines that were measured before (--raw), to make the tables of",
    )
    parser.add_argument(
        "--place",
        nargs="+",
        help="for steps: these only, such as cnn:4:100Mbit/s,unshaped, one after another on the cores given",
    )
    parser.add_argument("--rounds", type=int, default=6, help="for steps with --place")
    parser.add_argument(
        "--limit", type=float, default=3600.0, help="seconds for steps: what does not fit is left out"
    )
    parser.add_argument("--print", action="store_true", help="print, and leave the document as it is")
    chosen = parser.parse_args()
    for part in chosen.only.split(","):
        text = RUNS[part](chosen)
        # measured elsewhere, which it says, or not measured
        if part not in ("steps", "matrix") and not chosen.known:
            text += (
                f"\n\n{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python"
                f" {platform.python_version()}."
            )
        print(text, flush=True)
        if not chosen.print:
            fill(DOCS / "training.md", part, text)


if __name__ == "__main__":
    main()
