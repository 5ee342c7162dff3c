"""Time of matrix products: output tiles in waves over the multiprocessors.

A product (batch, m, n, k) is cut into tiles of tm x tn, and its k into s parts. The best of a fixed
set of tiles and splits is taken, as a library's heuristics would:

    units   = batch * ceil(m/tm) * ceil(n/tn) * s
    waves   = units / SMs, rounded up by the share `quantisation`
    compute = waves * (2 tm tn ceil(k/s) / rate(tile) + tile_s)
    rate    = peak / SMs * efficiency * min(1, intensity(tile) / intensity)^slope
    memory  = bytes / (bandwidth * memory);   cache = units (tm + tn) k/s itemsize / (bandwidth * cache)
    time    = launch + (compute^p + memory^p + cache^p)^(1/p) + reduction of the s partial results

intensity(tile) = tm tn / (tm + tn): small tiles re-read shared memory more often per FLOP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.cost.chip import Chip

Array = NDArray[np.float64]

TILES = np.array(
    [(256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (32, 64), (64, 32)], dtype=float
)
SPLITS = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32], dtype=float)
#: a part of k below this is not worth splitting off
SPLIT_MIN = 128.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixCurve:
    """Fitted constants of one class of product on one architecture; times in seconds, the rest pure
    numbers.
    """

    efficiency: float
    intensity: float
    slope: float
    tile_s: float
    memory: float
    cache: float
    launch_s: float
    split_s: float
    reduction: float
    power: float
    quantisation: float
    #: share of the efficiency left for layouts other than k-contiguous operands ("tn", "nt", "nn")
    layouts: dict[str, float] = field(default_factory=dict)
    #: share left when leading dimensions are multiples of so few elements ("1", "2", "4")
    alignment: dict[str, float] = field(default_factory=dict)


def stacked(curves: Sequence[MatrixCurve], which: NDArray[np.int64]) -> MatrixCurve:
    """One curve whose constants are arrays: for each product those of the curve it belongs to."""
    names = [f.name for f in fields(MatrixCurve) if f.name not in ("layouts", "alignment")]
    table = np.array([[getattr(curve, name) for name in names] for curve in curves])[which].T
    columns: dict[str, Any] = dict(zip(names, table, strict=True))
    return MatrixCurve(**columns)


def matrix_time(
    chip: Chip,
    peak: Array | float,
    curve: MatrixCurve,
    *,
    batch: Array,
    m: Array,
    n: Array,
    k: Array,
    traffic: Array,
    itemsize: Array | float,
    share: Array | float = 1.0,
    tiles: Array = TILES,
    splits: Array = SPLITS,
    stored: Array | float = 1.0,
) -> Array:
    """Seconds of each product; `traffic` is the bytes it must move, `share` scales its efficiency. Peak and
    constants may differ by product. `tiles` and `splits` are those that the library has kernels for, `stored`
    is the share of the k x n operand's bytes that its tiles read.
    """
    c = {
        f.name: np.asarray(getattr(curve, f.name))[..., None, None]
        for f in fields(curve)
        if f.name not in ("layouts", "alignment")
    }
    peak = np.asarray(peak)[..., None, None]
    batch, m, n, k, traffic = (np.asarray(v, dtype=float)[:, None, None] for v in (batch, m, n, k, traffic))
    itemsize, share, stored = (
        np.broadcast_to(np.asarray(v, dtype=float), batch.shape[:1])[:, None, None]
        for v in (itemsize, share, stored)
    )
    tm, tn = tiles[:, 0][None, :, None], tiles[:, 1][None, :, None]
    splits = splits[None, None, :]
    step = 128.0 / itemsize  # k advances by 128 bytes
    part = np.ceil(k / splits / step) * step
    units = batch * np.ceil(m / tm) * np.ceil(n / tn) * splits
    filled = np.maximum(1.0, units / chip.sms)
    waves = filled + (np.ceil(units / chip.sms) - filled) * c["quantisation"]
    tile = np.minimum(1.0, tm * tn / (tm + tn) / c["intensity"]) ** c["slope"]
    rate = peak / chip.sms * c["efficiency"] * tile * share
    compute = waves * (2 * tm * tn * part / rate + c["tile_s"])
    memory = traffic / (chip.bandwidth * c["memory"])
    cache = units * (tm + stored * tn) * part * itemsize / (chip.bandwidth * c["cache"])
    p = c["power"]
    body = (compute**p + memory**p + cache**p) ** (1 / p)
    reduction = np.where(
        splits > 1, splits * batch * m * n * 8 / (chip.bandwidth * c["reduction"]) + c["split_s"], 0.0
    )
    total = np.where((part >= SPLIT_MIN) | (splits == 1), body + reduction, np.inf)
    return np.asarray(curve.launch_s + total.min(axis=(1, 2)))
