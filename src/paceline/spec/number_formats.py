"""Number formats that training uses: what they round to zero, to infinity, and how finely they round between.

Values halfway between two numbers round to the even one. Block formats share one power of two among
neighbours, chosen from the largest of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import UnknownName


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormat:
    """A binary floating-point format with subnormal numbers."""

    name: str
    mantissa_bits: int
    #: exponent of the smallest normal number
    least_exponent: int
    #: largest finite number
    largest: float
    #: what is too large becomes the largest number rather than infinity
    saturates: bool = False

    @property
    def vanishing_exponent(self) -> int:
        """Magnitudes up to two to this power round to zero."""
        return self.least_exponent - self.mantissa_bits - 1

    @property
    def largest_exponent(self) -> int:
        """Exponent of the largest finite number."""
        return math.frexp(self.largest)[1] - 1

    @property
    def overflow_edge(self) -> float:
        """The smallest magnitude (a float64) that rounds beyond the largest number."""
        step = 2.0 ** (self.largest_exponent - self.mantissa_bits)
        edge = self.largest + step / 2
        odd = self.largest / step % 2 == 1  # a tie goes to the even neighbour, which is then beyond
        return edge if odd else math.nextafter(edge, math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """Elements of a format and a power of two per block, which brings the block's largest value into the
    top octave of the elements.
    """

    name: str
    element: NumberFormat
    #: consecutive elements that share a scale; None: all of a tensor
    block: int | None

    @property
    def vanishing_gap(self) -> int:
        """With floor(log2) of the block's largest value F: magnitudes up to 2**(F - gap) round to zero."""
        return self.element.largest_exponent - self.element.vanishing_exponent


FP32 = NumberFormat(name="fp32", mantissa_bits=23, least_exponent=-126, largest=(2 - 2**-23) * 2.0**127)
TF32 = NumberFormat(name="tf32", mantissa_bits=10, least_exponent=-126, largest=(2 - 2**-10) * 2.0**127)
BF16 = NumberFormat(name="bf16", mantissa_bits=7, least_exponent=-126, largest=(2 - 2**-7) * 2.0**127)
FP16 = NumberFormat(name="fp16", mantissa_bits=10, least_exponent=-14, largest=65504.0)
#: no infinity: it saturates, as Transformer Engine and torch cast to it (arXiv:2209.05433)
E4M3 = NumberFormat(name="fp8-e4m3", mantissa_bits=3, least_exponent=-6, largest=448.0, saturates=True)
E5M2 = NumberFormat(name="fp8-e5m2", mantissa_bits=2, least_exponent=-14, largest=57344.0)
#: integers as fixed-point numbers below 2: all are multiples of one step
_INT8 = NumberFormat(name="int8", mantissa_bits=6, least_exponent=0, largest=127 / 2**6, saturates=True)
_INT16 = NumberFormat(name="int16", mantissa_bits=14, least_exponent=0, largest=32767 / 2**14, saturates=True)

#: fp8 with a scale per tensor, as it is trained with
E4M3_SCALED = BlockFormat(name="fp8-e4m3/tensor", element=E4M3, block=None)
E5M2_SCALED = BlockFormat(
    name="fp8-e5m2/tensor",
    element=NumberFormat(name="e5m2", mantissa_bits=2, least_exponent=-14, largest=57344.0, saturates=True),
    block=None,
)
#: OCP Microscaling Formats 1.0
MXFP8 = BlockFormat(name="mxfp8-e4m3", element=E4M3, block=32)
MXINT8 = BlockFormat(name="mxint8", element=_INT8, block=32)
#: as Flexpoint (arXiv:1711.02213): 16-bit integers and one exponent per tensor, here of its present largest
#: value rather than one foretold from earlier steps
FLEX16 = BlockFormat(name="flex16", element=_INT16, block=None)

Format = NumberFormat | BlockFormat

FORMATS: Mapping[str, Format] = {
    each.name: each
    for each in (*(FP32, TF32, BF16, FP16, E4M3, E5M2), *(E4M3_SCALED, E5M2_SCALED, MXFP8, MXINT8, FLEX16))
}


def number_format(name: str) -> Format:
    """The format called `name`."""
    if name not in FORMATS:
        raise UnknownName("number format", name, FORMATS, f"formats: {', '.join(FORMATS)}")
    return FORMATS[name]
