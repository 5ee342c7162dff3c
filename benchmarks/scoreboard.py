"""Write the accuracy table of the README and of docs/accuracy.md again.

    python benchmarks/scoreboard.py [--data DIR] [SET ...]

Without sets: all that the folder holds, which takes a quarter of an hour where it holds everything. Rows of
sets that are not run stay as they are.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from paceline.bench.validate import run
from paceline.bench.validate.score import Score

ROOT = Path(__file__).parents[1]
#: file -> the metrics it shows; None for all
FILES = {
    ROOT / "README.md": ("step_s", "kernel_s", "peak_bytes", "step_multi_s", "busbw"),
    ROOT / "docs" / "accuracy.md": None,
}
HEAD = (
    "| set | metric | rows | skipped | mean error | median | inside the 90 % interval | naive mean |",
    "|---|---|---:|---:|---:|---:|---:|---:|",
)


def line(score: Score, mark: str) -> str:
    return (
        f"| {score.set}{mark} | `{score.metric}` | {score.rows} | {sum(score.skipped.values())} |"
        f" {score.mean_abs_pct:.1f} % | {score.median_abs_pct:.1f} % | {score.coverage_pct:.0f} % |"
        f" {score.naive_mean_abs_pct:.0f} % |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sets", nargs="*")
    parser.add_argument("--data", type=Path, default=os.environ.get("PACELINE_DATA"))
    args = parser.parse_args()
    data = Path(args.data) if args.data else None
    rows: dict[str, str] = {}
    for leave_out, mark in ((False, ""), (True, ", device left out")):
        names = [s for s in args.sets if not leave_out or s in ("kernels", "neusight_fp32_training")]
        if leave_out and not names:
            if args.sets or not data:
                continue
            names = ["kernels", "neusight_fp32_training"]
        for score in run(names, data, leave_out_device=leave_out):
            rows[f"| {score.set}{mark} | `{score.metric}` |"] = line(score, mark)
            print(line(score, mark), flush=True)
    for path, metrics in FILES.items():
        page = path.read_text()
        found = re.search(r"<!-- accuracy -->\n(.*?)<!-- /accuracy -->", page, re.DOTALL)
        if found is None:
            continue
        kept = {
            " | ".join(old.split(" | ")[:2]) + " |": old
            for old in found[1].splitlines()[2:]
            if old.startswith("|")
        }
        chosen = [
            text for key, text in {**kept, **rows}.items() if metrics is None or key.split("`")[1] in metrics
        ]
        table = "\n".join([*HEAD, *chosen])
        path.write_text(page.replace(found[0], f"<!-- accuracy -->\n{table}\n<!-- /accuracy -->"))


if __name__ == "__main__":
    main()
