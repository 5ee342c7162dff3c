"""Checks of charts: scales that are not linear, and axes that do not start at zero."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from paceline.bench.audit.contest import Contest, plain
from paceline.spec.audit import AuditFinding, NotChecked
from paceline.spec.benchmark import ReportedRow, ReportedValue

#: scales that are linear, as files name them
LINEAR = ("", "linear", "lin")
#: quantities whose ratios a reader takes from the picture
RATIOS = ("speedup", "scaling", "throughput", "time", "seconds", "samples", "images", "tokens", "efficiency")
#: words of a title that says openly that an axis does not start at zero
CUT_WORDS = ("from ", "cut", "broken", "starts at", "truncated")


def check_axes(contest: Contest) -> Iterator[AuditFinding | NotChecked]:
    """Every declared chart."""
    if not contest.report.charts:
        yield NotChecked(what="axes of charts", missing="charts")
    for chart in contest.report.charts:
        for axis in ("x", "y"):
            finding = _nonlinear(chart, axis) or _uneven(chart, axis)
            if finding is not None:
                yield finding
        cut = _cut(chart)
        if cut is not None:
            yield cut


def _title(chart: ReportedRow) -> str:
    return f"chart {chart['title'].text!r}" if "title" in chart else "a chart"


def _nonlinear(chart: ReportedRow, axis: str) -> AuditFinding | None:
    """A logarithmic axis that does not say so, or that shows a speedup: it makes gaps to the ideal small."""
    scale = chart.get(f"{axis}_scale")
    if scale is None or scale.text.lower() in (*LINEAR, "category"):
        return None
    said = "log" in _word(chart, f"{axis}_label")
    speedup = axis == "y" and any(word in _word(chart, "y") for word in RATIOS[:2])
    if said and not speedup:
        return None
    return AuditFinding(
        kind="nonlinear-axis",
        text=f"{_title(chart)} shows {_word(chart, axis) or axis} on a {scale.text} axis"
        + ("" if said else " without saying so")
        + ": a gap of 2 x takes as little room at the top as at the bottom",
        evidence=(scale, *([chart[axis]] if axis in chart else [])),
        honest="a linear axis from zero, or the share of the ideal (efficiency) instead of the speedup",
    )


def _uneven(chart: ReportedRow, axis: str) -> AuditFinding | None:
    """Ticks at equal distances whose values are not, on an axis that is called linear."""
    ticks, scale = chart.get(f"{axis}_ticks"), chart.get(f"{axis}_scale")
    if ticks is None or (scale is not None and scale.text.lower() not in (*LINEAR, "category")):
        return None
    values = [
        ReportedValue(value=word, line=0, column="").number for word in ticks.text.replace(",", " ").split()
    ]
    steps = [b - a for a, b in itertools.pairwise([one for one in values if one is not None])]
    if len(steps) < 2 or min(steps) <= 0 or max(steps) <= 1.01 * min(steps):
        return None
    return AuditFinding(
        kind="nonlinear-axis",
        text=f"{_title(chart)} has ticks at {ticks.text}, all equally far apart: the axis is not linear, and"
        " a curve that flattens looks straight",
        evidence=(ticks, *([scale] if scale is not None else [])),
        honest="positions in proportion to the values",
    )


def _cut(chart: ReportedRow) -> AuditFinding | None:
    """A linear axis of a ratio that starts above zero without saying so; bars never may."""
    low, scale = chart.get("y_from"), chart.get("y_scale")
    start = low.number if low is not None else None
    if low is None or start is None or start <= 0 or (scale and scale.text.lower() not in LINEAR):
        return None
    bars = "bar" in _word(chart, "kind")
    said = any(word in _word(chart, "y_label") for word in CUT_WORDS)
    ratio = any(word in _word(chart, "y") for word in RATIOS)
    if not bars and (said or not ratio):
        return None
    return AuditFinding(
        kind="cut-axis",
        text=f"{_title(chart)} shows {_word(chart, 'y') or 'a value'} from {low.text} on"
        f"{_exaggeration(chart, start)}",
        evidence=(low, *([chart["y"]] if "y" in chart else [])),
        honest="an axis from zero; differences in a table with their spread",
    )


def _word(chart: ReportedRow, name: str) -> str:
    return chart[name].text.lower() if name in chart else ""


def _exaggeration(chart: ReportedRow, start: float) -> str:
    """By how much the picture overstates the ratio of its largest to its smallest value."""
    low, high = (chart[name].number if name in chart else None for name in ("low", "high"))
    if low is None or high is None or low <= start or low <= 0:
        return ": ratios of heights are not ratios of values"
    drawn, real = (high - start) / (low - start), high / low
    if not math.isfinite(drawn):
        return ""
    return f": {plain(high)} looks {plain(drawn)} times as large as {plain(low)}, and is {plain(real)} times"
