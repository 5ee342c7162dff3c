"""Barriers: what the slowest of several takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


@lru_cache(maxsize=4096)
def slowest_normal(count: int, spare: int = 0) -> float:
    """E[largest of `count` standard normal variables but for the `spare` largest], by quadrature of z times
    the density of that order statistic.

    >>> [round(slowest_normal(n), 3) for n in (1, 2, 3, 10)]
    [0.0, 0.564, 0.846, 1.539]
    >>> round(slowest_normal(3, spare=1), 3)
    0.0
    """
    z, cdf, density = _normal()
    inside = (cdf > 0) & (cdf < 1)
    z, cdf, density = z[inside], cdf[inside], density[inside]
    orders = math.lgamma(count + 1) - math.lgamma(count - spare) - math.lgamma(spare + 1)
    chance = np.exp(orders + (count - spare - 1) * np.log(cdf) + spare * np.log1p(-cdf))
    # what is below 1e-9 is rounding
    return round(float(np.sum(z * chance * density) * (z[1] - z[0])), 9) + 0.0


@lru_cache(maxsize=1)
def _normal() -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    z = np.linspace(-9.0, 9.0, 3601)
    cdf = np.array([0.5 * (1 + math.erf(x / math.sqrt(2))) for x in z])
    return z, cdf, np.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def kth_of(groups: Sequence[Sequence[float] | NDArray[np.float64]], k: int) -> float:
    """E[k-th smallest of one draw from each of `groups`]: a round that ends when k of the workers are done
    (`k = len(groups)`: all).

    The chance that at least k of the draws are within x comes from the Poisson binomial recursion over
    groups.
    """
    values = np.unique(np.concatenate([np.asarray(group, dtype=np.float64) for group in groups]))
    # row j: the chance that exactly j of those seen so far are within x
    done = np.zeros((len(groups) + 1, values.size))
    done[0] = 1.0
    for group in groups:
        within = _within(group, values)
        done[1:] = done[1:] * (1 - within) + done[:-1] * within
        done[0] *= 1 - within
    cdf = done[k:].sum(axis=0)
    return float(np.sum(values * np.diff(cdf, prepend=0.0)))


def slowest_by_count(
    usual: Sequence[float] | NDArray[np.float64],
    slow: Sequence[float] | NDArray[np.float64],
    slow_count: int,
    most: int,
) -> NDArray[np.float64]:
    """E[largest of n draws] for n = 1..`most` at once, of which `slow_count` (fewer than n) are from `slow`
    and the others from `usual`.

    >>> slowest_by_count([1.0, 2.0], [], 0, 2).tolist()
    [1.5, 1.75]
    """
    values = np.unique(
        np.concatenate([np.asarray(usual, dtype=np.float64), np.asarray(slow, dtype=np.float64)])
    )
    n = np.arange(1, most + 1)[:, None]
    late = np.minimum(slow_count, n - 1)
    cdf = _within(usual, values) ** (n - late) * (_within(slow, values) ** late if len(slow) else 1.0)
    return np.asarray(np.diff(cdf, prepend=0.0, axis=1) @ values)


def _within(
    samples: Sequence[float] | NDArray[np.float64], values: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The share of samples that are at most each value."""
    return np.asarray(
        np.searchsorted(np.sort(np.asarray(samples, dtype=np.float64)), values, side="right") / len(samples)
    )
