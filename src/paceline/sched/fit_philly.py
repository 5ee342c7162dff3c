"""The statistics of the Philly trace that the generator draws from.

    python -m paceline.sched.fit_philly philly.csv.gz > src/paceline/sched/philly.toml

Sizes: the share of jobs by devices. Lengths: quantiles by devices. Tenants: the share of jobs by virtual
cluster. Arrivals: quantiles of the gaps, the rank correlation of one gap with the
next (they come in bursts), and how many arrive at each hour of the day.
"""

from __future__ import annotations

import sys
from collections import Counter
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.spec.tables import csv_rows

#: shares at which quantiles are kept: closer at the ends, where the tail is
SHARES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0)
#: sizes whose lengths are kept apart, each up to the next
CLASSES = (1, 2, 4, 8, 16)


def _list(values: NDArray[np.float64]) -> str:
    return "[" + ", ".join(f"{value:.6g}" for value in values) + "]"


def main(path: Path) -> None:
    rows = csv_rows(path, ("timestamp", "duration", "num_gpus", "cluster"))
    times = np.sort([datetime.fromisoformat(row["timestamp"]).timestamp() for row in rows])
    hours = Counter(datetime.fromisoformat(row["timestamp"]).hour for row in rows)
    sizes = np.array([int(row["num_gpus"]) for row in rows])
    lengths = np.array([max(1.0, float(row["duration"])) for row in rows])
    gaps = np.diff(times)
    gaps = gaps[gaps < 6 * 3600]  # longer ones are holes in the record
    ranks = np.argsort(np.argsort(gaps)) / len(gaps)
    print(
        "# Statistics of the Philly trace (Jeon et al., ATC 2019; CC-BY-4.0), by paceline.sched.fit_philly;"
        " times in seconds"
    )
    print(f"shares = {_list(np.array(SHARES))}")
    print(f"gaps = {_list(np.maximum(np.quantile(gaps, SHARES), 0.5))}")
    print(f"gap_mean = {gaps.mean():.6g}")
    print(f"gap_correlation = {np.corrcoef(ranks[1:], ranks[:-1])[0, 1]:.3f}")
    print(f"hours = {_list(np.array([hours[h] / len(rows) * 24 for h in range(24)]))}")
    print("\n[sizes]  # share of jobs by devices")
    for size, count in sorted(Counter(sizes.tolist()).items()):
        print(f"{size} = {count / len(rows):.6f}")
    print("\n[tenants]  # share of jobs by virtual cluster, the largest first")
    for i, (_, count) in enumerate(Counter(row["cluster"] for row in rows).most_common(10)):
        print(f"vc{i} = {count / len(rows):.6f}")
    for low, high in zip(CLASSES, [*CLASSES[1:], 10**6], strict=True):
        inside = lengths[(sizes >= low) & (sizes < high)]
        print(f"\n[lengths.{low}]  # {len(inside)} jobs")
        print(f"quantiles = {_list(np.quantile(inside, SHARES))}\nmean = {inside.mean():.6g}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
