"""The options of `paceline analyze --precision`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from paceline.cli.options import whole
from paceline.cli.subject import CaptureSizes

if TYPE_CHECKING:
    from paceline.spec.precision_analysis import PrecisionAnalysis


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PrecisionOptions:
    """What goes with --precision alone."""

    steps: Annotated[
        int | None,
        Parameter(converter=whole, help="with --precision: steps to train for real; by default 40"),
    ] = None
    every: Annotated[
        int | None,
        Parameter(converter=whole, help="with --precision: count the values of every so many; by default 4"),
    ] = None
    lost_share: Annotated[
        float | None,
        Parameter(help="with --precision: the share of a layer's values that may be lost; by default 0.001"),
    ] = None
    layer: Annotated[str | None, Parameter(help="with --precision: show this layer alone, by its path")] = (
        None
    )
    save: Annotated[
        Path | None,
        Parameter(help="with --precision: write what was counted to a file, to be analyzed again"),
    ] = None

    @property
    def words(self) -> dict[str, object]:
        """The options as they are typed, with their values."""
        return {f"--{field.name.replace('_', '-')}": getattr(self, field.name) for field in fields(self)}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class AnalyzedOptions:
    """How the analyzed step runs. --precision has two meanings: with a word, that of other commands."""

    sizes: CaptureSizes | None = None
    precision: Annotated[
        list[str] | None,
        Parameter(
            name="--precision",
            negative="",
            consume_multiple=(0, 1),
            help=(
                "alone: ranges of weights, activations and gradients of a short real run against number"
                " formats, and loss scales; with a word, such as bf16: the precision of the step that another"
                " analysis looks at"
            ),
        ),
    ] = None

    @property
    def look_at_precision(self) -> bool:
        """--precision was given without a word."""
        return self.precision == []

    @property
    def given(self) -> dict[str, Any]:
        """The options of capture that were given."""
        sizes = {} if self.sizes is None else self.sizes.given
        return {**sizes, "precision": self.precision[0]} if self.precision else sizes


def analyze_precision(
    model: str, options: dict[str, Any], counted: PrecisionOptions
) -> tuple[PrecisionAnalysis, list[str]]:
    """Ranges of a model against formats, and lines about what was written."""
    from paceline.errors import SpecError
    from paceline.spec.value_ranges import RangeRecord
    from paceline.whatif.precision import ALLOWED, precision

    allowed = ALLOWED if counted.lost_share is None else counted.lost_share
    run = {"steps": counted.steps, "every": counted.every, **options}
    run = {name: value for name, value in run.items() if value is not None}
    if model.endswith(".json") and not model.startswith("hf:"):
        if run:
            word = next(iter(run)).replace("_", "-")
            raise SpecError(f"{model} was recorded already; --{word} needs a new run of the model itself")
        return precision(RangeRecord.load(model), allowed=allowed, layer=counted.layer), []
    from paceline.bench.precision_run import record_ranges

    record = record_ranges(model, **run)
    said = []
    if counted.save is not None:
        record.save(counted.save)
        said.append(f"written: {counted.save}; again: paceline analyze {counted.save} --precision")
    return precision(record, allowed=allowed, layer=counted.layer), said
