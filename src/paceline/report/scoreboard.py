"""The scoreboard as tables: errors by set, how well plans are told apart, what others reach, and which rows
were left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from rich.console import RenderableType
from rich.text import Text

from paceline.report.fitting import FittedTable


class SweepSummary(Protocol):
    """How well plans of a set are told apart."""

    @property
    def count(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def rank_correlation(self) -> float: ...
    @property
    def regret_pct(self) -> float: ...
    @property
    def worst_regret_pct(self) -> float: ...


class PeerFigure(Protocol):
    """What someone else reaches on a set."""

    @property
    def name(self) -> str: ...
    @property
    def mean_abs_pct(self) -> float: ...
    @property
    def rows(self) -> int: ...
    @property
    def how(self) -> str: ...
    @property
    def regret_pct(self) -> float | None: ...


class ScoreRow(Protocol):
    """How predictions did on one measurement set.

    Per cent; `skipped` counts rows by the reason they could not be predicted.
    """

    @property
    def set(self) -> str: ...
    @property
    def metric(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def skipped(self) -> Mapping[str, int]: ...
    @property
    def mean_abs_pct(self) -> float | None: ...
    @property
    def median_abs_pct(self) -> float | None: ...
    @property
    def p90_abs_pct(self) -> float | None: ...
    @property
    def bias_pct(self) -> float | None: ...
    @property
    def coverage_pct(self) -> float | None: ...
    @property
    def naive_mean_abs_pct(self) -> float | None: ...
    @property
    def naive_median_abs_pct(self) -> float | None: ...
    @property
    def sweeps(self) -> SweepSummary | None: ...
    @property
    def peers(self) -> Sequence[PeerFigure]: ...


_NONE = "-"
_COLUMNS = (
    "sets",
    "metric",
    "rows",
    "skipped",
    "mean\nerror",
    "median",
    "90th\npct",
    "bias",
    "in\ninterval",
    "naive\nmean",
    "naive\nmedian",
)
_SPARE = ("naive\nmedian", "90th\npct", "skipped", "bias")


def validation_table(scores: Iterable[ScoreRow]) -> list[RenderableType]:
    """The scoreboard, a line per set and metric, and below it why rows were left out."""
    listed = list(scores)
    if not listed:
        return [Text("no set was scored")]
    views: list[RenderableType] = [FittedTable(_COLUMNS, [_score_row(score) for score in listed], _SPARE)]
    views += [*_sweeps(listed), *_peers(listed)]
    # metrics of one set leave out the same rows: say so once
    why = dict.fromkeys(
        (score.set, f"{count:,}", reason)
        for score in listed
        for reason, count in sorted(score.skipped.items(), key=lambda item: (-item[1], item[0]))
    )
    if why:
        views += [Text("\nrows left out"), FittedTable(("sets", "rows", "why"), list(why), running=("why",))]
    return views


def _score_row(score: ScoreRow) -> list[str]:
    return [
        score.set,
        score.metric,
        f"{score.rows:,}",
        f"{sum(score.skipped.values()):,}",
        _percent(score.mean_abs_pct),
        _percent(score.median_abs_pct),
        _percent(score.p90_abs_pct),
        _percent(score.bias_pct, signed=True),
        _percent(score.coverage_pct, digits=0),
        _percent(score.naive_mean_abs_pct),
        _percent(score.naive_median_abs_pct),
    ]


def _sweeps(scores: Sequence[ScoreRow]) -> list[RenderableType]:
    """How well plans for the same work are told apart."""
    rows = [
        [
            score.set,
            f"{s.count:,}",
            f"{s.rows:,}",
            _NONE if s.rank_correlation != s.rank_correlation else f"{s.rank_correlation:.2f}",
            _percent(s.regret_pct),
            _percent(s.worst_regret_pct),
        ]
        for score in scores
        if (s := score.sweeps) is not None
    ]
    caption = (
        "regret: how much slower than the fastest measured plan of a sweep is the one with the least"
        " predicted time"
    )
    columns = ("sets", "sweeps", "rows", "rank\ncorrelation", "mean\nregret", "worst\nregret")
    return [Text("\nplans told apart"), FittedTable(columns, rows, caption=caption)] if rows else []


def _peers(scores: Sequence[ScoreRow]) -> list[RenderableType]:
    """Ours and others' mean errors on the same sources."""
    rows: list[list[str]] = []
    for score in scores:
        if score.peers:
            regret = score.sweeps.regret_pct if score.sweeps else None
            rows.append(
                [
                    score.set,
                    "paceline",
                    _percent(score.mean_abs_pct),
                    _percent(regret),
                    f"{score.rows:,}",
                    "the rows found here",
                ]
            )
            rows += [
                ["", p.name, f"{p.mean_abs_pct:g} %", _percent(p.regret_pct), f"{p.rows:,}", p.how]
                for p in score.peers
            ]
    columns = ("sets", "by", "mean\nerror", "mean\nregret", "rows", "source")
    return (
        [Text("\nbeside others"), FittedTable(columns, rows, ("mean\nregret",), ("source",))] if rows else []
    )


def _percent(value: float | None, *, signed: bool = False, digits: int = 1) -> str:
    """`value` in per cent; a dash where there is none, as in a set without rows."""
    if value is None or value != value:
        return _NONE
    return f"{value:{'+' if signed else ''}.{digits}f} %"
