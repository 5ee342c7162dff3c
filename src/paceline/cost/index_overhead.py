"""Bits that say where the kept values of a sparse tensor are, by form of storage.

A tensor of `units` units (single values, vectors, kernels, filters or blocks of `size` values each) keeps
`kept` of them, a share d = kept / units:

    bitmap        one bit per unit                                units
    run length    b bits per entry: the units left out before it  b (kept + fillers)
    CSR           a column per kept unit, an offset per row       kept L(columns) + (rows + 1) L(kept + 1)
    2:4           which two of four                               2 bits per kept value

L(n) = ceil(log2 n). A run longer than 2^b - 1 needs entries that stand for a unit of zeros, with its values
stored (Han et al., EIE, ISCA 2016): with units kept at random, q^R / (1 - q^R) of them per kept unit, where
q = 1 - d and R = 2^b.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.spec.sparsity import Granularity

#: of 2:4: each kept value has one of four places
TWO_FOUR_BITS = 2
#: values of a vector along the inputs, and sides of a square block
VECTOR, BLOCK = 8, 8
#: bits of an entry of a run-length code that are tried
_RUN_BITS = range(1, 17)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLayout:
    """A matrix of units, how many of them are kept, and how many values of so many bits each of them has."""

    rows: int
    columns: int
    kept: int
    size: int = 1
    value_bits: int = 16

    @property
    def units(self) -> int:
        return self.rows * self.columns

    @property
    def density(self) -> float:
        return self.kept / self.units

    @property
    def dense_bits(self) -> float:
        """Bits of the tensor with all of its values."""
        return float(self.units * self.size * self.value_bits)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredForm:
    """Bits of the places and of the values of a tensor in one form of storage."""

    form: str
    index_bits: float
    #: values that are stored: those kept, and zeros that a form has to store
    values: float
    value_bits: int

    @property
    def bits(self) -> float:
        return self.index_bits + self.values * self.value_bits


def unit_shape(granularity: Granularity, outputs: int, inputs: int, points: int) -> tuple[int, int]:
    """Rows and columns of a unit in the weights of a layer, which have a row per output with `inputs` values,
    those of one kernel (`points`) next to each other.
    """
    return {
        Granularity.ELEMENT: (1, 1),
        Granularity.TWO_FOUR: (1, 1),
        Granularity.VECTOR: (1, min(VECTOR, inputs)),
        Granularity.KERNEL: (1, points),
        Granularity.BLOCK: (min(BLOCK, outputs), min(BLOCK, inputs)),
        Granularity.FILTER: (1, inputs),
    }[granularity]


def levels(count: int) -> int:
    """Bits that tell `count` things apart."""
    return max(0, math.ceil(math.log2(count))) if count > 0 else 0


def bitmap(layout: SparseLayout) -> StoredForm:
    """One bit per unit."""
    return _form("bitmap", layout, float(layout.units))


def run_length(layout: SparseLayout, bits: int | None = None) -> StoredForm:
    """Runs in entries of `bits` bits; by default as many as make the tensor smallest, kept at random."""
    tried = [bits] if bits is not None else list(_RUN_BITS)
    return min((_runs(layout, width) for width in tried), key=lambda form: form.bits)


def _runs(layout: SparseLayout, bits: int) -> StoredForm:
    entries = layout.kept * (1 + run_fillers(layout.density, bits))
    return StoredForm(
        form=f"run length, {bits} bit",
        index_bits=entries * bits,
        values=entries * layout.size,
        value_bits=layout.value_bits,
    )


def run_fillers(density: float, bits: int) -> float:
    """Expected entries that only bridge long runs, per kept unit.

    >>> run_fillers(0.5, 1)
    0.3333333333333333
    """
    missed = (1 - density) ** (1 << bits)
    return missed / (1 - missed) if missed < 1 else 0.0


def csr(layout: SparseLayout) -> StoredForm:
    """Compressed rows; of blocks, this is BSR."""
    offsets = (layout.rows + 1) * levels(layout.kept + 1)
    return _form("CSR", layout, float(layout.kept * levels(layout.columns) + offsets))


def two_four(layout: SparseLayout) -> StoredForm:
    """Two bits per kept value."""
    return _form("2:4", layout, float(TWO_FOUR_BITS * layout.kept * layout.size))


def _form(name: str, layout: SparseLayout, index_bits: float) -> StoredForm:
    return StoredForm(
        form=name,
        index_bits=index_bits,
        values=float(layout.kept * layout.size),
        value_bits=layout.value_bits,
    )


def forms(layout: SparseLayout, *, structured: bool = False) -> tuple[StoredForm, ...]:
    """Every form that stores a layout; 2:4 has its own besides."""
    general = (bitmap(layout), run_length(layout), csr(layout))
    return (two_four(layout), *general) if structured else general
