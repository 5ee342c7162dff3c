"""The queue of a live scheduler, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

#: jobs that are over and still shown
RECENT = 20


def table(rows: Sequence[Mapping[str, Any]], everything: bool = False) -> Table:
    """One line for each job; of those that are over only the last ones, unless `everything`. What a job did
    not say of itself is marked ~.
    """
    over = [row for row in rows if row["end_s"] is not None]
    hidden = {row["job"] for row in over[:-RECENT]} if not everything else set()
    note = f" ({len(hidden)} more are over: --all)" if hidden else ""
    out = Table(title=f"{len(rows)} jobs{note}", title_justify="left", box=None, pad_edge=False)
    headings = (
        ("job", "left"),
        ("state", "left"),
        ("devices", "right"),
        ("nodes", "left"),
        ("done", "right"),
        ("of", "right"),
        ("starts", "right"),
    )
    for heading, side in headings:
        out.add_column(heading, justify=side)  # type: ignore[arg-type]
    for row in rows:
        if row["job"] not in hidden:
            done = f"{'' if row['reported'] else '~'}{100 * row['done'] / row['work']:.0f} %"
            out.add_row(
                row["job"],
                row["state"],
                str(row["devices"] or ""),
                " ".join(row["nodes"]),
                done,
                f"{row['work']:g} {row['unit']}".rstrip(),
                str(row["attempts"]),
            )
    return out
