"""Ranges of a run against number formats, for a terminal and as a page with charts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.report import charts
from paceline.report.charts import Axis, Mark, Series
from paceline.report.documents import document
from paceline.report.markup import Html, join, table, tag
from paceline.spec.number_formats import E4M3, E5M2, FP16, NumberFormat
from paceline.spec.precision_analysis import FormatLosses, PrecisionAnalysis
from paceline.spec.value_ranges import ExponentCounts, TensorKind

#: layers that a terminal shows; --json has all
MOST_LAYERS = 24
#: pixels of a chart
WIDTH = 640
#: powers of two that a terminal's histograms show; what lies beyond counts at the end
_LEAST, _MOST = -48, 16
_LEVELS = " ▁▂▃▄▅▆▇█"
_CLASSES = ("first", "second", "third", "fourth", "predicted")
_KINDS = tuple(kind for kind in TensorKind if kind != TensorKind.UPDATES)
_FORMATS = ("lost to zero / to overflow", *(str(kind) for kind in _KINDS))
_WINDOWS = ("loss scale for", "loses nothing", "", "advised", "lost without", "lost with it")
_LAYERS = ("layer", "format", "why", "activations", "gradients")


def precision_view(found: PrecisionAnalysis) -> RenderableType:
    """Histograms, formats, loss scales, layers, advice."""
    ranks = f", {found.ranks} ranks" if found.ranks > 1 else ""
    hidden = len(found.layers) - MOST_LAYERS
    parts: list[RenderableType] = [
        Text.assemble((found.model, "bold"), f": values of {_count(found.steps, 'step')}{ranks}"),
        _plain((f"2^{_LEAST} to 2^{_MOST}", _ruler(), "smallest 0.1 %", "median", "largest"), _curves(found)),
        Text(),
        _plain(_FORMATS, _format_rows(found)),
        Text(),
        _plain(_window_head(found), _window_rows(found)),
        Text(),
        _plain(_LAYERS, list(_layer_rows(found))[:MOST_LAYERS], left=(1, 2)),
    ]
    if hidden > 0:
        parts.append(Text(f"{hidden} more layers: --json", style="dim"))
    parts.append(Text())
    parts += [Text(f"- {line}") for line in found.advice]
    parts += [Text(note, style="dim") for note in found.notes]
    return Group(*parts)


def _plain(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = ()) -> Table:
    drawn = Table(box=None, pad_edge=False, header_style="dim")
    for place, column in enumerate(head):
        justify = "left" if not place or place in left else "right"
        drawn.add_column(column, justify=justify, no_wrap=place not in left)  # type: ignore[arg-type]
    for row in rows:
        drawn.add_row(*row)
    return drawn


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def share(value: float) -> str:
    """A share in percent, two digits; a dot for none."""
    if not value:
        return "·"
    if value < 5e-7:
        return "<0.0001 %"
    return f"{float(f'{100 * value:.2g}'):g} %" if value < 0.995 else f"{100 * value:.4g} %"


def _ruler() -> str:
    """Where fp16 begins and ends, above the histograms."""
    marks = [" "] * (_MOST - _LEAST + 1)
    marks[FP16.vanishing_exponent - _LEAST] = "├"
    marks[FP16.largest_exponent + 1 - _LEAST] = "┤"
    text = "".join(marks)
    begin = text.index("├") + 1
    return text[:begin] + "fp16" + text[begin + 4 :]


def _curve(counts: ExponentCounts) -> str:
    """A histogram in blocks; any count at all shows."""
    inside = [counts.at(power) for power in range(_LEAST, _MOST + 1)]
    inside[0] += counts.upto(_LEAST - 1)
    inside[-1] += counts.total - counts.upto(_MOST)
    most = max(inside) or 1
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[math.ceil(top * count / most)] for count in inside)


def _curves(found: PrecisionAnalysis) -> Iterator[tuple[str, ...]]:
    for kind, counts in found.histograms.items():
        if counts.total:
            ends = (counts.quantile(1e-3), counts.quantile(0.5), counts.last)
            yield str(kind), _curve(counts), *(f"2^{end}" for end in ends)


def _losses(losses: FormatLosses) -> str:
    return f"{share(losses.vanish)} / {share(losses.overflow)}" if losses.lost else "·"


def _format_rows(found: PrecisionAnalysis) -> Iterator[tuple[str, ...]]:
    for row in found.formats:
        yield row.format, *(_losses(row.losses[kind]) for kind in _KINDS)


def _window_head(found: PrecisionAnalysis) -> tuple[str, ...]:
    return tuple(name or f"at most {share(found.allowed)}" for name in _WINDOWS)


def _window_rows(found: PrecisionAnalysis) -> Iterator[tuple[str, ...]]:
    for window in found.windows:
        yield (
            window.format,
            _window(window.lossless),
            _window(window.tolerant),
            f"2^{window.advised}",
            share(window.lost_plain),
            share(window.lost_advised),
        )


def _window(ends: tuple[int, int] | None) -> str:
    return "none" if ends is None else f"2^{ends[0]} to 2^{ends[1]}"


def _layer_rows(found: PrecisionAnalysis) -> Iterator[tuple[str, ...]]:
    for layer in found.layers:
        ranges = {each.kind: f"2^{each.low} to 2^{each.high}" for each in layer.kinds}
        both = (ranges.get(kind, "-") for kind in (TensorKind.ACTIVATIONS, TensorKind.ACTIVATION_GRADIENTS))
        yield layer.layer, layer.format, layer.words, *both


# -- a page ----------------------------------------------------------------------------------------


def precision_page(found: PrecisionAnalysis, command: str) -> str:
    """The answer as one HTML file."""
    advice = tag("ul", *(tag("li", line) for line in (*found.advice, *found.notes)))
    parts: list[tuple[str, object]] = [
        ("Advice", advice),
        ("How large values are", _histograms(found)),
        ("Lost in each format, without a loss scale", table(_FORMATS, _format_rows(found))),
        ("Gradients lost in fp16 by loss scale", _scales(found)),
        ("Loss scales", table(_window_head(found), _window_rows(found))),
        ("Layers", table(_LAYERS, _layer_rows(found))),
    ]
    return document(f"Precision of {found.model}, {_count(found.steps, 'step')}", command, parts)


def _histograms(found: PrecisionAnalysis) -> Html:
    filled = {kind: counts for kind, counts in found.histograms.items() if counts.total}
    first = min(counts.quantile(1e-4) for counts in filled.values())
    last = max(counts.last for counts in filled.values())
    series = [
        Series(name=str(kind), kind=style, points=_points(counts, first, last))
        for (kind, counts), style in zip(filled.items(), _CLASSES, strict=False)
    ]
    highest = max(y for one in series for _, y in one.points)
    x = Axis(low=first, high=max(last, first + 1), title="power of two of the magnitude")
    y = Axis(low=0, high=1.05 * highest, title="share of values", dimension="fraction")
    marks = [mark for form in (FP16, E5M2, E4M3) for mark in _ends(form, first, last)]
    return charts.lines(x, y, series, label="values by power of two", width=WIDTH, marks=marks)


def _points(counts: ExponentCounts, first: int, last: int) -> list[tuple[float, float]]:
    return [(float(power), counts.at(power) / counts.total) for power in range(first, last + 1)]


def _ends(form: NumberFormat, first: int, last: int) -> Iterator[Mark]:
    if first <= form.vanishing_exponent <= last:
        yield Mark(at=form.vanishing_exponent, text=f"zero in {form.name}")


def _scales(found: PrecisionAnalysis) -> Html:
    """Share of gradients below fp16's smallest number by loss scale, and the advised one."""
    counts = ExponentCounts.added(found.histograms[kind] for kind in TensorKind if kind.gradient)
    if not counts.total:
        return tag("p", "no gradients")
    window = found.window(FP16.name)
    last = max(window.advised + 8, 16)
    points = [
        (float(scale), counts.upto(FP16.vanishing_exponent - scale) / counts.total)
        for scale in range(last + 1)
    ]
    x = Axis(low=0, high=last, title="loss scale, power of two")
    y = Axis(low=0, high=1.05 * (points[0][1] or 1e-6), title="gradients that vanish", dimension="fraction")
    series = [Series(name="vanish in fp16", kind="first", points=points, marked=True)]
    marks = [Mark(at=window.advised, text="advised")] if window.advised >= 0 else []
    drawn = charts.lines(x, y, series, label="gradients that vanish by loss scale", width=WIDTH, marks=marks)
    if window.tolerant is None:
        return drawn
    words = f"scales that keep every layer to {share(found.allowed)}: {_window(window.tolerant)}"
    return join([drawn, tag("p", words)])
