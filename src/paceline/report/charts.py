"""Charts as SVG, for the explorer, for reports and for notebooks: the same picture everywhere.

Axes start at zero or say that they do not; a logarithmic axis says so in its title. Colors come from classes
(`style.css`), so that one drawing serves light and dark. Widths are CSS pixels: text keeps its size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.report.markup import Html, join, tag
from paceline.units import show

#: pixels: the height of a line of text, and the width of a character of the smaller text of charts
LINE, CHARACTER = 16, 6.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A range of values and how they are written; of a logarithmic axis both ends are above zero."""

    low: float
    high: float
    title: str
    dimension: str = "count"
    log: bool = False

    def share(self, value: float) -> float:
        """Where a value is between the ends: 0 to 1, cut off beyond."""
        if self.log:
            low, high, value = (math.log(max(each, 1e-300)) for each in (self.low, self.high, value))
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low or 1.0)))

    def ticks(self, most: int) -> list[float]:
        """Round values along the axis, about `most` of them."""
        if self.log:
            return _decades(self.low, self.high, most)
        step = _round_step((self.high - self.low) / max(1, most))
        first = math.ceil(self.low / step - 1e-9)
        return [step * i for i in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def text(self, value: float) -> str:
        """A value as its tick has it."""
        if abs(value) < 1e-12 * max(abs(self.low), abs(self.high)):
            return "0"
        apart = 0 if self.log else math.log10(max(1.0, abs(value) / (self.high - self.low or 1.0)))
        return show(value, self.dimension, 3 + math.floor(apart))

    @property
    def label(self) -> str:
        """The title, with a word where the axis is not linear from zero."""
        if self.log:
            return f"{self.title} (log scale)"
        return self.title if self.low == 0 else f"{self.title} (from {self.text(self.low)})"


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least or 1.0))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _decades(low: float, high: float, most: int) -> list[float]:
    """Powers of ten between two values, with 2 and 5 of each where there is room."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [f * 10.0**p for p in powers for f in factors if low * 0.999 <= f * 10.0**p <= high * 1.001]
        if len(found) <= most:
            return found
    every = -(-len(found) // max(1, most))
    return found[::every]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line of a chart: points (x, y), and a band (x, low, high) round it; `kind` is its class."""

    name: str
    kind: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()
    marked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A vertical line at a value of the x axis, with a word."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Frame:
    """The plotting area of a chart: axes drawn, values turned into pixels."""

    width: float
    height: float
    x: Axis
    y: Axis
    left: float = field(default=58)
    bottom: float = field(default=42)
    top: float = field(default=10)
    right: float = field(default=14)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Pixels of a point."""
        across = self.width - self.left - self.right
        down = self.height - self.top - self.bottom
        return self.left + across * self.x.share(x), self.top + down * (1 - self.y.share(y))

    def path(self, points: Sequence[tuple[float, float]]) -> str:
        """Points as SVG has them."""
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in (self.at(*point) for point in points))

    def axes(self) -> Html:
        """Grid, ticks and titles."""
        return join([*self.x_ticks(), *self._y_ticks(), *self._titles()])

    def x_ticks(self) -> list[Html]:
        """Grid lines and figures of the x axis."""
        base = self.height - self.bottom
        found = []
        for value in self.x.ticks(max(2, int((self.width - self.left) / 64))):
            x, _ = self.at(value, self.y.low)
            found.append(tag("line", x1=x, x2=x, y1=self.top, y2=base, class_="grid"))
            found.append(tag("text", self.x.text(value), x=x, y=base + 15, text_anchor="middle"))
        return found

    def _y_ticks(self) -> list[Html]:
        found = []
        for value in self.y.ticks(max(2, int(self.height / 45))):
            _, y = self.at(self.x.low, value)
            right = self.width - self.right
            found.append(tag("line", x1=self.left, x2=right, y1=y, y2=y, class_="grid"))
            found.append(tag("text", self.y.text(value), x=self.left - 6, y=y + 4, text_anchor="end"))
        return found

    def x_title(self) -> Html:
        """What the x axis is of."""
        middle = (self.left + self.width - self.right) / 2
        return tag("text", self.x.label, x=middle, y=self.height - 6, text_anchor="middle", class_="title")

    def _titles(self) -> list[Html]:
        return [self.x_title(), tag("text", self.y.label, x=2, y=self.top - 12, class_="title")]


def svg(width: float, height: float, label: str, *children: object) -> Html:
    """A drawing that a screen reader reads as `label`."""
    box = f"0 0 {width:g} {height:g}"
    size = {"viewBox": box, "width": round(width), "height": round(height)}
    return tag("svg", *children, class_="chart", role="img", aria_label=label, **size)


def legend(entries: Sequence[tuple[str, str]]) -> Html:
    """(class, text) pairs below a chart."""
    keys = (tag("li", tag("span", class_=f"key {kind}", aria_hidden="true"), text) for kind, text in entries)
    return tag("ul", *keys, class_="legend")


def lines(
    x: Axis,
    y: Axis,
    series: Sequence[Series],
    *,
    label: str,
    width: float,
    height: float = 250,
    marks: Sequence[Mark] = (),
) -> Html:
    """Lines with their bands, and the legend."""
    frame = Frame(width, height, x, y, top=26)
    drawn = [_band(frame, one) for one in series if one.band]
    drawn += [_line(frame, one) for one in series]
    drawn += [_mark(frame, mark) for mark in marks]
    keys = legend([(f"line {one.kind}", one.name) for one in series])
    return join([svg(width, height, label, frame.axes(), *drawn), keys])


def _band(frame: Frame, one: Series) -> Html:
    upper = [(x, high) for x, _, high in one.band]
    lower = [(x, low) for x, low, _ in reversed(one.band)]
    return tag("polygon", points=frame.path([*upper, *lower]), class_=f"band {one.kind}")


def _line(frame: Frame, one: Series) -> Html:
    drawn = tag("polyline", points=frame.path(one.points), class_=f"line {one.kind}")
    if not one.marked:
        return drawn
    dots = []
    for px, py in one.points:
        x, y = frame.at(px, py)
        title = f"{one.name}: {frame.y.text(py)} at {frame.x.text(px)}"
        dots.append(tag("circle", tag("title", title), cx=x, cy=y, r=3.5, class_=f"dot {one.kind}"))
    return join([drawn, *dots])


def _mark(frame: Frame, mark: Mark) -> Html:
    x, _ = frame.at(mark.at, frame.y.low)
    end = x + CHARACTER * len(mark.text) + 6 > frame.width
    words = tag(
        "text",
        mark.text,
        x=x - 4 if end else x + 4,
        y=frame.height - frame.bottom - 6,
        text_anchor="end" if end else None,
        class_="mark",
    )
    return join([tag("line", x1=x, x2=x, y1=frame.top, y2=frame.height - frame.bottom, class_="mark"), words])


@dataclass(frozen=True, slots=True, kw_only=True)
class BarSegment:
    """A stretch of a bar."""

    name: str
    value: float
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A row of a bar chart: blocks in a row, an interval of their sum, and a note behind it."""

    name: str
    blocks: Sequence[BarSegment]
    interval: tuple[float, float] | None = None
    note: str = ""

    @property
    def total(self) -> float:
        return sum(block.value for block in self.blocks)


