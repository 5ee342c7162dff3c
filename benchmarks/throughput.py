"""Tables of docs/asynchronous.md on throughput against workers: python benchmarks/throughput.py [--only
curves,staleness] [--print]

curves      both models and two guesses on the measured set, 3 to 8 workers from a profile of one and two
uneven      the same where one worker is slow
overlap     the same where parts of an update are sent during the backward pass
staleness   throughput and staleness of four asynchronous workers
pollux      the synchronous model on measurements of others (PACELINE_DATA)
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

from document import DOCS, fill

from paceline.bench.throughput import score

PARTS = {
    "curves": score.measured,
    "uneven": lambda: score.measured(kind="uneven"),
    "overlap": lambda: score.measured(kind="overlap"),
    "staleness": score.staleness,
    "pollux": score.pollux,
}


def markdown(cells: Iterator[tuple[str, ...]]) -> str:
    """A table; numbers to the right."""
    head, *rows = cells
    line = ["---" if i < 2 else "---:" for i in range(len(head))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, line, *rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--print", action="store_true", help="print, and leave the document as it is")
    chosen = parser.parse_args()
    for part in chosen.only.split(","):
        if part == "pollux" and "PACELINE_DATA" not in os.environ:
            print("pollux: left out, PACELINE_DATA does not say where the measurements are")
            continue
        found = PARTS[part]()
        if not found.rows:
            print(f"{part}: the set has no such runs")
            continue
        text = markdown(found.cells())
        print(text, flush=True)
        if not chosen.print:
            fill(DOCS / "asynchronous.md", part, text)


if __name__ == "__main__":
    main()
