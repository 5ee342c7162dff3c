"""Times to accuracy of docs/benchmarks.md: python benchmarks/time_to_accuracy.py [--folder tta] [--known]
[--print]

Runs what `paceline bench tta` runs by default (two ranks on two cores: 26 minutes beside other work),
keeps the runs in measurements/time_to_accuracy.jsonl.gz and the records of learning beside it, and writes the
table between the markers of docs/benchmarks.md. A table that was interrupted goes on with the same --folder;
`--known` makes it from the runs that are kept, `--print` leaves the document as it is.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

from document import DOCS, fill

from paceline.bench import tta
from paceline.bench.tta import expected, view
from paceline.bench.tta.measure import RAW, lines, measure

KEPT = Path(__file__).parents[1] / "measurements" / "time_to_accuracy.jsonl.gz"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("tta"))
    parser.add_argument("--known", action="store_true")
    parser.add_argument("--print", action="store_true")
    chosen = parser.parse_args()
    field = tta.field_of()
    found = lines(KEPT) if chosen.known else measure(field, chosen.folder)
    table = tta.table_of(field, found)
    text = view.markdown(table)
    print(text)
    if not chosen.known:
        KEPT.write_bytes(gzip.compress((chosen.folder / RAW).read_bytes(), mtime=0))
    for task in table.rules:
        record = expected.learning(table, task, found)
        if record is not None:
            (KEPT.parent / tta.LEARNING.format(task=task)).write_text(record.to_toml(), encoding="utf-8")
    if not chosen.print:
        fill(DOCS / "benchmarks.md", "time to accuracy", text)


if __name__ == "__main__":
    main()
