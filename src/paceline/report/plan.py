"""A planned answer as tables: the winner, its certificate, and those that lost."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from paceline import units
from paceline.cost import money
from paceline.report.learning import target_words, to_target_view
from paceline.report.page import page
from paceline.report.terminal import distributed_view, listing, rests_on
from paceline.spec.learning import TimeToTarget
from paceline.spec.planned import Answer, Planned, Range, Ranked, Study


def planned_view(p: Planned) -> RenderableType:
    """The winner's prediction, the certificate, why the others lost, and where the winner stays one."""
    lines: list[RenderableType] = [
        Text.assemble(("best plan  ", "bold"), (str(p.best.plan), "bold green"), (_mark(p), "bold yellow")),
        distributed_view(p.best.prediction),
        Text(),
        _certificate(p),
    ]
    if p.doubt:
        lines.append(Text(f"not measured: {p.doubt}", style="yellow"))
    if p.measured is not None:
        lines += [Text(), _ranking("the best of measured features", [p.measured], p.objective)]
    if p.steps:
        lines.append(_job(p))
    if _shows_money(p):
        lines.append(_price(p))
    lines += [Text(f"note: {note}", style="yellow") for note in p.notes]
    lines += [Text(), _ranking("top plans", p.top, p.objective)]
    if p.pareto:
        lines += [Text(), _ranking("no other plan is better in every respect", p.pareto, p.objective)]
    if p.ranges:
        rows = [[r.what, _stays(r), *_beyond(r)] for r in p.ranges]
        lines += [
            Text(),
            listing("the winner stays ahead of the next ones", ["of", "while it is", "below", "above"], rows),
        ]
    return Group(*lines)


def planned_html(p: Planned) -> str:
    """The same as one page."""
    return page(f"{p.model}: best plan", planned_view(p))


def study_view(study: Study) -> RenderableType:
    """One line per question, or as many plans of it as were asked for; then what was asked for besides."""
    found = [answer for answer in study.answers if answer.planned is not None]
    objectives = {answer.planned.objective for answer in found if answer.planned is not None}
    worth = sorted(objectives - {"time"})
    jobs = any(answer.planned is not None and answer.planned.steps for answer in found)
    soonest = study.soonest
    target = soonest.to_target if soonest is not None else None
    columns = [
        "model",
        "cluster",
        "batch",
        "step",
        *worth,
        *(["whole job"] if jobs else []),
        *([f"to {target_words(target)}"] if target is not None else []),
        "per second",
        "MFU",
        "memory",
        "gap",
        "plan",
    ]
    title = f"{len(study.answers)} questions, {units.show(study.elapsed_s, 'time')}"
    title += "" if study.engine == "local" else f" on {study.engine}"
    rows = [row for answer in study.answers for row in _lines(answer, worth, jobs, target is not None)]
    besides = [line for answer in found for line in _besides(answer)]
    planned = [answer.planned for answer in found if answer.planned is not None]
    prices = {one.best.cluster.device.name: _price(one) for one in planned if _shows_money(one)}
    if soonest is not None and soonest.planned is not None and target is not None:
        besides = [*besides, Text(), _soonest(soonest.planned, target)]
    return Group(listing(title, columns, rows), *prices.values(), *besides)


def _soonest(planned: Planned, target: TimeToTarget) -> RenderableType:
    """The batch and the plan that are at the target first."""
    head = f"soonest at the target: batch {planned.gbs}, {planned.best.plan}"
    return Group(Text(head, style="bold green"), to_target_view(target))


def study_html(study: Study) -> str:
    """The same as one page."""
    return page("study of plans", study_view(study))


def _lines(answer: Answer, worth: Sequence[str], jobs: bool, targets: bool) -> list[list[str]]:
    """The plans of one question, or why it has none."""
    question, planned = answer.question, answer.planned
    asked = question.cluster or f"{question.gpus} x {question.device}"
    if planned is None:
        blanks = ["-"] * (5 + len(worth) + jobs + targets)
        return [[question.model, asked, str(question.gbs or "-"), *blanks, answer.error]]
    shown = planned.top[: int(question.options.get("top", 1))]
    return [
        _line(planned, ranked, worth, jobs, _target(answer, place, targets))
        for place, ranked in enumerate(shown)
    ]


def _target(answer: Answer, place: int, targets: bool) -> list[str]:
    """The cell of the time to the target, which is that of the best plan of an answer."""
    if not targets:
        return []
    if place or answer.to_target is None:
        return ["-"]
    return [units.show(answer.to_target.value_s, "time")]


