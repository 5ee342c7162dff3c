"""What-if answers as HTML with charts: bottlenecks, roofline, plans and scenarios side by side, sweeps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.report import charts
from paceline.report.charts import Axis, Bar, BarSegment, Series
from paceline.report.markup import Html, details, join, table, tag
from paceline.report.sections import WIDTH, dollars, percent, seconds
from paceline.spec.prediction import DistributedPrediction
from paceline.spec.whatif import Anatomy, Change, Comparison, Explanation, Resources, Roof, Row, Sweep
from paceline.units import show

#: classes of lines, for what is told apart by color and by name
ORDER = ("first", "second", "third", "fourth")


# -- bottlenecks -----------------------------------------------------------------------------------


def doubled(step_s: float, rows: Sequence[tuple[str, float]], width: float = WIDTH) -> Html:
    """What a step would take with twice as much of each resource: (name, seconds)."""
    ordered = sorted(rows, key=lambda row: row[1])
    axis = Axis(
        low=0,
        high=1.02 * max(step_s, *(after for _, after in ordered)) if ordered else step_s,
        title="step time if one resource were twice as fast",
        dimension="time",
    )
    drawn = [_halved(name, step_s, after) for name, after in ordered]
    now = (step_s, f"now {seconds(step_s)}")
    label = "; ".join(f"{bar.name}: {bar.note}" for bar in drawn)
    return charts.bars(
        axis, drawn, label=f"if one resource were twice as fast: {label}", width=width, limit=now
    )


def _halved(name: str, before_s: float, after_s: float) -> Bar:
    saved = 1 - after_s / before_s
    note = f"saves {percent(saved)}" if saved >= 5e-4 else "saves nothing"
    return Bar(
        name=name, blocks=[BarSegment(name=name, value=after_s, kind="predicted-bar")], note=f"twice: {note}"
    )


def bottlenecks(found: Resources) -> Html:
    """Resources by what they cost: without a limit, by one per cent more, and what comes next."""
    rows = [
        (
            b.name,
            _saving(b.saved_s, found.step_s),
            f"{b.elasticity:.2f} %",
            b.then,
            tag("code", f"--set {b.edit}"),
        )
        for b in found.bottlenecks
    ]
    head = ("without a limit of", "saves", "1 % more saves", "then the bottleneck is", "the edit")
    rest = f"The rest, {percent(found.fixed, 0)} of the step, is latency or what no rate changes."
    return join([table(head, rows, "bottlenecks, most first"), tag("p", rest, class_="soft")])


def _saving(saved_s: float, step_s: float) -> str:
    return f"{seconds(saved_s)} ({percent(saved_s / step_s)})" if saved_s > 0 else "0"


# -- roofline --------------------------------------------------------------------------------------


def roofline(a: Anatomy, width: float = WIDTH) -> Html:
    """FLOP/s of a device over FLOPs per byte: a roof for arithmetic, a slope for each way of bytes."""
    ways = [roof for roof in a.roofs if roof.intensity]
    peak = a.roofs[0].ceiling
    ends = [*(roof.intensity or 1.0 for roof in ways), *(peak / _rate(roof) for roof in ways)]
    low, high = min(ends) / 6, max(ends) * 6
    x = Axis(low=low, high=high, title="FLOP per byte", log=True)
    y = Axis(low=a.achieved / 30, high=peak * 3, title="FLOP/s of one device", dimension="flops", log=True)
    drawn = [_slope(roof, peak, y.low, low, high, ORDER[i % 4]) for i, roof in enumerate(ways)]
    roof = Series(name=f"arithmetic: {show(peak, 'flops')}", kind="roof", points=[(low, peak), (high, peak)])
    step = Series(
        name="this step", kind="step", points=[(r.intensity or 1.0, a.achieved) for r in ways], marked=True
    )
    label = f"roofline: the step reaches {show(a.achieved, 'flops')} of {show(peak, 'flops')} a device"
    rows = [
        (
            r.name,
            f"{r.intensity:,.0f}" if r.intensity else "-",
            show(r.ceiling, "flops"),
            percent(r.seconds / a.step_s),
        )
        for r in a.roofs
    ]
    head = ("resource", "FLOP per byte", "allows", "busy at least, of the step")
    words = (
        f"The step reaches {show(a.achieved, 'flops')} on a device: {percent(a.achieved / peak)} of the peak."
    )
    return join(
        [
            charts.lines(x, y, [roof, *drawn, step], label=label, width=width, height=300),
            tag("p", words),
            table(head, rows, "roofline"),
        ]
    )


def _rate(roof: Roof) -> float:
    """B/s of what a roof is of."""
    return roof.ceiling / (roof.intensity or 1.0)


def _slope(roof: Roof, peak: float, bottom: float, low: float, high: float, kind: str) -> Series:
    rate = _rate(roof)
    start = max(low, bottom / rate)  # a slope that leaves the chart below is cut off there
    points = [(start, start * rate), (peak / rate, peak), (high, peak)]
    return Series(name=f"{roof.name}: {show(rate, 'bandwidth')}", kind=kind, points=points)


# -- anatomy ---------------------------------------------------------------------------------------


def collectives(a: Anatomy) -> Html:
    """Every collective of a device as alpha + beta x size."""
    rows = [
        (
            s.op,
            s.axis,
            f"{s.ranks}",
            show(s.size, "bytes"),
            f"{s.count}",
            seconds(s.alpha_s),
            seconds(s.beta_s),
            s.algorithm,
        )
        for s in a.sent[:12]
    ]
    if not rows:
        return tag("p", "No collectives: what is exchanged is in the breakdown.")
    head = ("collective", "axis", "ranks", "size", "times", "latency", "transfer", "algorithm")
    return table(head, rows, "collectives of one device in a step, nothing overlapped")


def explanation(e: Explanation, width: float = WIDTH) -> Html:
    """Bottlenecks, roofline, collectives and forms of parallelism."""
    forms = [
        (f.name, f"{f.used:,}", show(f.most, "count"), show(f.sent_bytes, "bytes"), f.limit) for f in e.forms
    ]
    watts = f"A device draws {show(e.watts, 'power')} on average ({e.watts_source})." if e.watts else ""
    parts = [
        ("Bottlenecks", bottlenecks(e.resources)),
        ("Roofline", roofline(e.anatomy, width)),
        ("Collectives", collectives(e.anatomy)),
        ("Parallelism", table(("form", "used", "at most", "sent per device", "limit"), forms, "parallelism")),
    ]
    return join(
        [*(section(title, body) for title, body in parts), tag("p", watts, class_="soft") if watts else None]
    )


def section(title: str, *body: object) -> Html:
    """A part of a report under a heading."""
    return tag("section", tag("h2", title), *body)


# -- plans side by side ----------------------------------------------------------------------------


def comparison(c: Comparison, width: float = WIDTH) -> Html:
    """Plans side by side: step time with its interval, what is exposed, memory, accuracy."""
    found = [(row, row.prediction) for row in c.rows if row.prediction is not None]
    if not found:
        return tag("p", f"None of these plans can run here: {c.rows[0].why_not}")
    axis = Axis(
        low=0, high=1.02 * _highest([p for _, p in found]), title="step time, 90 % interval", dimension="time"
    )
    rows = [_step_bar(row.plan or "all-reduce", p) for row, p in found]
    label = "; ".join(f"{bar.name}: {bar.note}" for bar in rows)
    kinds = {part.bound_by for _, p in found for part in p.breakdown if part.seconds}
    keys = charts.legend([(f"fill {kind}", kind) for kind in _KINDS if kind in kinds])
    return join([charts.bars(axis, rows, label=label, width=width), keys, _compared(c)])


_KINDS = ("compute", "memory", "communication", "bubble", "host", "latency")


def _highest(found: Sequence[DistributedPrediction]) -> float:
    """Where an axis of step times ends: the longest step, and its interval where that is not far beyond."""
    longest = max(p.step_s for p in found)
    return max(longest, min(2 * longest, max(p.step_s_high for p in found)))


def _step_bar(name: str, p: DistributedPrediction) -> Bar:
    blocks = [
        BarSegment(name=kind, value=spent, kind=kind)
        for kind in _KINDS
        if (spent := sum(part.seconds for part in p.breakdown if part.bound_by == kind)) > 0
    ]
    note = f"{seconds(p.step_s)}" + ("" if p.fit.fits else ", does not fit")
    return Bar(name=name, blocks=blocks, interval=(p.step_s_low, p.step_s_high), note=note)


def _compared(c: Comparison) -> Html:
    rows = [_compared_row(row, row is c.best) for row in c.rows]
    head = ("plan", "step", "throughput", "exposed", "memory", "what it may cost in accuracy")
    return details("numbers, and what each may cost in accuracy", table(head, rows, "plans side by side"))


def _compared_row(row: Row, best: bool) -> Sequence[object]:
    p, name = row.prediction, row.plan or "all-reduce"
    if p is None:
        return (name, "-", "-", "-", "-", f"cannot run: {row.why_not}")
    lossy = "none: the mean of all gradients, every step" if p.accuracy is None else p.accuracy.what
    said = f"{lossy} [{p.accuracy.source}]" if p.accuracy is not None else lossy
    fits = "" if p.fit.fits else ", does not fit"
    return (
        tag("b", f"{name} (fastest)") if best else name,
        seconds(p.step_s),
        f"{show(p.throughput, 'count')} {p.unit}/s",
        percent(p.exposed_s / p.step_s, 0),
        show(p.memory.reserved_bytes, "bytes") + fits,
        said,
    )


# -- scenarios side by side ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedAnswer:
    """A scenario that was kept: its name, its words by part, and its step, or why it has none."""

    name: str
    words: Mapping[str, str]
    prediction: DistributedPrediction | None = None
    why_not: str = ""


def side_by_side(entries: Sequence[ComparedAnswer], width: float = WIDTH) -> Html:
    """Scenarios in columns; words that differ are marked."""
    found = [(entry.name, entry.prediction) for entry in entries if entry.prediction is not None]
    axis = (
        Axis(
            low=0,
            high=1.02 * _highest([p for _, p in found]),
            title="step time, 90 % interval",
            dimension="time",
        )
        if found
        else None
    )
    chart = None
    if axis is not None:
        rows = [_step_bar(name, p) for name, p in found]
        label = "; ".join(f"{bar.name}: {bar.note}" for bar in rows)
        chart = charts.bars(axis, rows, label=label, width=width)
    head = ("", *(entry.name for entry in entries))
    parts = list(dict.fromkeys(part for entry in entries for part in entry.words))
    rows_ = [_differing(part, [entry.words.get(part, "") for entry in entries]) for part in parts]
    rows_ += [
        (name, *(write(e.prediction) if e.prediction else e.why_not for e in entries))
        for name, write in _FIGURES
    ]
    return join([chart, table(head, rows_, "scenarios side by side")])


def _differing(part: str, values: Sequence[str]) -> tuple[object, ...]:
    """A row of words; marked where they are not the same."""
    same = len(set(values)) == 1
    shown = [value or "as in the catalog" for value in values]
    return (part, *(value if same else tag("mark", value) for value in shown))


def _money(p: DistributedPrediction) -> str:
    return dollars(p.cost_per_unit * 1e9) if p.cost_per_unit is not None else "no price"


_FIGURES = (
    ("step time", lambda p: seconds(p.step_s)),
    ("90 % interval", lambda p: f"{seconds(p.step_s_low)} to {seconds(p.step_s_high)}"),
    ("throughput", lambda p: f"{show(p.throughput, 'count')} {p.unit}/s"),
    ("of peak FLOP/s", lambda p: percent(p.mfu)),
    ("devices", lambda p: f"{p.devices:,}"),
    ("exposed communication", lambda p: percent(p.exposed_s / p.step_s)),
    ("pipeline bubble", lambda p: percent(p.bubble_s / p.step_s)),
    ("memory reserved", lambda p: show(p.memory.reserved_bytes, "bytes")),
    ("fits", lambda p: "yes" if p.fit.fits else "no"),
    ("money for 1e9 units", _money),
)


# -- changes and sweeps ----------------------------------------------------------------------------


def change(c: Change, width: float = WIDTH) -> Html:
    """Before and after, and the reasons along the critical path."""
    entries = [
        ComparedAnswer(name="before", words={"plan": c.before.plan}, prediction=c.before),
        ComparedAnswer(name=", ".join(c.edits), words={"plan": c.after.plan}, prediction=c.after),
    ]
    reasons = [tag("li", str(reason)) for reason in c.reasons]
    head = tag("p", tag("b", f"{c.speedup:.3g} x"), " the throughput: ", ", ".join(c.edits))
    why = join([tag("p", "Why, along the critical path:"), tag("ul", *reasons)]) if reasons else None
    return join([head, side_by_side(entries, width), why])


def swept(s: Sweep, width: float = WIDTH, log: bool = False) -> Html:
    """Step time over the values of a field."""
    found = s.found
    numbers = [point.number for point, _ in found]
    plain = all(math.isfinite(number) for number in numbers)
    at = numbers if plain else [float(i) for i in range(len(found))]
    unit = found[0][0].value.lstrip("0123456789.eE+") if plain else "places in the table"
    x = Axis(
        low=min(at) if log else min(0.0, *at),
        high=max(at) or 1.0,
        title=f"{s.field}, {unit}" if unit else s.field,
        log=log,
    )
    y = Axis(low=0, high=1.05 * max(p.step_s_high for _, p in found), title="step time", dimension="time")
    steps = [(where, p) for where, (_, p) in zip(at, found, strict=True)]
    drawn = [
        Series(
            name="step, with its 90 % interval",
            kind="predicted",
            points=[(where, p.step_s) for where, p in steps],
            band=[(where, p.step_s_low, p.step_s_high) for where, p in steps],
            marked=True,
        ),
        Series(name="of it exposed communication", kind="naive", points=[(w, p.exposed_s) for w, p in steps]),
    ]
    label = f"step time over {s.field}"
    return join([charts.lines(x, y, drawn, label=label, width=width), points(s)])


def points(s: Sweep) -> Html:
    """Every value of a sweep, those that cannot run too."""
    rows = []
    for point in s.points:
        p = point.prediction
        if p is None:
            rows.append((point.value, "-", "-", "-", f"cannot run: {point.why_not}"))
            continue
        rate = f"{show(p.throughput, 'count')} {p.unit}/s"
        fits = "" if p.fit.fits else ", does not fit"
        memory = show(p.memory.reserved_bytes, "bytes") + fits
        rows.append((point.value, seconds(p.step_s), rate, memory, p.bound_by))
    return table((s.field, "step", "throughput", "memory", "bound by"), rows, f"{len(rows)} values")
