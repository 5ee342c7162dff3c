"""From ranges of a run to advice: which format holds which layer, and with which loss scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.cost.format_losses import (
    best_scale,
    gradients_lost,
    losses,
    outside,
    overflowing,
    swallowed,
    window,
)
from paceline.errors import DataError, SpecError, UnknownName
from paceline.spec.number_formats import (
    BF16,
    E4M3,
    E4M3_SCALED,
    E5M2,
    E5M2_SCALED,
    FORMATS,
    FP16,
    FP32,
    TF32,
    Format,
    NumberFormat,
)
from paceline.spec.precision_analysis import (
    FormatLosses,
    FormatRow,
    KindRange,
    LayerAdvice,
    PrecisionAnalysis,
    ScaleWindow,
)
from paceline.spec.value_ranges import ExponentCounts, RangeRecord, TensorKind, ValueRange

#: share of a layer's values that may be lost, unless the user says
ALLOWED = 1e-3
#: share of the smallest values that the lower end of a range leaves out
_TAIL = 1e-3
#: updates that are swallowed by weights of a format beyond which weights are kept in fp32
_SWALLOWED = 0.01
_FORWARD = (TensorKind.WEIGHTS, TensorKind.ACTIVATIONS)
_SCALED = (FP16, E5M2, E4M3)
_NAMED_LAYERS = 4


def precision(
    record: RangeRecord, *, allowed: float = ALLOWED, layer: str | None = None
) -> PrecisionAnalysis:
    """What each format would lose of the values of a run, and what to do about it; of one layer, or of all.

    `allowed` is the largest share of a layer's values that may be lost.
    """
    if not 0 <= allowed < 1:
        raise SpecError(f"the allowed share must be 0 or more and below 1, got {allowed:g}; such as 0.001")
    _check(record)
    if layer is not None and layer not in record.layers:
        raise UnknownName(
            "layer", layer, record.layers, f"the run has {len(record.layers)}, such as {record.layers[0]!r}"
        )
    shown = record.of(layer=layer)
    windows = tuple(_window(record, form, allowed) for form in _SCALED)
    scale = windows[0].advised
    wanted = record.layers if layer is None else (layer,)
    layers = tuple(_advice(name, record.of(layer=name), scale, allowed) for name in wanted)
    updates = [each for each in shown if each.kind == TensorKind.UPDATES]
    updates_lost = {form.name: swallowed(updates, form) for form in (FP16, BF16, TF32, FP32)}
    return PrecisionAnalysis(
        model=record.model,
        steps=record.steps,
        ranks=record.ranks,
        allowed=allowed,
        histograms={kind: _together(shown, kind) for kind in TensorKind},
        formats=tuple(_row(form, shown) for form in FORMATS.values()),
        windows=windows,
        updates_lost=updates_lost if updates else {},
        layers=layers,
        advice=tuple(_words(windows[0], allowed, layers, updates_lost if updates else {})),
        notes=record.notes,
    )


def _check(record: RangeRecord) -> None:
    """Raises where a record says nothing about formats."""
    for each in record.ranges:
        if each.nans:
            raise DataError(
                f"{record.model}: {each.nans} of the {each.kind} of layer {each.layer!r} are NaN, so the run"
                " was broken before its ranges were recorded; find the cause"
                " (torch.autograd.set_detect_anomaly), then record again"
            )
    if not any(each.total for each in _gradients(record)):
        raise DataError(
            f"{record.model}: the record has no gradients other than zero, so there is no loss scale to find;"
            " record steps that train"
        )


def _gradients(record: RangeRecord) -> list[ValueRange]:
    return [each for each in record.ranges if each.kind.gradient]


def _together(ranges: Sequence[ValueRange], kind: TensorKind) -> ExponentCounts:
    return ExponentCounts.added(each.exponents for each in ranges if each.kind == kind)


def _row(form: Format, ranges: Sequence[ValueRange]) -> FormatRow:
    kinds = [kind for kind in TensorKind if kind != TensorKind.UPDATES]
    found: dict[TensorKind, FormatLosses] = {
        kind: losses([each for each in ranges if each.kind == kind], form) for kind in kinds
    }
    return FormatRow(format=form.name, losses=found)


def _window(record: RangeRecord, form: NumberFormat, allowed: float) -> ScaleWindow:
    gradients = [each for each in _gradients(record) if each.total]
    advised = best_scale(gradients, form, allowed)
    missed = outside(gradients, form, advised, allowed)
    return ScaleWindow(
        format=form.name,
        lossless=window(gradients, form, 0.0),
        tolerant=window(gradients, form, allowed),
        advised=advised,
        lost_plain=gradients_lost(gradients, form),
        lost_advised=gradients_lost(gradients, form, advised),
        outside=tuple(dict.fromkeys(each.layer for each in missed)),
    )


# -- layers ----------------------------------------------------------------------------------------


def _advice(layer: str, ranges: Sequence[ValueRange], scale: int, allowed: float) -> LayerAdvice:
    """The narrowest format that holds a layer, and what the next narrower one would lose."""
    used = [each for each in ranges if each.total and each.kind != TensorKind.UPDATES]
    choices: list[tuple[str, Format, Format, int, str]] = [
        ("fp8", E4M3_SCALED, E5M2_SCALED, 0, "fp8: e4m3 forward, e5m2 gradients, a scale per tensor"),
        ("fp16", FP16, FP16, scale, f"fp16 with a loss scale of 2^{scale}"),
        ("bf16", BF16, BF16, 0, "bf16, which needs no loss scale"),
    ]
    reason = ""
    for name, forward, backward, shift, words in choices:
        problem = _problem(used, forward, backward, shift, allowed)
        if not problem:
            why = f"; {reason}" if reason else ""
            return LayerAdvice(layer=layer, format=name, words=words + why, kinds=_kinds(ranges, scale))
        reason = f"in {name}, {problem}"
    return LayerAdvice(layer=layer, format="fp32", words=f"fp32; {reason}", kinds=_kinds(ranges, scale))


def _problem(
    ranges: Sequence[ValueRange], forward: Format, backward: Format, scale: int, allowed: float
) -> str:
    """What is lost most, in words; nothing where that is allowed."""
    worst, words = 0.0, ""
    for each in ranges:
        form, shift = (backward, scale) if each.kind.gradient else (forward, 0)
        if not outside([each], form, shift, allowed):
            continue
        found = losses([each], form, shift)
        if overflowing(each, form, shift) and isinstance(form, NumberFormat):
            times = " times the scale" if shift else ""
            ends = f"and it ends at {form.largest:.5g}"
            return f"{each.kind} overflow: they reach {each.largest:.3g}{times}, {ends}"
        if found.vanish > worst:
            worst, words = found.vanish, f"{percent(found.vanish)} of {each.kind} vanish"
    return words


def _kinds(ranges: Sequence[ValueRange], scale: int) -> tuple[KindRange, ...]:
    return tuple(
        KindRange(
            kind=each.kind,
            low=each.exponents.quantile(_TAIL),
            median=each.exponents.quantile(0.5),
            high=each.exponents.last,
            largest=each.largest,
            zeros=each.zeros / each.elements,
            fp16=losses([each], FP16, scale if each.kind.gradient else 0),
        )
        for each in ranges
        if each.total
    )


# -- words -----------------------------------------------------------------------------------------


def percent(share: float) -> str:
    """A share as people read it.

    >>> percent(0.1234), percent(0.000123), percent(0), percent(0.99996)
    ('12 %', '0.012 %', '0 %', '99.996 %')
    """
    if 0.99 < share < 1:
        return f"{100 - float(f'{100 * (1 - share):.1g}'):g} %"
    return f"{float(f'{100 * share:.2g}'):g} %"


def _words(
    fp16: ScaleWindow, allowed: float, layers: Sequence[LayerAdvice], updates: dict[str, float]
) -> Iterator[str]:
    yield _scaling(fp16, allowed)
    kept = [each.layer for each in layers if each.format in ("bf16", "fp32")]
    if kept:
        yield f"with fp16, keep in bf16 or fp32: {_listed(kept)}"
    narrow = [each.layer for each in layers if each.format == "fp8"]
    if narrow:
        which = "all layers" if len(narrow) == len(layers) else _listed(narrow)
        yield (
            f"ranges fit fp8 with a scale per tensor in {which}; whether three bits of mantissa are enough is"
            " not a question of range: train to see"
        )
    lost = {name: share for name, share in updates.items() if share > _SWALLOWED}
    if lost:
        shares = ", ".join(f"{percent(share)} in {name}" for name, share in lost.items())
        yield f"keep weights in fp32 for the update; without, updates too small to count are: {shares}"


def _scaling(fp16: ScaleWindow, allowed: float) -> str:
    plain, scaled = percent(fp16.lost_plain), percent(fp16.lost_advised)
    window = fp16.tolerant
    if window is not None and window[0] <= 0 <= window[1]:
        begin = f"fp16 needs no loss scale: it loses {plain} of gradients without one"
    else:
        begin = f"fp16 without a loss scale loses {plain} of gradients"
    advised = f"; with 2^{fp16.advised} = {2.0**fp16.advised:g} it loses {scaled}"
    if window is None:
        return f"{begin}{advised}; no scale keeps every layer to {percent(allowed)}"
    return f"{begin}{advised}; scales 2^{window[0]} to 2^{window[1]} keep every layer to {percent(allowed)}"


def _listed(layers: Sequence[str]) -> str:
    """The first few names."""
    more = len(layers) - _NAMED_LAYERS
    shown = ", ".join(layers[:_NAMED_LAYERS])
    return f"{shown} and {more} more" if more > 0 else shown
