"""Headline results of papers beside our predictions, with errors and what we know about them, as a Markdown
table.

    python benchmarks/literature.py [DATA]
"""

from __future__ import annotations

import sys
from pathlib import Path

import paceline.bench
from paceline.bench.validate.literature import literature, why


def main() -> None:
    """Prints the table; rows that cannot be predicted with the reason."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(paceline.bench.__path__[0]) / "data"
    print(
        "| result | metric | published | predicted (90 %) | error | remarks |\n|---|---|---:|---:|---:|---|"
    )
    for case in literature(folder, False) or ():
        if case.predict is None:
            print(f"| {case.name} | | | | | not predicted: {case.skip} |")
            continue
        for metric, answer in case.predict().items():
            if metric in case.measured:
                published = case.measured[metric]
                error = 100 * (answer.value / published - 1)
                print(
                    f"| {case.name} | {metric} | {published:.4g} | {answer.value:.3g} ({answer.low:.3g} to"
                    f" {answer.high:.3g}) | {error:+.0f} % | {why(case.name) if abs(error) > 10 else ''} |"
                )


if __name__ == "__main__":
    main()
