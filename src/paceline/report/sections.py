"""Parts of an answer as HTML with charts: the explorer, reports and notebooks are put together from these."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.report import charts
from paceline.report.charts import Axis, Bar, BarSegment, Mark, Series
from paceline.report.markup import Html, details, join, table, tag
from paceline.spec.prediction import DistributedPrediction, Evidence, Memory, Prediction
from paceline.spec.whatif import FigureRange, Scaling, TrainingCost
from paceline.units import show

#: pixels of a chart in a report
WIDTH = 560
Step = Prediction | DistributedPrediction


def seconds(value: float) -> str:
    """A time for people; nothing is 0."""
    return show(value, "time") if value else "0 s"


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


# -- headline --------------------------------------------------------------------------------------


def headline(p: Step, job: TrainingCost | None = None, width: float = WIDTH) -> Html:
    """Step time with its interval, throughput, share of peak, whether it fits; and of a whole job."""
    meter = charts.meter(p.step_s, p.step_s_low, p.step_s_high, dimension="time", width=min(width, 260))
    interval = f"90 %: {seconds(p.step_s_low)} to {seconds(p.step_s_high)}"
    cards = [
        _card("step time", seconds(p.step_s), meter, interval, class_="card wide"),
        _card("throughput", f"{show(p.throughput, 'count')} {p.unit}/s", _per_device(p)),
        _card("of peak FLOP/s", percent(p.mfu), "model FLOPs utilisation (MFU)"),
        fit_card(p),
        *(_job_cards(job) if job is not None else _step_cards(p)),
    ]
    return tag("div", *cards, class_="cards")


def _card(name: str, value: object, *notes: object, class_: str = "card") -> Html:
    lines = (tag("div", note, class_="note") for note in notes if note)
    return tag(
        "div", tag("div", name, class_="name"), tag("div", value, class_="value"), *lines, class_=class_
    )


def _per_device(p: Step) -> str:
    devices = p.devices if isinstance(p, DistributedPrediction) else 1
    return f"{show(p.throughput / devices, 'count')} {p.unit}/s a device, {devices:,} devices"


def fit_card(p: Step) -> Html:
    """Whether the fullest device has memory enough."""
    used = f"{show(p.memory.reserved_bytes, 'bytes')} of {show(p.memory.available_bytes, 'bytes')}"
    if p.fit.fits:
        return _card("memory", "fits", used)
    short = show(p.fit.needed_bytes - p.fit.available_bytes, "bytes")
    return _card("memory", "does not fit", f"{used}: {short} too much", class_="card bad")


def _step_cards(p: Step) -> list[Html]:
    energy = "not known" if p.energy_j is None else show(p.energy_j, "energy")
    each = None if p.cost_per_unit is None else p.cost_per_unit * p.throughput * p.step_s
    money = "no price" if each is None else dollars(each)
    return [_card("money per step", money, p.price), _card("energy per step", energy)]


def _job_cards(job: TrainingCost) -> list[Html]:
    trained = f"{show(job.units, 'count')} {job.unit} in {job.steps:,} steps, with failures and checkpoints"
    money = ("no price", "") if job.money is None else (dollars(job.money.value), _range(job.money, dollars))
    energy = (
        ("not known", "") if job.energy_j is None else (_wh(job.energy_j.value), _range(job.energy_j, _wh))
    )
    return [
        _card(
            "time to train",
            seconds(job.time_s.value),
            _range(job.time_s, seconds),
            trained,
            class_="card wide",
        ),
        _card("money", *money),
        _card("energy", *energy),
    ]


def _range(span: FigureRange, write: object) -> str:
    assert callable(write)
    return f"{write(span.low)} to {write(span.high)}"


def dollars(value: float) -> str:
    """USD, whole where they are many."""
    if value >= 1e6:
        return f"{show(value, 'count')} USD"
    return f"{value:,.0f} USD" if value >= 100 else f"{value:,.3g} USD"


def _wh(joules: float) -> str:
    return f"{show(joules / 3600, 'count')}Wh"


# -- where the time goes ---------------------------------------------------------------------------


def time(p: Step, width: float = WIDTH) -> Html:
    """The step as one stacked bar with its interval, and each part."""
    parts = [part for part in p.breakdown if part.seconds > 0]
    blocks = [BarSegment(name=part.name, value=part.seconds, kind=part.bound_by) for part in parts]
    top = max(p.step_s_high, sum(block.value for block in blocks))
    axis = Axis(
        low=0, high=top * 1.02, title="seconds of a step; the whisker is the 90 % interval", dimension="time"
    )
    bar = Bar(name="", blocks=blocks, interval=(p.step_s_low, p.step_s_high))
    label = "where the time goes: " + ", ".join(f"{part.name} {percent(part.share, 0)}" for part in parts[:8])
    rows = [
        (_named(part.name, part.bound_by), seconds(part.seconds), _share(part.share), part.bound_by)
        for part in parts
    ]
    return join(
        [
            charts.bars(axis, [bar], label=label, width=width),
            table(("part", "time", "share", "bound by"), rows, "parts of the step"),
        ]
    )


def _named(name: str, kind: str) -> Html:
    return join([tag("span", class_=f"key fill {kind}", aria_hidden="true"), " ", name])


def _share(share: float) -> Html:
    bar = tag("meter", percent(share), value=round(share, 4), min=0, max=1, aria_label="share of the step")
    return tag("span", bar, " ", percent(share), class_="share")


# -- memory ----------------------------------------------------------------------------------------


def memory(p: Step, width: float = WIDTH) -> Html:
    """What a device of each stage holds, by kind, against what it has."""
    stages = [stage.memory for stage in p.stages] if isinstance(p, DistributedPrediction) else [p.memory]
    shown = _distinct(stages)
    available = p.memory.available_bytes
    high = 1.04 * max(available, *(max(m.reserved_high_bytes, sum(m.by_kind.values())) for _, m in shown))
    axis = Axis(
        low=0,
        high=high,
        title="bytes of one device; the whisker is 90 % of what is reserved",
        dimension="bytes",
    )
    rows = [_memory_bar(name, found) for name, found in shown]
    label = "; ".join(
        f"{bar.name or 'device'} holds {bar.note or show(bar.total, 'bytes')}" for bar in rows[:8]
    )
    capacity = (float(available), f"capacity {show(available, 'bytes')}")
    kinds = [
        (f"fill {kind}", f"{kind} {show(size, 'bytes')}") for kind, size in p.memory.by_kind.items() if size
    ]
    return join(
        [charts.bars(axis, rows, label=label, width=width, limit=capacity), charts.legend(kinds), remedies(p)]
    )


def _distinct(stages: Sequence[Memory]) -> list[tuple[str, Memory]]:
    """Stages of a pipeline by name, equal neighbours together."""
    if len(stages) == 1:
        return [("", stages[0])]
    found: list[tuple[int, int, Memory]] = []
    for i, one in enumerate(stages):
        if found and found[-1][2].by_kind == one.by_kind:
            found[-1] = (found[-1][0], i, one)
        else:
            found.append((i, i, one))
    return [(f"stage {a}" if a == b else f"stages {a} to {b}", one) for a, b, one in found]


def _memory_bar(name: str, found: Memory) -> Bar:
    blocks = [BarSegment(name=kind, value=size, kind=kind) for kind, size in found.by_kind.items() if size]
    interval = (float(found.reserved_low_bytes), float(found.reserved_high_bytes))
    note = f"{show(found.peak_bytes, 'bytes')} at the peak, {show(found.reserved_bytes, 'bytes')} reserved"
    return Bar(name=name, blocks=blocks, interval=interval, note=note if name else "")


def remedies(p: Step) -> Html | None:
    """What would help a step that does not fit; plans can be taken at once on the page."""
    if p.fit.fits or not p.fit.remedies:
        return None
    rows = [
        tag("li", _remedy(name), f" needs about {show(size, 'bytes')}") for name, size in p.fit.remedies[:5]
    ]
    return join([tag("p", "It does not fit. What would help:"), tag("ul", *rows)])


def _remedy(name: str) -> Html:
    words = name.removeprefix("plan ")
    if words == name:
        return tag("b", name)
    return tag("button", words, type="button", class_="take", data_path="plan", data_value=words)


# -- scaling ---------------------------------------------------------------------------------------


def scaling(curves: Sequence[Scaling], width: float = WIDTH, log: bool = False) -> Html:
    """Throughput against devices: predicted, ideal and naive, and where devices cease to pay."""
    return join(_curve(curve, width, log) for curve in curves)


def _curve(c: Scaling, width: float, log: bool) -> Html:
    every = [*c.ideal, *c.naive, *c.high, *c.low]
    x = Axis(low=c.devices[0] if log else 0, high=c.devices[-1], title="devices", log=log)
    y = Axis(low=0.9 * min(every) if log else 0, high=1.05 * max(every), title=f"{c.unit}/s", log=log)

    def points(values: Sequence[float]) -> list[tuple[float, float]]:
        return list(zip(c.devices, values, strict=True))

    drawn = [
        Series(name="ideal: the first point's, times devices", kind="ideal", points=points(c.ideal)),
        Series(name="naive: line rate, no overlap", kind="naive", points=points(c.naive)),
        Series(
            name="predicted, with its 90 % interval",
            kind="predicted",
            points=points(c.throughput),
            marked=True,
            band=list(zip(c.devices, c.low, c.high, strict=True)),
        ),
    ]
    marks = [Mark(at=c.pays_to, text="pays up to here")] if c.pays_to is not None else []
    title = {
        "weak": "weak scaling: each replica keeps its batch",
        "strong": "strong scaling: the whole batch is kept",
    }[c.kind]
    label = f"{title}; {_pays(c)}"
    rows = [
        (f"{n:,}", f"{show(t, 'count')} {c.unit}/s", percent(e, 0))
        for n, t, e in zip(c.devices, c.throughput, c.efficiency, strict=True)
    ]
    return tag(
        "figure",
        tag("figcaption", title),
        charts.lines(x, y, drawn, label=label, width=width, marks=marks),
        tag("p", _pays(c)),
        details("numbers", table(("devices", "throughput", "of ideal"), rows, title)),
    )


def _pays(c: Scaling) -> str:
    last = f"{percent(c.efficiency[-1], 0)} of ideal at {c.devices[-1]:,} devices"
    if c.pays_to is None:
        return f"{last}; every device added brings at least half of what the first ones bring."
    less = "another one brings less than half of what the first ones bring"
    return f"{last}; beyond {c.pays_to:,} devices {less}."


# -- provenance ------------------------------------------------------------------------------------


def sources(evidence: Sequence[Evidence]) -> Html:
    """What an answer rests on: each input, how it is known, and where from."""
    rows = [(tag("span", e.what, class_=f"kind {e.kind}"), e.kind, e.source) for e in evidence]
    return table(("rests on", "how it is known", "source"), rows, "what the answer rests on")
