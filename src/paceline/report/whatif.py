"""What-if answers for a terminal: changes with reasons, sweeps, bottlenecks, comparisons, whole jobs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.report.learning import target_words
from paceline.report.terminal import distributed_view, rests_on, spent
from paceline.spec.learning import TimeToTarget
from paceline.spec.prediction import DistributedPrediction, Evidence
from paceline.spec.whatif import (
    Anatomy,
    BreakEven,
    Change,
    Comparison,
    Explanation,
    FigureRange,
    Scaling,
    Sweep,
    TrainingCost,
)
from paceline.units import show

#: rows of a sweep that a terminal shows; the file of --json has all
MOST_ROWS = 40
_BAR = 30


def _table(*columns: str, left: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 or column in left else "right")
    return table


def _step(p: DistributedPrediction) -> str:
    return f"{show(p.step_s, 'time')} ({show(p.step_s_low, 'time')} to {show(p.step_s_high, 'time')})"


def _rate(value: float, unit: str) -> str:
    return f"{show(value, 'count')} {unit}/s"


# -- change ----------------------------------------------------------------------------------------


def change_view(c: Change) -> RenderableType:
    """Before and after, and the reasons."""
    table = _table("", "before", "after", left=("before", "after"))
    rows = [
        ("step", _step(c.before), _step(c.after)),
        ("throughput", _rate(c.before.throughput, c.before.unit), _rate(c.after.throughput, c.after.unit)),
        ("share of peak", f"{100 * c.before.mfu:.1f} %", f"{100 * c.after.mfu:.1f} %"),
        ("devices", str(c.before.devices), str(c.after.devices)),
        ("batch", str(c.before.batch), str(c.after.batch)),
        ("micro-batches", str(c.before.micro_batches), str(c.after.micro_batches)),
        ("plan", c.before.plan, c.after.plan),
        ("memory", _fit(c.before), _fit(c.after)),
        ("bottleneck", c.before.bound_by, c.after.bound_by),
    ]
    for name, before, after in rows:
        if before != after or name in ("step", "throughput"):
            table.add_row(name, before, after)
    style = "bold green" if c.speedup >= 1 else "bold red"
    asked = Text.assemble((c.before.model, "bold"), f" on {c.before.cluster}: {c.before.plan}")
    factor = (f"{c.speedup:.3g} x", style)
    head = Text.assemble((", ".join(c.edits), "bold"), "  ->  ", factor, " the throughput")
    why = [Text(f"  {reason}", style="green" if reason.saved_s > 0 else "red") for reason in c.reasons]
    reasons = [Text(), Text("why, along the critical path:"), *why] if why else []
    return Group(asked, head, Text(), table, *reasons)


def _fit(p: DistributedPrediction) -> str:
    return show(p.memory.reserved_bytes, "bytes") + ("" if p.fit.fits else ", does not fit")


# -- sweep -----------------------------------------------------------------------------------------


def sweep_view(s: Sweep) -> RenderableType:
    """A row per value; beside a scaling curve its ideal and naive lines."""
    curve = s.scaling
    extra = ("efficiency", "naive") if curve is not None else ()
    table = _table(s.field, "step", "throughput", "exposed", "memory", "bound by", *extra, left=("bound by",))
    places = {devices: i for i, devices in enumerate(curve.devices)} if curve is not None else {}
    shown = list(s.points)
    if len(shown) > MOST_ROWS:
        every = -(-len(shown) // MOST_ROWS)
        shown = [point for i, point in enumerate(shown) if i % every == 0 or i == len(shown) - 1]
    for point in shown:
        p = point.prediction
        if p is None:
            table.add_row(point.value, "-", "-", "-", "-", Text(point.why_not[:90], style="red"))
            continue
        more: tuple[str, ...] = ()
        if curve is not None and p.devices in places:
            i = places[p.devices]
            more = (f"{100 * curve.efficiency[i]:.0f} %", f"{100 * curve.naive[i] / curve.ideal[i]:.0f} %")
        exposed = f"{100 * p.exposed_s / p.step_s:.0f} %"
        table.add_row(
            point.value,
            show(p.step_s, "time"),
            _rate(p.throughput, p.unit),
            exposed,
            _fit(p),
            p.bound_by,
            *more,
        )
    foot = [Text(f"{len(s.points)} points", style="dim")]
    return Group(
        Text(s.subject, style="bold"), table, *([Text(_pays(curve))] if curve is not None else []), *foot
    )


def _pays(c: Scaling) -> str:
    last = f"{c.kind} scaling: {100 * c.efficiency[-1]:.0f} % of ideal at {c.devices[-1]} devices"
    if c.pays_to is None:
        return f"{last}; every device added brought at least half of what the first ones bring"
    return f"{last}; beyond {c.pays_to} devices another brings less than half of what the first ones bring"


# -- explain ---------------------------------------------------------------------------------------


def explanation_view(e: Explanation) -> RenderableType:
    """The prediction, its bottlenecks, three readings of it, and its concurrency."""
    known = e.watts is not None
    watts = (
        f"a device draws {show(e.watts or 0.0, 'power')} on average ({e.watts_source})"
        if known
        else "no power limit is known of this device"
    )
    return Group(
        distributed_view(e.prediction),
        Text(),
        *_bottlenecks(e),
        Text(),
        *_roofline(e.anatomy),
        Text(),
        *_readings(e.anatomy),
        Text(),
        *_concurrency(e),
        Text(),
        Text(watts, style="dim"),
    )


def _bottlenecks(e: Explanation) -> list[RenderableType]:
    table = _table(
        "if it had no limit",
        "saves",
        "step",
        "1 % more of it saves",
        "then it would be",
        "edit",
        left=("then it would be", "edit"),
    )
    for b in e.resources.bottlenecks:
        share = b.saved_s / e.resources.step_s
        table.add_row(
            b.name,
            f"{show(b.saved_s, 'time') if b.saved_s > 0 else '0'} ({100 * share:.1f} %)",
            show(b.step_s, "time"),
            f"{b.elasticity:.3f} %",
            b.then,
            f"--set {b.edit}",
        )
    rest = f"the rest, {100 * e.resources.fixed:.0f} %, is latency, or what has no field (a server's memory)"
    fixed = f"elasticities add up to {1 - e.resources.fixed:.2f}; {rest}"
    return [table, Text(fixed, style="dim")]


def _roofline(a: Anatomy) -> list[RenderableType]:
    table = _table("roofline, of one device", "FLOP per byte", "allows", "busy at least", "")
    for roof in a.roofs:
        bar = "█" * max(1, round(_BAR * min(1.0, roof.seconds / a.step_s)))
        intensity = f"{roof.intensity:,.0f}" if roof.intensity is not None else "-"
        table.add_row(
            roof.name, intensity, show(roof.ceiling, "flops"), f"{100 * roof.seconds / a.step_s:.1f} %", bar
        )
    return [
        table,
        Text(
            f"achieved: {show(a.achieved, 'flops')}; the lowest ceiling is"
            f" {min(a.roofs, key=lambda r: r.ceiling).name}",
            style="dim",
        ),
    ]


def _readings(a: Anatomy) -> list[RenderableType]:
    columns = (
        "collectives of a device, per step",
        "axis",
        "ranks",
        "size",
        "times",
        "alpha",
        "beta x size",
        "algorithm",
    )
    table = _table(*columns, left=("axis", "algorithm"))
    for s in a.sent[:8]:
        size, alpha, beta = show(s.size, "bytes"), spent(s.alpha_s), spent(s.beta_s)
        table.add_row(s.op, s.axis, str(s.ranks), size, str(s.count), alpha, beta, s.algorithm)
    if len(a.sent) > 8:
        rest = a.sent[8:]
        alpha, beta = (spent(sum(getattr(s, name) for s in rest)) for name in ("alpha_s", "beta_s"))
        table.add_row("the rest", "", "", "", str(sum(s.count for s in rest)), alpha, beta, "")
    b = a.bsp
    line = (
        f"BSP: w + h g + s l = {show(b['w_s'], 'time')} + {show(b['h_bytes'], 'bytes')} x"
        f" {b['g_s_per_byte'] * 1e9:.3g} ns/B + {b['supersteps']:.0f} x {show(b['l_s'], 'time')} ="
        f" {show(b['seconds'], 'time')} without overlap; with it {show(a.step_s, 'time')}"
    )
    return (
        [table, Text(line)]
        if a.sent
        else [Text("no collectives: what is exchanged is in the breakdown above", style="dim")]
    )


def _concurrency(e: Explanation) -> list[RenderableType]:
    table = _table("layer", "runs", "work", "depth", "average parallelism")
    for layer in e.anatomy.layers[:8]:
        table.add_row(
            layer.name,
            str(layer.count),
            show(layer.work, "count"),
            f"{layer.depth:.0f}",
            show(layer.parallelism, "count"),
        )
    forms = _table("parallelism", "used", "at most", "sent per device", "limit", left=("limit",))
    for form in e.forms:
        forms.add_row(
            form.name,
            f"{form.used:,}",
            show(form.most, "count"),
            show(form.sent_bytes, "bytes") if form.sent_bytes else "-",
            form.limit,
        )
    return [table, Text(), forms]


# -- compare ---------------------------------------------------------------------------------------


def comparison_view(c: Comparison) -> RenderableType:
    """Plans side by side, the fastest that fits marked."""
    even = any(row.break_even is not None for row in c.rows)
    target = next((row.to_target for row in c.rows if row.to_target is not None), None)
    table = _table(
        "plan",
        "step",
        "throughput",
        "",
        "exposed",
        "memory",
        *(["pays at"] if even else []),
        *([f"to {target_words(target)}"] if target is not None else []),
        "what it may cost in accuracy",
        left=("", "what it may cost in accuracy"),
    )
    first = next((row.prediction for row in c.rows if row.prediction is not None), None)
    most = max((row.prediction.throughput for row in c.rows if row.prediction is not None), default=1.0)
    shared = _shared(c)
    for row in c.rows:
        p = row.prediction
        if p is None or first is None:
            table.add_row(
                row.plan,
                "-",
                "-",
                "",
                "-",
                "-",
                *(["-"] if even else []),
                *(["-"] if target is not None else []),
                Text(row.why_not[:110], style="red"),
            )
            continue
        bar = Text(f"{'█' * max(1, round(12 * p.throughput / most))} {p.throughput / first.throughput:.2f}x")
        style = "" if p.fit.fits else "red"
        if row is c.best:
            style = "bold green"
        note = p.accuracy.what if p.accuracy is not None else "none: the sum of all gradients, every step"
        table.add_row(
            Text(_named(row.plan, p, shared), style=style),
            show(p.step_s, "time"),
            _rate(p.throughput, p.unit),
            bar,
            f"{100 * p.exposed_s / p.step_s:.0f} %",
            _fit(p),
            *([_even(row.break_even)] if even else []),
            *([_to_target(row.to_target)] if target is not None else []),
            note,
        )
    sources = [
        f"  {row.plan}: {p.accuracy.source}"
        for row in c.rows
        if (p := row.prediction) is not None and p.accuracy is not None
    ]
    said = (
        [Text("accuracy, according to:", style="dim"), *(Text(source, style="dim") for source in sources)]
        if sources
        else []
    )
    headline = f"{c.subject}: {' '.join(shared)}" if shared else c.subject
    return Group(Text(headline, style="bold"), table, *said)


def _settings(p: DistributedPrediction) -> list[str]:
    """The length of samples, where they have one, and the precision, as words of a plan."""
    return [*([f"seq={p.seq}"] if p.seq else []), p.precision]


def _shared(c: Comparison) -> list[str]:
    """The settings that are the same under all plans: the headline has them, rows have the others."""
    each = [_settings(row.prediction) for row in c.rows if row.prediction is not None]
    return [word for word in each[0] if all(word in settings for settings in each)] if each else []


def _named(plan: str, p: DistributedPrediction, shared: list[str]) -> str:
    """A plan as it was written, with those of its settings that neither it nor the headline says."""
    said = {*shared, *plan.split()}
    return " ".join([plan, *(word for word in _settings(p) if word not in said)])


def _to_target(found: TimeToTarget | None) -> str:
    if found is None:
        return "no curve"
    mark = "" if found.measured else " (extrapolated)"
    return f"{show(found.value_s, 'time')}, {found.steps:,.0f} steps{mark}"


def _even(found: BreakEven | None) -> str:
    if found is None:
        return "-"
    if found.always:
        return "any rate"
    return " and ".join(_range(*ends) for ends in found.ranges) or "no rate"


def _range(low: float | None, high: float | None) -> str:
    """The rates between two in words; None: no such end."""
    start, end = ("" if rate is None else f"{show(8 * rate, 'count')}b/s" for rate in (low, high))
    if not start:
        return f"below {end}"
    return f"{start} to {end}" if end else f"above {start}"


# -- job -------------------------------------------------------------------------------------------


def job_view(j: TrainingCost) -> RenderableType:
    """Time to train, goodput, money, energy."""
    table = _table("the whole job", "", "90 %, or a stated range", left=("", "90 %, or a stated range"))

    def add(name: str, span: FigureRange | None, dimension: str, scale: float = 1.0, unit: str = "") -> None:
        if span is not None:
            low, high = (show(scale * value, dimension) + unit for value in (span.low, span.high))
            table.add_row(name, show(scale * span.value, dimension) + unit, f"{low} to {high}")

    add("time to train", j.time_s, "time")
    add("goodput", j.goodput, "fraction")
    add("device-hours", j.device_hours, "count")
    if j.money is None:
        table.add_row("money", "no price", "")
    add("money", j.money, "count", unit=" USD")
    add("energy", j.energy_j, "count", 1 / 3600, "Wh")
    more = f", {100 * j.extra:.0f} % more for its batch" if j.extra else ""
    lines = [
        (
            f"{show(j.units, 'count')} {j.unit}{more} in {j.steps:,} steps of {show(j.step_s, 'time')} on"
            f" {j.devices:,} devices"
        ),
        (
            f"interrupted every {show(j.interrupted_s, 'time')}; a checkpoint"
            f" ({show(j.checkpoint_bytes, 'bytes')}) takes {show(j.checkpoint_s, 'time')}"
        ),
        (
            f"and is written every {show(j.interval_s, 'time')}, the interval that loses least unless one is"
            " given"
        ),
        *([f"evaluation {show(j.evaluation_s, 'time')} in all"] if j.evaluation_s else []),
    ]
    return Group(table, *(Text(line) for line in lines), *_rests(j.provenance))


def _rests(evidence: Sequence[Evidence]) -> list[Text]:
    return [rests_on(e) for e in evidence]
