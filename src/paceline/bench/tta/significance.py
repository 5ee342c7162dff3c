"""Whether two samples of times differ: the exact permutation test of rank sums (Wilcoxon, Mann and Whitney),
with ties and with runs that never reached the target.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import TypeVar

Name = TypeVar("Name")

#: splits that are counted one by one; of more, the normal approximation is taken
_MOST_SPLITS = 200_000


def rank_sum_p(ours: Sequence[float | None], theirs: Sequence[float | None]) -> float:
    """Two-sided probability of ranks as far apart as these if both came from one distribution. None is a run
    that missed its target: later than all that met it, and tied with the others that missed.

    >>> round(rank_sum_p([1.0, 2.0, 3.0, 4.0, 5.0], [6.0, 7.0, 8.0, 9.0, None]), 4)
    0.0079
    >>> rank_sum_p([1.0, 2.0], [1.0, 2.0])
    1.0
    """
    values = [math.inf if one is None else one for one in (*ours, *theirs)]
    ranks = _midranks(values)
    count, own = len(ours), sum(ranks[: len(ours)])
    middle = count * (len(values) + 1) / 2
    apart = abs(own - middle)
    if math.comb(len(values), count) > _MOST_SPLITS:
        from scipy.stats import mannwhitneyu

        return float(mannwhitneyu(values[:count], values[count:], method="asymptotic").pvalue)
    sums = [sum(split) for split in combinations(ranks, count)]
    return sum(abs(one - middle) >= apart - 1e-9 for one in sums) / len(sums)


def _midranks(values: Sequence[float]) -> list[float]:
    """The place of each value in their order; equal values share the mean of their places."""
    ordered = sorted(values)
    return [ordered.index(one) + (ordered.count(one) + 1) / 2 for one in values]


def holm(found: Mapping[Name, float]) -> dict[Name, float]:
    """Probabilities of several tests, each made larger for there being several (Holm 1979).

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.5})
    {'a': 0.03, 'b': 0.08, 'c': 0.5}
    """
    adjusted, least = dict[Name, float](), 0.0
    for place, (name, value) in enumerate(sorted(found.items(), key=lambda pair: pair[1])):
        least = min(1.0, max(least, value * (len(found) - place)))
        adjusted[name] = least
    return {name: adjusted[name] for name in found}


def median_coverage(count: int) -> float:
    """How often the range of so many runs holds the median of all runs there could be.

    >>> median_coverage(5)
    0.9375
    """
    return 1 - 0.5 ** (count - 1)
