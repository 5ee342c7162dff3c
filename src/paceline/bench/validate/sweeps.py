"""How well predictions tell plans apart: rows that differ only in their plan form a sweep."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: rows of a sweep from which on the order of its plans says something
LEAST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweeps:
    """Order of plans by predicted against measured time, averaged over sweeps.

    `regret_pct` is by how much the plan with the least predicted time was slower, when measured, than the
    fastest of its sweep: what choosing by prediction would have cost.
    """

    count: int
    rows: int
    #: rank correlation (Spearman) of sweeps of three rows and more; NaN without any
    rank_correlation: float
    regret_pct: float
    worst_regret_pct: float


def summary(rows: Iterable[tuple[str, float, float]]) -> Sweeps | None:
    """Of rows (sweep, measured, predicted), those of no sweep left out; None where no sweep has two rows."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for sweep, measured, predicted in rows:
        if sweep:
            found[sweep].append((measured, predicted))
    pairs = [np.array(sweep) for sweep in found.values() if len(sweep) > 1]
    if not pairs:
        return None
    regrets = [100 * float(pair[pair[:, 1].argmin(), 0] / pair[:, 0].min() - 1) for pair in pairs]
    orders = [spearman(pair[:, 0], pair[:, 1]) for pair in pairs if len(pair) >= LEAST]
    return Sweeps(
        count=len(pairs),
        rows=sum(map(len, pairs)),
        rank_correlation=float(np.mean(orders)) if orders else float("nan"),
        regret_pct=float(np.mean(regrets)),
        worst_regret_pct=max(regrets),
    )


def spearman(a: Array, b: Array) -> float:
    """Rank correlation; equal values share the mean of their ranks. 0 where all of one side are equal."""
    ranks = np.array([_ranks(a), _ranks(b)])
    if (ranks.std(axis=1) == 0).any():
        return 0.0
    return float(np.corrcoef(ranks)[0, 1])


def _ranks(values: Array) -> Array:
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray(last[group] - (counts[group] - 1) / 2, dtype=np.float64)
