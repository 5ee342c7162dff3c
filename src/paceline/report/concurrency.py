"""The concurrency of a step for a terminal, and as a page with charts."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from paceline.report import charts
from paceline.report.charts import Axis, Series
from paceline.report.documents import document
from paceline.report.markup import Html, join, table, tag
from paceline.report.terminal import plain_table
from paceline.spec.concurrency import Concurrency, EndPoint, Passes
from paceline.units import show

#: layers that a terminal shows; --json has all
MOST_LAYERS = 12
#: pixels of a chart
WIDTH = 560
_FORMS = ("parallelism", "ranks at most", "sent per rank, 2 ranks", "at most", "limit")
_CHOICES = ("convolutions", "of them", "forward W", "sum of D", "backward W", "sum of D")
_PASSES = ("operators", "forward W", "forward D", "backward W", "backward D", "average parallelism")


def concurrency_view(c: Concurrency) -> RenderableType:
    """Passes, kinds of operators, layers, forms of parallelism, and where they end."""
    sizes = f"batch {c.batch}" + (f", sequence {c.seq}" if c.seq else "")
    parts: list[RenderableType] = [
        Text.assemble((c.model, "bold"), f", {sizes}, {c.precision}: work W and depth D in operations"),
        plain_table(("", "W", "D", "average parallelism", "longest chain"), _stretches(c), left=(4,)),
        *(Text(line) for line in _lines(c)),
        Text(),
        plain_table(("kind of operator", *_PASSES), map(_passes, c.kinds)),
        *_layer_table(c),
    ]
    if c.convolutions:
        parts += [Text(), plain_table(_CHOICES, _choices(c))]
    if c.forms:
        parts += [Text(), plain_table(_FORMS, _forms(c), left=(4,))]
    if c.ends:
        head = (f"where it ends on {c.hardware}", *_scales(c))
        parts += [Text(), plain_table(head, _ends(c), left=range(1, len(head)))]
    return Group(*parts)


def _layer_table(c: Concurrency) -> Iterator[RenderableType]:
    rows = list(_layers(c))
    yield Text()
    yield plain_table(("layer", "alike", *_PASSES), rows[:MOST_LAYERS])
    if len(rows) > MOST_LAYERS:
        yield Text(f"{len(rows) - MOST_LAYERS} more rows have less work: --json", style="dim")


def _stretches(c: Concurrency) -> Iterator[tuple[str, ...]]:
    for part in (c.forward, c.backward, c.step):
        shares = [f"{name} {100 * depth / part.depth:.0f} %" for name, depth in part.chain[:3]]
        yield part.name, _count(part.work), f"{part.depth:,.0f}", _count(part.parallelism), ", ".join(shares)


def _lines(c: Concurrency) -> Iterator[str]:
    if c.folded:
        yield (
            "repeated blocks of this file were captured once: depths are upper bounds, with blocks one after"
            " the other; name the model itself for exact ones, and for forms of parallelism"
        )
    if c.devices_filled is not None:
        yield (
            f"the step's average parallelism fills the multiply-adds per cycle of"
            f" {_count(c.devices_filled)} devices of {c.hardware}"
        )


def _count(value: float) -> str:
    return show(value, "count") if value else "0"


def _passes(part: Passes) -> tuple[str, ...]:
    return (
        part.name,
        f"{part.operators:,}",
        _count(part.forward_work),
        f"{part.forward_depth:,.0f}",
        _count(part.backward_work),
        f"{part.backward_depth:,.0f}",
        _count(part.parallelism),
    )


def _layers(c: Concurrency) -> Iterator[tuple[str, ...]]:
    """Layers with equal figures as one row, under the name of the first, with their number."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for layer in c.layers:
        name, *figures = _passes(layer)
        alike.setdefault(tuple(figures), []).append(name)
    for figures_, names in alike.items():
        yield names[0], str(len(names)), *figures_


def _choices(c: Concurrency) -> Iterator[tuple[str, ...]]:
    for choice in c.convolutions:
        yield (
            choice.algorithm,
            f"{choice.fits} of {choice.convolutions}",
            _count(choice.forward_work),
            f"{choice.forward_depth:,.0f}",
            _count(choice.backward_work),
            f"{choice.backward_depth:,.0f}",
        )


def _forms(c: Concurrency) -> Iterator[tuple[str, ...]]:
    for form in c.forms:
        sent = [
            show(size, "bytes") if size is not None else "-" for size in (form.bytes_two, form.bytes_most)
        ]
        yield form.name, _count(form.most), *sent, form.limit


def _scales(c: Concurrency) -> list[str]:
    return list(dict.fromkeys(end.hardware for end in c.ends))


def _ends(c: Concurrency) -> Iterator[tuple[str, ...]]:
    for form in dict.fromkeys(end.form for end in c.ends):
        yield form, *(_end(end) for end in c.ends if end.form == form)


def _end(end: EndPoint) -> str:
    if end.ranks == 1:
        return f"1 rank: {end.stops}"
    return f"{end.ranks:,} ranks ({end.speedup:.3g} x): {end.stops}"


# -- a page ----------------------------------------------------------------------------------------


def concurrency_page(c: Concurrency, command: str) -> str:
    """The answer as one HTML file, with the curves behind the ends."""
    parts: list[tuple[str, object]] = [
        ("Work and depth", table(("", "W", "D", "average parallelism", "longest chain"), _stretches(c))),
        ("Kinds of operators", table(("kind", *_PASSES), map(_passes, c.kinds))),
        ("Layers", table(("layer", "alike", *_PASSES), _layers(c))),
        ("Forms of parallelism", table(_FORMS, _forms(c))),
    ]
    if c.convolutions:
        parts.append(("Convolutions", table(_CHOICES, _choices(c))))
    if c.ends:
        ends = table((f"on {c.hardware}", *_scales(c)), _ends(c))
        parts.append(("Where each form ends", join([ends, *(_chart(c, scale) for scale in _scales(c))])))
    return document(f"Concurrency of {c.model}, batch {c.batch}", command, parts)


def _chart(c: Concurrency, scale: str) -> Html:
    """Parallel efficiency against ranks, on a linear axis from zero: a logarithmic speedup would hide
    the gap to the ideal.
    """
    mine = [end for end in c.ends if end.hardware == scale]
    most = max(ranks for end in mine for ranks, _ in end.curve)
    series = []
    for kind, end in zip(("first", "second", "third", "fourth"), mine, strict=False):
        alone = end.curve[0][1]
        points = [(float(ranks), alone / seconds / ranks) for ranks, seconds in end.curve]
        series.append(Series(name=end.form, kind=kind, points=points, marked=True))
    x = Axis(low=1, high=max(2, most), title="ranks", log=True)
    y = Axis(low=0, high=1, title="parallel efficiency", dimension="fraction")
    drawn = charts.lines(x, y, series, label=f"parallel efficiency by form, {scale}", width=WIDTH)
    return tag("figure", tag("figcaption", scale), drawn)
