"""What number formats lose of counted values.

A format with numbers down to 2**s rounds magnitudes of at most 2**(s - 1) to zero (ties go to the even
number), so counts by ceil(log2) say exactly how many vanish, and with a loss scale of 2**k how many of
2**(s - 1 - k) or less. Formats end just below a power of two: whether anything overflows is exact, from the
largest value; of the octave in which the format ends, the share beyond the end is interpolated on a
logarithmic scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from paceline.spec.number_formats import Format, NumberFormat
from paceline.spec.precision_analysis import FormatLosses
from paceline.spec.value_ranges import TensorKind, ValueRange

#: powers of two that are tried as loss scales: float32 losses themselves end at 2**127
SCALES = range(-24, 105)
#: powers of two between the advised scale and the largest that overflows nothing
HEADROOM = 3


def losses(values: Iterable[ValueRange], form: Format, scale: int = 0) -> FormatLosses:
    """Shares of several ranges together, multiplied by 2**scale; block formats have scales of their own."""
    ranges = list(values)
    total = sum(each.total + each.infinities for each in ranges)
    if not total:
        return FormatLosses(vanish=0.0, coarse=0.0, overflow=0.0)
    vanish = sum(vanishing(each, form, scale) for each in ranges)
    coarse = sum(subnormal(each, form, scale) for each in ranges)
    overflow = sum(overflowing(each, form, scale) for each in ranges)
    return FormatLosses(vanish=vanish / total, coarse=coarse / total, overflow=overflow / total)


def vanishing(values: ValueRange, form: Format, scale: int = 0) -> int:
    """How many values round to zero, exactly."""
    if isinstance(form, NumberFormat):
        return values.exponents.upto(form.vanishing_exponent - scale)
    gaps = values.below_tensor if form.block is None else values.below_block
    return gaps.total - gaps.upto(form.vanishing_gap - 1)


def subnormal(values: ValueRange, form: Format, scale: int = 0) -> int:
    """How many values are kept as subnormal numbers, with fewer bits; 0 for block formats."""
    if not isinstance(form, NumberFormat):
        return 0
    normal = form.least_exponent - scale
    return values.exponents.upto(normal) - values.exponents.upto(form.vanishing_exponent - scale)


def overflowing(values: ValueRange, form: Format, scale: int = 0) -> float:
    """How many values lie beyond the largest number; infinities count. 0 for block formats: they scale."""
    if not isinstance(form, NumberFormat):
        return float(values.infinities)
    if values.largest * 2.0**scale < form.overflow_edge:
        return float(values.infinities)
    octave = math.ceil(math.log2(form.overflow_edge))
    above = values.total - values.exponents.upto(octave - scale)
    beyond = octave - math.log2(form.overflow_edge)
    within = beyond * values.exponents.at(octave - scale)
    return values.infinities + max(1.0, above + within)


def vanishing_gradients(
    ranges: Sequence[ValueRange], form: NumberFormat, scale: int = 0
) -> dict[tuple[str, TensorKind], int]:
    """How many gradients of each layer and kind vanish, with what follows: where all gradients of a layer's
    output do, so do those of its weights, which are made of them. Where only some do, those of the weights
    are a lower bound.
    """
    own = {(each.layer, each.kind): vanishing(each, form, scale) for each in ranges if each.kind.gradient}
    totals = {(each.layer, each.kind): each.total for each in ranges}

    def silent(layer: str) -> bool:
        above = (layer, TensorKind.ACTIVATION_GRADIENTS)
        return above in own and own[above] == totals[above]

    return {
        key: totals[key] if key[1] == TensorKind.WEIGHT_GRADIENTS and silent(key[0]) else count
        for key, count in own.items()
    }


def gradients_lost(ranges: Sequence[ValueRange], form: NumberFormat, scale: int = 0) -> float:
    """The share of gradients that vanish or overflow."""
    gradients = [each for each in ranges if each.kind.gradient]
    total = sum(each.total + each.infinities for each in gradients)
    vanish = sum(vanishing_gradients(gradients, form, scale).values())
    overflow = sum(overflowing(each, form, scale) for each in gradients)
    return (vanish + overflow) / total if total else 0.0


def window(ranges: Sequence[ValueRange], form: NumberFormat, allowed: float) -> tuple[int, int] | None:
    """First and last loss scale with which no range loses more than a share; None where there is none."""
    fitting = [scale for scale in SCALES if not outside(ranges, form, scale, allowed)]
    return (fitting[0], fitting[-1]) if fitting else None


def outside(ranges: Iterable[ValueRange], form: Format, scale: int, allowed: float) -> list[ValueRange]:
    """Ranges of which more than a share vanishes, or anything overflows."""

    def fits(values: ValueRange) -> bool:
        if overflowing(values, form, scale):
            return False
        return vanishing(values, form, scale) <= allowed * values.total

    return [values for values in ranges if not fits(values)]


def best_scale(ranges: Sequence[ValueRange], form: NumberFormat, allowed: float) -> int:
    """The loss scale to use, as a power of two: of those with which the fewest ranges are outside, a few
    below the largest, for gradients that grow.
    """
    counts = [len(outside(ranges, form, scale, allowed)) for scale in SCALES]
    fewest = [scale for scale, count in zip(SCALES, counts, strict=True) if count == min(counts)]
    roomy = [scale for scale in fewest if scale <= fewest[-1] - HEADROOM]
    return roomy[-1] if roomy else fewest[0]


def swallowed(updates: Iterable[ValueRange], form: NumberFormat) -> float:
    """The share of updates that are less than half a step of the weight, were weights kept in the format.

    Updates are counted over the power of two below their weight, whose step is 2**-mantissa_bits of that.
    """
    ranges = list(updates)
    total = sum(each.total for each in ranges)
    kept_from = -(form.mantissa_bits + 1)
    return sum(each.exponents.upto(kept_from) for each in ranges) / total if total else 0.0
