"""Lifetimes and the frontier of memory and time, for a terminal and as a page with charts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.report import charts
from paceline.report.charts import Axis, Series
from paceline.report.documents import document
from paceline.report.markup import Html, join, table, tag
from paceline.spec.memory_frontier import FrontierPoint, MemoryFrontier
from paceline.spec.workload import MEMORY_KINDS
from paceline.units import show

#: modules that a terminal shows; --json has all
MOST_MODULES = 14
#: pixels of a chart
WIDTH = 640
_LEVELS = " ▁▂▃▄▅▆▇█"
_POINTS = ("policy", "peak", "passing", "step", "time", "FLOPs", "what it does")
#: classes of lines that are told apart by color
_ORDER = ("first", "second", "third", "fourth", "predicted", "measured")


def memory_view(found: MemoryFrontier) -> RenderableType:
    """What lives when, by kind and by module; then policies."""
    sizes = f"batch {found.batch}" + (f", sequence {found.seq}" if found.seq else "")
    head = f", {sizes}, {found.precision}, on {found.device}: live bytes during a step"
    hidden = len(found.modules) - MOST_MODULES
    parts: list[RenderableType] = [
        Text.assemble((found.model, "bold"), head),
        _plain(("", "at the peak", _passes(found)), _kind_rows(found)),
        Text(_peak(found)),
        Text(),
        _plain(("module", "keeps", "forward", "live bytes that it made"), _module_rows(found)),
    ]
    if hidden > 0:
        parts.append(Text(f"{hidden} more modules keep less: --json", style="dim"))
    parts += [
        Text(),
        _plain(("operators", "results kept", "forward", "time per GB kept"), _cost_rows(found)),
        Text(),
        _plain(_POINTS, map(_point, found.points), left=(6,)),
        Text("* no other policy needs less memory and less time", style="dim"),
        *(Text(note, style="dim") for note in found.notes),
    ]
    return Group(*parts)


def _plain(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = ()) -> Table:
    drawn = Table(box=None, pad_edge=False, header_style="dim")
    for place, column in enumerate(head):
        words = not place or place in left or column.startswith(("live", "forward pass"))
        drawn.add_column(column, justify="left" if words else "right", no_wrap=place not in left)
    for row in rows:
        drawn.add_row(*row)
    return drawn


def _passes(found: MemoryFrontier) -> str:
    """A heading as wide as the chart below it."""
    forward = sum(moment.phase == "forward" for moment in found.moments)
    return "forward pass".ljust(forward) + "backward pass"


def _curve(values: Sequence[int], most: int) -> str:
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[-(-top * value // most) if most else 0] for value in values)


def _kind_rows(found: MemoryFrontier) -> Iterator[tuple[str, str, str]]:
    most = found.peak.bytes
    for kind in MEMORY_KINDS:
        values = [moment.by_kind.get(kind, 0) for moment in found.moments]
        if any(values):
            yield kind, _bytes(found.peak.by_kind.get(kind, 0)), _curve(values, most)
    yield "all", _bytes(most), _curve([moment.bytes for moment in found.moments], most)


def _peak(found: MemoryFrontier) -> str:
    return (
        f"most is live in the {found.peak.phase} pass, {show(found.peak.at_s, 'time')} after its begin;"
        f" the device has {_bytes(found.available_bytes)}"
    )


def _bytes(size: float) -> str:
    return show(size, "bytes")


def _module_rows(found: MemoryFrontier) -> Iterator[tuple[str, ...]]:
    """Those that keep most, in the order in which they run."""
    ranked = sorted(found.modules, key=lambda module: -module.saved_bytes)[:MOST_MODULES]
    most = max((size for module in ranked for size in module.live), default=0)
    for module in found.modules:
        if module in ranked and module.saved_bytes:
            kept, seconds = _bytes(module.saved_bytes), show(module.forward_s, "time")
            yield module.path, kept, seconds, _curve(module.live, most)


def _cost_rows(found: MemoryFrontier) -> Iterator[tuple[str, ...]]:
    for cost in found.kinds:
        rate = show(cost.s_per_byte * 1e9, "time") if cost.saved_bytes else "-"
        yield cost.kind, _bytes(cost.saved_bytes), show(cost.forward_s, "time"), rate


def _point(point: FrontierPoint) -> tuple[str, ...]:
    words = point.words
    if point.hidden_s is not None:
        words += f"; {show(point.hidden_s, 'time')} at best, were all copies hidden"
    return (
        f"{'*' if point.best else ' '} {point.name}",
        _bytes(point.peak_bytes),
        _bytes(point.passing_bytes),
        show(point.step_s, "time"),
        f"{100 * point.overhead:+.1f} %",
        f"{100 * point.compute:+.1f} %",
        words,
    )


# -- a page ----------------------------------------------------------------------------------------


def memory_page(found: MemoryFrontier, command: str) -> str:
    """The answer as one HTML file."""
    parts: list[tuple[str, object]] = [
        ("What lives when", _lifetimes(found)),
        ("Peak memory and step time", join([_frontier(found), table(_POINTS, map(_point, found.points))])),
        ("Modules", table(("module", "keeps", "forward"), [row[:3] for row in _module_rows(found)])),
        ("Operators", table(("operators", "results kept", "forward", "time per GB"), _cost_rows(found))),
    ]
    if found.notes:
        parts.append(("Left out", join(tag("p", note) for note in found.notes)))
    return document(f"Memory of {found.model}, batch {found.batch}, on {found.device}", command, parts)


def _lifetimes(found: MemoryFrontier) -> Html:
    kinds = [kind for kind in MEMORY_KINDS if any(moment.by_kind.get(kind) for moment in found.moments)]
    series = [
        Series(name=kind, kind=style, points=[(m.at_s, float(m.by_kind.get(kind, 0))) for m in found.moments])
        for kind, style in zip(kinds, _ORDER, strict=False)
    ]
    x = Axis(low=0, high=found.moments[-1].at_s, title="seconds of operators", dimension="time")
    y = Axis(low=0, high=1.05 * found.peak.bytes, title="live bytes", dimension="bytes")
    return charts.lines(x, y, series, label="live bytes by kind during a step", width=WIDTH)


def _frontier(found: MemoryFrontier) -> Html:
    best = sorted((p.peak_bytes, p.step_s) for p in found.points if p.best)
    points = [(float(size), seconds) for size, seconds in best]
    x = Axis(
        low=0, high=1.05 * max(p.peak_bytes for p in found.points), title="peak memory", dimension="bytes"
    )
    y = Axis(low=0, high=1.05 * max(s for _, s in points), title="step time", dimension="time")
    series = [Series(name="no other policy is better", kind="first", points=points, marked=True)]
    return charts.lines(x, y, series, label="step time by peak memory", width=WIDTH)
