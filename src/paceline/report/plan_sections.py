"""A search's answer as HTML: the best plan, its certificate, those that lost, and the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.report.charts import Axis, Frame, legend, svg
from paceline.report.markup import Html, details, join, table, tag
from paceline.report.sections import WIDTH, dollars, headline, memory, percent, seconds, time
from paceline.spec.planned import Planned, Range, Ranked
from paceline.units import show


def planned(p: Planned, width: float = WIDTH) -> Html:
    """The best plan with its certificate, the runners-up, and the front of time and memory."""
    best = p.best
    stopped = " (stopped early: the best so far)" if p.interrupted else ""
    name = tag("p", tag("b", str(best.plan)), stopped, " ", _take(best))
    notes = [tag("li", note) for note in [*([p.doubt] if p.doubt else []), *p.notes]]
    return join(
        [
            name,
            certificate(p),
            tag("ul", *notes, class_="soft") if notes else None,
            ranking(p.top, p.objective, "the best plans, and why the others lost"),
            front(p.pareto, width) if len(p.pareto) > 1 else None,
            stays(p.ranges) if p.ranges else None,
        ]
    )


def _take(ranked: Ranked) -> Html:
    return tag(
        "button",
        "Take this plan",
        type="button",
        class_="take",
        data_path="plan",
        data_value=str(ranked.plan),
    )


def certificate(p: Planned) -> Html:
    """What was proven of all plans of the space."""
    reasons = [
        f"{p.by_memory:,} do not fit into memory",
        f"{p.by_bound:,} cannot be faster (a lower bound)",
        f"{p.by_evaluation:,} simulated",
        *([f"{p.undecided:,} left within the gap"] if p.undecided else []),
    ]
    better = f"is better by more than {p.gap_pct:.2f} %, as the model predicts"
    proof = f"No plan of the {p.space:,} in this space {better}"
    return tag("p", tag("b", "Certificate. "), f"{proof}: {', '.join(reasons)}; {p.elapsed_s:.1f} s.")


def ranking(found: Sequence[Ranked], objective: str, caption: str) -> Html:
    """Plans in a table."""
    rows = [
        (
            tag(
                "button", str(r.plan), type="button", class_="take", data_path="plan", data_value=str(r.plan)
            ),
            seconds(r.prediction.step_s),
            *([_worth(r, objective)] if objective != "time" else []),
            percent(r.prediction.mfu),
            show(r.prediction.peak_bytes, "bytes"),
            r.lost or "-",
            ", ".join(r.unmeasured) or "-",
        )
        for r in found
    ]
    worth = [objective] if objective != "time" else []
    head = ("plan", "step", *worth, "MFU", "memory", "lost by", "never measured")
    return table(head, rows, caption)


def _worth(r: Ranked, objective: str) -> str:
    if objective == "cost":
        return "no price" if r.cost is None else dollars(r.cost)
    return show(r.prediction.energy_j or 0.0, "energy")


def front(found: Sequence[Ranked], width: float = WIDTH) -> Html:
    """Step time against memory: no other plan is better in both."""
    points = sorted((r.prediction.step_s, float(r.prediction.peak_bytes), r) for r in found)
    x = Axis(low=0, high=1.1 * max(p[0] for p in points), title="step time", dimension="time")
    y = Axis(low=0, high=1.15 * max(p[1] for p in points), title="memory of a device", dimension="bytes")
    frame = Frame(width, 260, x, y, top=26)
    path = frame.path([(seconds_, size) for seconds_, size, _ in points])
    drawn = [tag("polyline", points=path, class_="line ideal"), *(_dot(frame, *point) for point in points)]
    label = f"Pareto front of {len(points)} plans, step time against memory"
    keys = legend(
        [("line ideal", "Pareto front: no other plan is better in both; hover a point for its plan")]
    )
    rows = ((str(r.plan), seconds(step_s), show(size, "bytes")) for step_s, size, r in points)
    numbers = details("numbers", table(("plan", "step", "memory"), rows, "Pareto front"))
    return tag(
        "figure",
        tag("figcaption", "Time against memory"),
        svg(width, 260, label, frame.axes(), *drawn),
        keys,
        numbers,
    )


def _dot(frame: Frame, step_s: float, size: float, ranked: Ranked) -> Html:
    x, y = frame.at(step_s, size)
    title = f"{ranked.plan}: {seconds(step_s)}, {show(size, 'bytes')}"
    return tag("circle", tag("title", title), cx=x, cy=y, r=5, class_="dot predicted")


def stays(ranges: Sequence[Range]) -> Html:
    """Over what factors of a quantity the winner stays the winner."""
    rows = [(r.what, _while(r), r.below or "-", r.above or "-") for r in ranges]
    head = ("of", "while it is", "who wins below", "who wins above")
    return details(
        "where this plan stays the best", table(head, rows, "the winner stays ahead of the next ones")
    )


def _while(r: Range) -> str:
    low = f"above {r.low:.2f} x" if r.low else ""
    high = f"below {r.high:.2f} x" if r.high else ""
    return " and ".join(filter(None, (low, high))) or "1/4 to 4 x"


def whole(p: Planned, width: float = WIDTH) -> list[tuple[str, Html]]:
    """Parts of a report: the search, then the step of the best plan."""
    best = p.best.prediction
    return [
        ("The best plan", planned(p, width)),
        ("Its step", headline(best, width=width)),
        ("Where the time goes", time(best, width)),
        ("Memory", memory(best, width)),
    ]
