"""Least squares in a few lines: models here have a handful of parameters and no derivative worth writing
down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def least_squares(
    residuals: Callable[[Vector], Vector],
    start: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    robust: float | None = None,
) -> tuple[Vector, float]:
    """Parameters within [low, high] with the least sum of squares of `residuals`, and that sum:
    Levenberg-Marquardt, steps clipped to the box.

    `robust` is the size above which a residual counts by its magnitude and no longer by its square (soft L1).
    """
    lower, upper = np.asarray(low, float), np.asarray(high, float)
    x = np.clip(np.asarray(start, float), lower, upper)
    r = residuals(x)
    best, damping = _loss(r, robust), 1e-2
    for _ in range(200):
        weight = np.ones_like(r) if robust is None else (1 + (r / robust) ** 2) ** -0.25
        jacobian = _jacobian(residuals, x, r, upper) * weight[:, None]
        gradient, curvature = jacobian.T @ (r * weight), jacobian.T @ jacobian
        for _ in range(12):
            step = np.linalg.lstsq(
                curvature + damping * (np.diag(np.diag(curvature)) + 1e-12 * np.eye(x.size)),
                -gradient,
                rcond=None,
            )[0]
            trial = np.clip(x + step, lower, upper)
            tried = residuals(trial)
            loss = _loss(tried, robust)
            if loss < best:
                break
            damping *= 4
        else:
            return x, best
        done = best - loss < 1e-10 * best + 1e-300
        x, r, best, damping = trial, tried, loss, max(damping / 6, 1e-12)
        if done:
            break
    return x, best


def _loss(r: Vector, robust: float | None) -> float:
    if not np.all(np.isfinite(r)):
        return float("inf")
    return (
        float(r @ r) if robust is None else float(2 * robust**2 * np.sum(np.sqrt(1 + (r / robust) ** 2) - 1))
    )


def _jacobian(residuals: Callable[[Vector], Vector], x: Vector, r: Vector, upper: Vector) -> Vector:
    columns = []
    for i in range(x.size):
        width = 1e-6 * max(1.0, abs(x[i]))
        moved = x.copy()
        moved[i] += width if x[i] + width <= upper[i] else -width
        columns.append((residuals(moved) - r) / (moved[i] - x[i]))
    return np.stack(columns, axis=1)


def nonnegative(matrix: Vector, target: Vector) -> Vector:
    """x >= 0 with the least |matrix x - target|: the active-set method of Lawson and Hanson."""
    count = matrix.shape[1]
    x, free = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(6 * count):
        gain = matrix.T @ (target - matrix @ x)
        if free.all() or gain[~free].max(initial=0.0) <= 1e-12 * max(
            1.0, float(np.abs(matrix.T @ target).max())
        ):
            break
        free[int(np.argmax(np.where(free, -np.inf, gain)))] = True
        while True:
            trial = np.zeros(count)
            trial[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            if trial[free].min(initial=np.inf) > 0:
                break
            back = free & (trial <= 0)
            ratio = np.full(count, np.inf)
            ratio[back] = x[back] / np.maximum(x[back] - trial[back], 1e-300)
            x = x + ratio.min() * (trial - x)
            free &= x > 1e-14 * max(1.0, float(np.abs(x).max()))
            x[~free] = 0.0
            if not free.any():
                break
        x = np.where(free, trial, 0.0)
    return x
