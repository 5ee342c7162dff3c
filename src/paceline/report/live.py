"""The queue of a live scheduler, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line for each job."""
    out = Table(title=f"{len(rows)} jobs", title_justify="left", box=None, pad_edge=False)
    for heading, side in (("job", "left"), ("state", "left"), ("devices", "right"), ("nodes", "left"), ("done", "right"), ("starts", "right")):
        out.add_column(heading, justify=side)  # type: ignore[arg-type]
    for row in rows:
        done = f"{100 * row['done'] / row['work']:.0f} %"
        out.add_row(row["job"], row["state"], str(row["devices"] or ""), " ".join(row["nodes"]), done, str(row["attempts"]))
    return out
