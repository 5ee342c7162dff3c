"""A table of times to a target for a terminal, as a page, and as Markdown for documents."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.bench.tta.outcome import SIGNIFICANT, TargetRow, TargetTable
from paceline.report import charts
from paceline.report.charts import Axis, Frame
from paceline.report.documents import document
from paceline.report.markup import Html, join, table, tag

#: pixels of a chart, and of the line of a contestant
_WIDTH, _LINE = 720, 26
_HEAD = ("task", "batch", "contestant", "rate", "median", "all runs", "reached", "steps", "p", "predicted")


def table_view(found: TargetTable) -> RenderableType:
    """For a terminal."""
    drawn = Table(box=None, pad_edge=False, header_style="dim")
    for place, title in enumerate(_HEAD):
        drawn.add_column(title, justify="left" if place in (0, 2, 5) else "right", no_wrap=place != 5)
    for row in found.rows:
        style = "bold" if found.best(row) else ""
        drawn.add_row(*_cells(found, row), style=style)
    return Group(drawn, *(Text(note, style="dim") for note in notes(found)))


def markdown(found: TargetTable) -> str:
    """The table and its notes for a document."""
    lines = [f"| {' | '.join(_HEAD)} |", f"|{'---|' * len(_HEAD)}"]
    for row in found.rows:
        cells = _cells(found, row)
        if found.best(row):
            cells = (*cells[:4], f"**{cells[4]}**", *cells[5:])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"- {note}" for note in notes(found))])


def _cells(found: TargetTable, row: TargetRow) -> tuple[str, ...]:
    return (
        row.task,
        str(row.batch),
        row.contestant,
        f"{row.lr:.3g}",
        _seconds(row.median_s),
        " ".join(_seconds(math.inf if one is None else one) for one in sorted(row.times, key=_late)),
        f"{row.reached} of {len(row.runs)}",
        "-" if math.isnan(row.steps) else f"{row.steps:.0f}",
        _p(row),
        _predicted(row),
    )


def _late(one: float | None) -> float:
    return math.inf if one is None else one


def _p(row: TargetRow) -> str:
    if row.p is None:
        return ""
    return f"{row.p:.3f}" + ("*" if row.p < SIGNIFICANT else "")


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if math.isfinite(value) else "missed"


def _predicted(row: TargetRow) -> str:
    if row.predicted_s is None:
        return "-"
    error = "" if row.error is None else f" ({100 * row.error:+.0f} %)"
    return f"{row.predicted_s:.2f} s{error}"


def notes(found: TargetTable) -> Iterator[str]:
    """What the figures are, and how they were measured."""
    targets = ", ".join(
        f"{task} {rules.target:.0%} (fixed {rules.fixed}: {rules.why})" for task, rules in found.rules.items()
    )
    trials = max(row.trials for row in found.rows)
    every = {rules.every for rules in found.rules.values()}
    yield f"target accuracy: {targets}"
    yield (
        f"seconds of the wall clock, evaluations included: one every {' or '.join(map(str, sorted(every)))}"
        " samples (of a larger batch, every step), for all contestants; the median of all runs, those that"
        " missed the target counted as last"
    )
    yield (
        f"all runs are shown; the range of {found.seeds} runs holds the median with {found.coverage:.1%}"
        " confidence"
    )
    yield (
        f"tuning: {trials} learning rates for every contestant at every batch, one seed, on validation data"
    )
    yield (
        f"p: exact rank-sum test against {found.baseline} at the same batch, corrected for all contestants"
        f" (Holm); * below {SIGNIFICANT:g}"
    )
    pace, load = found.pace, found.load
    yield (
        f"{found.world} ranks, {found.machine}; load {load[0]:.1f} (median) to {load[1]:.1f}; work that is"
        f" always the same took {1e3 * pace[0]:.2f} to {1e3 * pace[1]:.2f} ms beside the runs"
    )
    if found.mean_error is not None:
        yield (
            f"predicted times are off by {found.mean_error:.0%} on average (median and each: in the table)."
            f" Held out: {found.held_out}"
        )
        yield "; ".join(f"{name}: {value:.0%}" for name, value in (found.errors or {}).items())


# -- a page ----------------------------------------------------------------------------------------


def page(found: TargetTable, command: str) -> str:
    """The answer as one HTML file."""
    parts: list[tuple[str, object]] = [
        (f"{task}, batch {batch}", join([_dots(rows, found), table(_HEAD[2:], _rows(found, rows))]))
        for (task, batch), rows in found.places.items()
    ]
    parts.append(("How it was measured", join(tag("p", note) for note in notes(found))))
    return document("Time to accuracy", command, parts)


def _rows(found: TargetTable, rows: Sequence[TargetRow]) -> list[tuple[str, ...]]:
    return [_cells(found, row)[2:] for row in rows]


def _dots(rows: Sequence[TargetRow], found: TargetTable) -> Html:
    """Each run a dot, the median a line, the prediction a ring; runs that missed the target at the end of
    the axis.
    """
    known = [one for row in rows for one in (*row.times, row.predicted_s) if one is not None]
    high = 1.08 * max(known, default=1.0)
    axis = Axis(low=0, high=high, title="seconds to the target, evaluations included", dimension="time")
    top, base = 8, 42
    height = top + 2 * _LINE * len(rows) + base
    y = Axis(low=0, high=1, title="")
    frame = Frame(_WIDTH, height, axis, y, left=12, right=70, top=top, bottom=base)
    drawn = [*frame.x_ticks(), frame.x_title()]
    for place, row in enumerate(rows):
        drawn += _contestant(frame, row, top + 2 * _LINE * place, found.best(row))
    keys = [("line first", "each run, and the median"), ("line second", "predicted")]
    label = f"seconds to the target of {', '.join(row.contestant for row in rows)}"
    return join([charts.svg(_WIDTH, height, label, *drawn), charts.legend(keys)])


def _contestant(frame: Frame, row: TargetRow, y: float, best: bool) -> Iterator[Html]:
    words = f"{row.contestant}: {_seconds(row.median_s)}, {row.reached} of {len(row.runs)} reached it"
    yield tag("text", words + (" (least)" if best else ""), x=frame.left, y=y + 14, class_="row")
    line = y + _LINE + 8
    if math.isfinite(row.median_s):
        x, _ = frame.at(row.median_s, 0)
        yield tag("line", x1=x, x2=x, y1=line - 9, y2=line + 9, class_="whisker")
    for run in row.runs:
        at = run.reached_s
        x = frame.at(at, 0)[0] if at is not None else frame.width - frame.right + 12
        said = tag("title", f"seed {run.seed}: {_seconds(_late(at))}, {run.steps} steps")
        yield tag("circle", said, cx=x, cy=line, r=4, class_="dot first")
        if at is None:
            yield tag("text", "missed", x=x + 8, y=line + 4)
    if row.predicted_s is not None:
        x, _ = frame.at(row.predicted_s, 0)
        said = tag("title", f"predicted: {_seconds(row.predicted_s)}")
        yield tag("circle", said, cx=x, cy=line + 9, r=3, class_="dot second")
