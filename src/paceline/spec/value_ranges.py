"""How large the numbers of a training run are: counts by power of two, tensor kind and layer, as
`paceline.train.Ranges` records them and `paceline analyze --precision` reads them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import DataError, SpecError
from paceline.spec.vocabulary import Word

FORMAT = 1


class TensorKind(Word):
    """What a tensor of a training step is."""

    WEIGHTS = "weights"
    ACTIVATIONS = "activations"
    ACTIVATION_GRADIENTS = "activation gradients"
    WEIGHT_GRADIENTS = "weight gradients"
    #: change of a weight by a step, over the power of two below the weight
    UPDATES = "updates"

    @property
    def gradient(self) -> bool:
        """It is multiplied by the loss scale."""
        return self in (TensorKind.ACTIVATION_GRADIENTS, TensorKind.WEIGHT_GRADIENTS)


@dataclass(frozen=True, slots=True)
class ExponentCounts:
    """ExponentCounts of consecutive integers, the first of which is `first`."""

    first: int = 0
    counts: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def last(self) -> int:
        return self.first + len(self.counts) - 1

    def upto(self, value: int) -> int:
        """How many are at most `value`."""
        return sum(self.counts[: max(0, value - self.first + 1)])

    def at(self, value: int) -> int:
        """How many are `value`."""
        place = value - self.first
        return self.counts[place] if 0 <= place < len(self.counts) else 0

    def quantile(self, share: float) -> int:
        """The smallest value that at least this share does not exceed."""
        wanted, seen = share * self.total, 0
        for place, count in enumerate(self.counts):
            seen += count
            if count and seen >= wanted:
                return self.first + place
        return self.last

    @staticmethod
    def of(counts: Sequence[int], first: int) -> ExponentCounts:
        """ExponentCounts without the zeros at both ends."""
        filled = [place for place, count in enumerate(counts) if count]
        if not filled:
            return ExponentCounts()
        return ExponentCounts(first + filled[0], tuple(counts[filled[0] : filled[-1] + 1]))

    @staticmethod
    def added(parts: Iterable[ExponentCounts]) -> ExponentCounts:
        """The sum of several."""
        filled = [part for part in parts if part.counts]
        if not filled:
            return ExponentCounts()
        first, last = min(part.first for part in filled), max(part.last for part in filled)
        values = range(first, last + 1)
        return ExponentCounts(first, tuple(sum(part.at(value) for part in filled) for value in values))


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRange:
    """The values of one kind of tensors of one layer, over all recorded steps and ranks."""

    layer: str
    kind: TensorKind
    zeros: int = 0
    infinities: int = 0
    nans: int = 0
    largest: float = 0.0
    #: of finite values that are not zero, ceil(log2) of the magnitude: e counts those in (2**(e-1), 2**e]
    exponents: ExponentCounts = field(default_factory=ExponentCounts)
    #: of the same, floor(log2) of the largest of the tensor, minus the exponent; and of the largest of 32
    #: consecutive elements
    below_tensor: ExponentCounts = field(default_factory=ExponentCounts)
    below_block: ExponentCounts = field(default_factory=ExponentCounts)

    @property
    def total(self) -> int:
        """Finite values that are not zero."""
        return self.exponents.total

    @property
    def elements(self) -> int:
        return self.total + self.zeros + self.infinities + self.nans


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRecord:
    """Ranges of a run: `steps` of its steps were looked at on each of `ranks` ranks."""

    model: str
    steps: int
    ranks: int
    ranges: tuple[ValueRange, ...]
    notes: tuple[str, ...] = ()

    @property
    def layers(self) -> tuple[str, ...]:
        """Layers in the order of the model."""
        return tuple(dict.fromkeys(each.layer for each in self.ranges))

    def of(self, *, layer: str | None = None, kind: TensorKind | None = None) -> list[ValueRange]:
        """Ranges of a layer, of a kind, or of both."""
        return [each for each in self.ranges if layer in (None, each.layer) and kind in (None, each.kind)]

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` turns back into an equal record."""
        return {"paceline_ranges": FORMAT, **asdict(self)}

    def save(self, path: Path | str) -> None:
        """Write as JSON; the file appears whole or not at all."""
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        try:
            partial.write_text(json.dumps(self.to_dict()) + "\n", encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise SpecError(f"cannot write {str(path)!r}: {error.strerror}") from None

    @staticmethod
    def load(path: Path | str) -> RangeRecord:
        """Read what `save` wrote."""
        path = Path(path)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(f"cannot read ranges {str(path)!r}: {error.strerror}") from None
        except ValueError as error:
            raise DataError(f"{path}: not valid JSON: {error}; record the ranges again") from None
        return RangeRecord.from_dict(data, str(path))

    @staticmethod
    def from_dict(data: Any, where: str = "ranges") -> RangeRecord:
        """The record that `to_dict` described; messages name `where`."""
        if not isinstance(data, Mapping) or data.get("paceline_ranges") != FORMAT:
            raise DataError(
                f"{where}: not a record of value ranges of format {FORMAT}; write one with"
                " `paceline analyze MODEL --precision --save FILE`, or Ranges(model).result().save(FILE)"
            )
        try:
            return RangeRecord(
                model=_text(data["model"]),
                steps=_count(data["steps"]),
                ranks=_count(data["ranks"]),
                ranges=tuple(_range(each) for each in data["ranges"]),
                notes=tuple(_text(note) for note in data["notes"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{where}: broken record of value ranges: {type(error).__name__} {error}; record it again"
            ) from None


def _range(data: Mapping[str, Any]) -> ValueRange:
    largest = data["largest"]
    if isinstance(largest, bool) or not isinstance(largest, int | float) or not 0 <= largest < math.inf:
        raise ValueError(f"largest must be a finite number of 0 or more, got {largest!r}")
    found = ValueRange(
        layer=_text(data["layer"]),
        kind=TensorKind(data["kind"]),
        zeros=_count(data["zeros"]),
        infinities=_count(data["infinities"]),
        nans=_count(data["nans"]),
        largest=float(largest),
        exponents=_counts(data["exponents"]),
        below_tensor=_counts(data["below_tensor"]),
        below_block=_counts(data["below_block"]),
    )
    for name in ("below_tensor", "below_block"):
        counted = getattr(found, name).total
        if counted not in (0, found.total):
            raise ValueError(f"{found.layer} {found.kind}: {name} counts {counted} of {found.total} values")
    return found


def _counts(data: Mapping[str, Any]) -> ExponentCounts:
    first = data["first"]
    if isinstance(first, bool) or not isinstance(first, int):
        raise ValueError(f"first must be a whole number, got {first!r}")
    return ExponentCounts(first, tuple(_count(each) for each in data["counts"]))


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"expected a count, got {value!r}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected a text, got {value!r}")
    return value
