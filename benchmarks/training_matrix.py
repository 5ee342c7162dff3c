"""The matrix of scripts and strategies in docs/training.md, from what the test of it runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests" / "train" / "matrix"


def matrix(chosen: argparse.Namespace) -> str:
    """The table, and what is said where a script is refused; ends where a cell fails."""
    sys.path.insert(0, str(TESTS))
    from matrix import CELLS, outcomes, table  # type: ignore[import-not-found]

    found = outcomes(CELLS)
    failed = [
        f"{strategy} {script}: {why}"
        for (strategy, script), (outcome, why) in found.items()
        if outcome == "failed"
    ]
    if failed:
        raise SystemExit("\n".join(["cells that fail:", *failed]))
    return str(table(found))
