"""Throughput curves and their scores, drawn for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.units import show

if TYPE_CHECKING:
    from paceline.queueing.estimate import ThroughputCurve


def curve(found: ThroughputCurve) -> RenderableType:
    """One row per number of workers."""
    table = Table(
        title=(
            f"{found.name}: {found.mode}, {found.servers} server{'s' if found.servers > 1 else ''}, "
            f"{show(8 * found.link_Bps, 'count')}bit/s links"
        ),
        title_justify="left",
    )
    for name in ("workers", "samples/s", "90 % interval", "coarse", "linear", "Optimus form", "staleness"):
        table.add_column(name, justify="right")
    for p in found.points:
        mark = " *" if p.workers == found.saturation else ""
        table.add_row(
            f"{p.workers}{mark}",
            f"{p.samples_per_s:.4g}",
            f"{p.low:.4g} to {p.high:.4g}",
            f"{p.coarse:.4g}",
            f"{p.linear:.4g}",
            f"{p.optimus:.4g}",
            f"{p.staleness:.1f}",
        )
    last = (
        f"* saturates at {found.saturation} workers; bottleneck with {found.points[-1].workers}:"
        f" {found.bottleneck}"
    )
    return Group(table, Text(last))
