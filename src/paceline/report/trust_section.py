"""How far to trust an answer: what its interval is made of, and the validated rows that are nearest to it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.report import charts
from paceline.report.charts import Axis, Bar, BarSegment
from paceline.report.markup import Html, join, table, tag
from paceline.report.sections import WIDTH, percent, sources
from paceline.spec.prediction import DistributedPrediction, Evidence
from paceline.spec.validated import Validated

#: half-width of a 90 % interval in standard deviations
_Z90 = 1.645


def trust(p: DistributedPrediction, near: Sequence[Validated], width: float = WIDTH) -> Html:
    """The interval by what it comes from, the nearest measured steps with their errors, and all sources."""
    return join(
        [
            tag("h3", "What the interval is as wide as it is for"),
            interval(p, width),
            tag("h3", "The nearest measured steps"),
            nearest(near),
            tag("h3", "Sources"),
            sources(p.provenance),
        ]
    )


def interval(p: DistributedPrediction, width: float = WIDTH) -> Html:
    """Shares of the interval's variance: never measured, measured elsewhere, and operators with networks."""
    whole = (math.log(p.step_s_high / p.step_s_low) / (2 * _Z90)) ** 2
    said = [e for e in p.provenance if e.sigma]
    blocks = (
        [BarSegment(name=e.what, value=min(1.0, _variance(e) / whole), kind=_kind(e)) for e in said]
        if whole
        else []
    )
    rest = max(0.0, 1.0 - sum(block.value for block in blocks))
    blocks.append(BarSegment(name="operators, network and bubble", value=rest, kind="operators"))
    axis = Axis(low=0, high=1, title="share of the interval's variance", dimension="fraction")
    never = sum(block.value for block in blocks if block.kind == "unmeasured")
    label = f"of the interval's variance, {percent(never, 0)} comes from what was never measured"
    keys = [(f"fill {block.kind}", f"{block.name} ({percent(block.value, 0)})") for block in blocks]
    bar = charts.bars(axis, [Bar(name="", blocks=blocks)], label=label, width=width)
    return join([bar, charts.legend(keys), tag("p", f"{label[0].upper()}{label[1:]}.")])


def _variance(e: Evidence) -> float:
    return (e.sigma or 0.0) ** 2


def _kind(e: Evidence) -> str:
    return "measured" if e.kind == "measured" else "unmeasured"


def nearest(near: Sequence[Validated]) -> Html:
    """Measured steps that are most like this one, with how wrong the prediction of each was."""
    if not near:
        return tag("p", "No measured step is like this one.")
    rows = [
        (
            row.name,
            f"{row.model}, {row.precision}",
            f"{row.devices:,} x {row.device}",
            f"{row.error_pct:+.1f} %",
            "yes" if row.inside else "no",
            row.set,
        )
        for row in near
    ]
    mean = sum(abs(row.error_pct) for row in near) / len(near)
    inside = sum(row.inside for row in near)
    words = f"Their mean error is {mean:.1f} %; {inside} of {len(near)} lie inside the 90 % interval."
    head = ("row", "model", "devices", "error", "inside its interval", "set")
    return join([tag("p", words), table(head, rows, "measured steps most like this one")])
