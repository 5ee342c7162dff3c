"""Which number formats hold the values of a training run: the answer of `analyze --precision`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paceline.spec.value_ranges import ExponentCounts, TensorKind


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatLosses:
    """Shares of finite values that are not zero, as a format would hold them."""

    #: rounded to zero
    vanish: float
    #: kept, but with fewer bits than other values: subnormal numbers; of block formats not told apart
    coarse: float
    #: rounded to infinity, or cut to the largest number
    overflow: float

    @property
    def lost(self) -> float:
        return self.vanish + self.overflow


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatRow:
    """Losses in one format, as they are (no loss scale), by kind of tensor."""

    format: str
    losses: Mapping[TensorKind, FormatLosses]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleWindow:
    """Loss scales, as powers of two, for gradients in one format. A window is its first and its last power,
    None where there is none.
    """

    format: str
    #: no gradient vanishes or overflows
    lossless: tuple[int, int] | None
    #: in no layer more than the allowed share does
    tolerant: tuple[int, int] | None
    #: the power to use: a few below the last one, for gradients that grow
    advised: int
    #: shares of gradients that vanish or overflow with scale 1, and with the advised one
    lost_plain: float
    lost_advised: float
    #: layers that lose more than the allowed share with the advised scale
    outside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KindRange:
    """Where the values of one kind of tensors lie: powers of two of the 0.1 % smallest, the median and the
    largest, and the losses in fp16 with the advised scale.
    """

    kind: TensorKind
    low: int
    median: int
    high: int
    largest: float
    zeros: float
    fp16: FormatLosses


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAdvice:
    """What one layer needs: the narrowest format whose range holds its values, and why."""

    layer: str
    format: str
    words: str
    kinds: tuple[KindRange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionAnalysis:
    """Ranges of one run against formats."""

    model: str
    steps: int
    ranks: int
    #: the largest share of a layer's values that may be lost
    allowed: float
    histograms: Mapping[TensorKind, ExponentCounts]
    formats: tuple[FormatRow, ...]
    windows: tuple[ScaleWindow, ...]
    #: by format, the share of updates that are too small to change a weight which is kept in it
    updates_lost: Mapping[str, float]
    layers: tuple[LayerAdvice, ...]
    advice: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def window(self, format: str) -> ScaleWindow:
        """Loss scales for a format."""
        return next(window for window in self.windows if window.format == format)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return asdict(self)

    def __rich__(self) -> Any:
        from paceline.report.precision import precision_view

        return precision_view(self)
