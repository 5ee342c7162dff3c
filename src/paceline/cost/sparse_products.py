"""Seconds of matrix products with zeros that the hardware skips: 2:4 weights, or any zeros on a device that
can.

2:4 is the dense product (`matrix_time`, with the fitted curve of dense products) at `rate` times the peak,
reading half of the weights and two bits for each one kept; activations and the result are as large as ever:

    stored = 1/2 + 1/8 / itemsize
    bytes  = bytes(x) + bytes(y) + stored bytes(w)
    time   = matrix_time(rate peak, share efficiency, stored, bytes / memory)

The reduction is not split (so torch calls cuSPARSELt) and tiles are large (chosen with the fit). Two
constants are fitted (`python -m paceline.bench.fit.two_four`): `efficiency`, the share of the dense
efficiency that is left at the higher peak, and `memory`, the share of the rate at which memory is read.

A device that skips single zeros finds a share of them: of the multiply-adds with a zero in operand i, the
share `skips` takes no time, and tensors are stored with a bitmap where that is smaller:

    time = matrix_time(share / product of (1 - skips_i zeros_i), bytes_i min(1, 1 - zeros_i + 1/8 / itemsize))
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from paceline.cost.chip import Chip
from paceline.cost.curves import Curves
from paceline.cost.index_overhead import TWO_FOUR_BITS
from paceline.cost.matrix import SPLITS, TILES, MatrixCurve, matrix_time
from paceline.cost.operators import dtype_of
from paceline.cost.pack import MOST_ALIGNED, MatrixEntries, pack_ops
from paceline.spec.workload import ITEMSIZE, Op

Array = NDArray[np.float64]

#: columns of products that their time is computed from
_SIZES = ("batch", "m", "n", "k", "traffic", "itemsize")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSet:
    """Tiles, and splits of the reduction, that a library has kernels for."""

    tiles: Array
    splits: Array


DENSE_KERNELS = KernelSet(tiles=TILES, splits=SPLITS)
TWO_FOUR_KERNELS = KernelSet(tiles=TILES[TILES.min(axis=1) >= 128], splits=np.ones(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoFourCurve:
    """Constants of 2:4 products beside those of dense ones, and the standard deviation of the logarithm of
    the gains of shapes that were left out of the fit.
    """

    efficiency: float
    memory: float
    sigma: float
    source: str
    device: str


@cache
def two_four_curve() -> TwoFourCurve:
    """The constants that ship."""
    text = (files("paceline.cost") / "fitted" / "two_four.toml").read_text()
    return TwoFourCurve(**tomllib.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroOperand:
    """What a device makes of the zeros of one operand of a product: its bytes, the share that is zero, and
    the share of the multiply-adds with such a zero that take no time.
    """

    bytes: float
    zeros: float
    skips: float

    @property
    def left(self) -> float:
        """Share of the multiply-adds that remain."""
        return 1 - self.skips * self.zeros

    def stored(self, itemsize: float) -> float:
        """Bytes with a bitmap, where the device skips zeros and that is smaller."""
        if not self.skips:
            return self.bytes
        return self.bytes * min(1.0, 1 - self.zeros + 0.125 / itemsize)


def dense_seconds(ops: Sequence[Op], chip: Chip, curves: Curves) -> Array:
    """Seconds of each product or convolution as it is, at the boost clock."""
    if not ops:
        return np.zeros(0)
    return _Products.of(ops, chip, curves).seconds()


def two_four_seconds(
    ops: Sequence[Op], chip: Chip, curves: Curves, rate: float, curve: TwoFourCurve | None = None
) -> Array:
    """Seconds of products (kind "gemm") whose n x k operand is pruned 2:4."""
    if not ops:
        return np.zeros(0)
    fitted = curve or two_four_curve()
    products = _Products.of(ops, chip, curves)
    entries = products.entries
    weights = entries.batch * entries.n * entries.k * entries.itemsize
    stored = 0.5 + 0.5 * TWO_FOUR_BITS / 8 / entries.itemsize
    traffic = np.maximum(entries.traffic - (1 - stored) * weights, 0.0)
    return products.seconds(
        peak=rate,
        share=fitted.efficiency,
        traffic=traffic / fitted.memory,
        kernels=TWO_FOUR_KERNELS,
        stored=stored,
    )


def skipping_seconds(
    ops: Sequence[Op], operands: Sequence[Sequence[ZeroOperand]], chip: Chip, curves: Curves
) -> Array:
    """Seconds of products on a device that skips zeros; `operands` are those of each product."""
    if not ops:
        return np.zeros(0)
    products = _Products.of(ops, chip, curves)
    left = np.array([np.prod([one.left for one in mine]) for mine in operands])
    sizes = [ITEMSIZE.get(op.dtype, 4) for op in ops]
    spared = np.array(
        [
            sum(one.bytes - one.stored(size) for one in mine)
            for mine, size in zip(operands, sizes, strict=True)
        ]
    )
    owner = products.entries.owner
    traffic = np.maximum(products.entries.traffic - spared[owner], 0.0)
    return products.seconds(share=1 / np.maximum(left[owner], 1e-6), traffic=traffic)


@dataclass(frozen=True, slots=True)
class _Products:
    """Products and implicit products of some operators, ready to be timed with changes."""

    size: int
    entries: MatrixEntries
    chip: Chip
    curves: Curves
    groups: tuple[str, ...]

    @staticmethod
    def of(ops: Sequence[Op], chip: Chip, curves: Curves) -> _Products:
        packed = pack_ops(ops)
        groups, entries = packed.products
        return _Products(packed.size, entries, chip, curves, tuple(groups.words()))

    def seconds(
        self,
        peak: float = 1.0,
        share: Array | float = 1.0,
        traffic: Array | None = None,
        kernels: KernelSet = DENSE_KERNELS,
        stored: Array | float = 1.0,
    ) -> Array:
        """Seconds of each operator at a multiple of the peak and of the efficiency."""
        e = self.entries if traffic is None else replace(self.entries, traffic=traffic)
        shares, held = (np.broadcast_to(np.asarray(v, dtype=float), e.owner.shape) for v in (share, stored))
        found = np.zeros(self.size)
        for group in dict.fromkeys(self.groups):
            mine = np.array([name == group for name in self.groups])
            curve = self.curves.matrix_curve(group)
            each = matrix_time(
                self.chip,
                peak * self.chip.peaks[dtype_of(group, self.chip)],
                curve,
                **{name: getattr(e, name)[mine] for name in _SIZES},
                share=self._laid_out(curve, mine) * shares[mine],
                tiles=kernels.tiles,
                splits=kernels.splits,
                stored=held[mine],
            )
            np.add.at(found, e.owner[mine], each * e.count[mine] * self.curves.scale_of(group))
        return found

    def _laid_out(self, curve: MatrixCurve, mine: NDArray[np.bool_]) -> Array:
        """Share of the efficiency that layout and alignment leave."""
        layouts = [curve.layouts.get(word, 1.0) for word in self.entries.layout.take(mine).words()]
        aligned = [curve.alignment.get(str(min(a, MOST_ALIGNED)), 1.0) for a in self.entries.align[mine]]
        return np.asarray(np.array(layouts) * np.array(aligned))