def _line(
    planned: Planned, ranked: Ranked, worth: Sequence[str], jobs: bool, target: Sequence[str]
) -> list[str]:
    found = ranked.prediction
    values = [value for objective in worth for value in _worth(ranked, objective)]
    job = [_whole_job(planned, ranked)] if jobs else []
    return [
        planned.model,
        ranked.cluster.name,
        str(planned.gbs),
        units.show(found.step_s, "time"),
        *values,
        *job,
        *target,
        f"{found.throughput:,.0f} {found.unit}",
        f"{100 * found.mfu:.1f} %",
        units.show(found.peak_bytes, "bytes"),
        f"{planned.gap_pct:.2f} %",
        f"{ranked.plan}{'  (never measured)' if ranked.unmeasured else ''}",
    ]


def _besides(answer: Answer) -> list[RenderableType]:
    """Notes and the front of one question of a study."""
    planned = answer.planned
    if planned is None:
        return []
    where = f"{planned.model} on {planned.best.cluster.name}, batch {planned.gbs}"
    notes = [*([f"not measured: {planned.doubt}"] if planned.doubt else []), *planned.notes]
    lines: list[RenderableType] = [Text(f"note: {where}: {note}", style="yellow") for note in notes]
    if planned.pareto:
        title = f"{where}: no other plan is better in every respect"
        lines += [Text(), _ranking(title, planned.pareto, planned.objective)]
    return lines


def _certificate(p: Planned) -> Text:
    proof = f"no plan of the {p.space:,} in this space is better by more than {p.gap_pct:.2f} %"
    reasons = [
        f"{p.by_memory:,} do not fit into memory",
        f"{p.by_bound:,} cannot be faster (bound)",
        f"{p.by_evaluation:,} simulated",
    ]
    if p.undecided:
        reasons.append(f"{p.undecided:,} left within the gap")
    return Text.assemble(
        ("certificate  ", "bold"),
        f"{proof}, as this model predicts: {', '.join(reasons)}; {p.elapsed_s:.1f} s",
    )


def _shows_money(p: Planned) -> bool:
    return p.objective == "cost" or bool(p.steps)


def _price(p: Planned) -> Text:
    """What its money rests on, or why it shows none."""
    device = p.best.cluster.device
    return rests_on(money.evidence(device, money.price(device), money.FLAG))


def _job(p: Planned) -> Text:
    return Text.assemble(
        ("whole job    ", "bold"),
        f"{p.steps:,.0f} steps, {_whole_job(p, p.best)}, without failures and evaluation",
    )


def _whole_job(p: Planned, ranked: Ranked) -> str:
    """Time and money of all steps under a plan."""
    if not p.steps:
        return "-"
    cost = f", {ranked.cost * p.steps:,.0f} USD" if ranked.cost else ""
    return units.show(p.steps * ranked.prediction.step_s, "time") + cost


def _ranking(title: str, found: Sequence[Ranked], objective: str) -> RenderableType:
    ran = any(r.measured_s is not None for r in found)
    rows = [
        [
            str(i),
            units.show(r.prediction.step_s, "time"),
            *(_truth(r) if ran else []),
            *_worth(r, objective),
            f"{100 * r.prediction.mfu:.1f} %",
            units.show(r.prediction.peak_bytes, "bytes"),
            str(r.prediction.devices),
            str(r.plan),
            r.lost or "-",
            r.lossy or "-",
        ]
        for i, r in enumerate(found, 1)
    ]
    doubtful = any(r.unmeasured for r in found)
    worth = [] if objective == "time" else [objective]
    measured = ["measured", "predicted first"] if ran else []
    last = ["never measured"] if doubtful else []
    columns = [
        "",
        "step",
        *measured,
        *worth,
        "MFU",
        "memory",
        "devices",
        "plan",
        "lost by",
        "may change training",
        *last,
    ]
    return listing(
        title,
        columns,
        [
            [*row, *([", ".join(r.unmeasured) or "-"] if doubtful else [])]
            for row, r in zip(rows, found, strict=True)
        ],
    )


def _mark(p: Planned) -> str:
    """What is written beside the name of a plan that rests on what was never measured."""
    if not p.best.unmeasured:
        return ""
    return "  (never measured)" if p.settled else "  (never measured, wins by less than its uncertainty)"


def _truth(r: Ranked) -> list[str]:
    return [
        units.show(seconds, "time") if seconds is not None else "-" for seconds in (r.measured_s, r.first_s)
    ]


def _worth(r: Ranked, objective: str) -> list[str]:
    if objective == "cost":
        return [_dollars(r.cost) if r.cost else "-"]
    return [units.show(r.prediction.energy_j or 0.0, "energy")] if objective == "energy" else []


def _dollars(cost: float) -> str:
    return f"{cost:,.2f} USD" if cost >= 1 else f"{cost:.3g} USD"


def _stays(r: Range) -> str:
    low = f"above {r.low:.2f} x" if r.low else ""
    high = f"below {r.high:.2f} x" if r.high else ""
    return " and ".join(filter(None, (low, high))) or "1/4 to 4 x"


def _beyond(r: Range) -> list[str]:
    return [r.below or "-", r.above or "-"]
