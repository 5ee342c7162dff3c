"""How far the closed form and the simulation are apart, on random plans that can run.

python benchmarks/agreement.py [COUNT]
"""

from __future__ import annotations

import statistics
import sys

from paceline.bench.agreement import compare


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    pairs = sorted(compare(count), key=lambda pair: -abs(pair.difference))
    apart = sorted(abs(pair.difference) for pair in pairs)
    print(
        f"{count} plans: median {100 * statistics.median(apart):.2f} %, p90"
        f" {100 * apart[int(0.9 * count)]:.2f} %, p99 {100 * apart[int(0.99 * count)]:.2f} %, most"
        f" {100 * apart[-1]:.2f} %, mean with sign"
        f" {100 * statistics.mean(pair.difference for pair in pairs):+.2f} %"
    )
    for pair in pairs[:15]:
        print(
            f"{100 * pair.difference:+6.1f} %  {pair.closed_s:9.4f} s  {pair.simulated_s:9.4f} s "
            f" {pair.model} on {pair.cluster}: {pair.plan}"
        )


if __name__ == "__main__":
    main()
