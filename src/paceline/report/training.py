"""Tables of training runs."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from rich.table import Table

from paceline.report.terminal import spent
from paceline.units import show

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def checked(
    title: str,
    caption: str,
    phases: Sequence[str],
    predicted_s: Mapping[str, float],
    measured_s: Mapping[str, float],
) -> Table:
    """Seconds by phase, predicted and measured."""
    table = Table(title=title, caption=caption)
    for name in ("", "predicted", "measured", "difference"):
        table.add_column(name, justify="left" if not name else "right")
    for phase in phases:
        if phase in predicted_s and phase in measured_s:
            predicted, measured = predicted_s[phase], measured_s[phase]
            off = f"{(predicted / measured - 1) * 100:+.0f} %" if measured else ""
            table.add_row(phase, spent(predicted), spent(measured), off)
    return table


def trained(
    title: str, rows: Sequence[tuple[str, float, float, Sequence[float], Sequence[float | None]]]
) -> Table:
    """Of each strategy: mean accuracy, half its interval, seconds of each run, and until the target was
    reached.
    """
    table = Table(title=title)
    for name in ("strategy", "accuracy", "95 % interval", "time", "time to target"):
        table.add_column(name, justify="left" if name == "strategy" else "right")
    for strategy, accuracy, interval, seconds, until in rows:
        reached = [s for s in until if s is not None]
        missed = len(until) - len(reached)
        when = show(statistics.median(reached), "time") if reached else "not reached"
        when += f" ({missed} of {len(until)} not)" if missed and reached else ""
        spread = "one seed" if math.isnan(interval) else f"± {interval:.2%}"
        table.add_row(strategy, f"{accuracy:.2%}", spread, show(statistics.median(seconds), "time"), when)
    return table