def bars(
    axis: Axis, rows: Sequence[Bar], *, label: str, width: float, limit: tuple[float, str] | None = None
) -> Html:
    """Stacked bars on one axis that starts at zero; `limit` is a line across all, such as a capacity."""
    named = any(bar.name for bar in rows)
    each = 42 if named else 30
    top, base = (20 if limit else 6), 40
    height = top + each * len(rows) + base
    y = Axis(low=0, high=1, title="")
    frame = Frame(width, height, axis, y, left=8, top=top, bottom=base)
    drawn: list[Html] = frame.x_ticks()
    drawn.append(tag("text", axis.label, x=width / 2, y=height - 4, text_anchor="middle", class_="title"))
    for i, bar in enumerate(rows):
        drawn.append(_bar(frame, bar, top + each * i, named))
    if limit is not None:
        drawn.append(_limit(frame, *limit))
    return svg(width, height, label, *drawn)


def _bar(frame: Frame, bar: Bar, y: float, named: bool) -> Html:
    drawn, done = [], 0.0
    if named:
        words = f"{bar.name}  {bar.note}".strip()
        drawn.append(tag("text", words, x=frame.left, y=y + 12, class_="row"))
        y += LINE
    for block in bar.blocks:
        start, _ = frame.at(done, 0)
        done += block.value
        end, _ = frame.at(done, 0)
        title = tag("title", f"{block.name}: {frame.x.text(block.value)}")
        width = max(0.0, end - start)
        drawn.append(tag("rect", title, x=start, y=y, width=width, height=18, class_=f"fill {block.kind}"))
    if bar.interval is not None:
        drawn.append(whisker(frame.at(bar.interval[0], 0)[0], frame.at(bar.interval[1], 0)[0], y + 9))
    return join(drawn)


def whisker(low: float, high: float, y: float) -> Html:
    """An interval: a line with an end on each side."""
    path = f"M{low:.1f} {y - 5:.1f}v10M{low:.1f} {y:.1f}H{high:.1f}M{high:.1f} {y - 5:.1f}v10"
    return tag("path", d=path, class_="whisker")


def _limit(frame: Frame, value: float, text: str) -> Html:
    x, _ = frame.at(value, 0)
    end = x > frame.width / 2
    line = tag("line", x1=x, x2=x, y1=4, y2=frame.height - frame.bottom, class_="mark")
    words = tag(
        "text", text, x=x - 4 if end else x + 4, y=13, text_anchor="end" if end else None, class_="mark"
    )
    return join([line, words])


def meter(value: float, low: float, high: float, *, dimension: str, width: float) -> Html:
    """A value in its interval, on an axis from zero."""
    axis = Axis(low=0, high=high * 1.08, title="", dimension=dimension)
    frame = Frame(width, 22, axis, Axis(low=0, high=1, title=""), left=2, right=2)
    x, _ = frame.at(value, 0)
    label = f"{show(value, dimension)}, 90 % interval {show(low, dimension)} to {show(high, dimension)}"
    drawn = [
        tag("rect", x=2, y=6, width=max(0.0, x - 2), height=10, class_="fill quiet"),
        whisker(frame.at(low, 0)[0], frame.at(high, 0)[0], 11),
        tag("circle", cx=x, cy=11, r=4, class_="dot predicted"),
    ]
    return svg(width, 22, label, *drawn)
