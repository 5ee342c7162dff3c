"""Listings that fit the terminal they are shown in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape

from paceline.report.terminal import listing

#: characters that a column of running text needs at least; it wraps within what the others leave
_RUNNING = 44


@dataclass(frozen=True, slots=True)
class FittedTable:
    """A listing that leaves columns out, in the order of `spare`, where the terminal is too narrow for
    all.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    spare: Sequence[str] = ()
    running: Sequence[str] = ()
    caption: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = {column: [row[i] for row in self.rows] for i, column in enumerate(self.columns)}
        widths = {column: self._width(column, listed) for column, listed in cells.items()}
        for column in self.spare:
            if sum(widths.values()) + 2 * (len(widths) - 1) <= options.max_width:
                break
            del widths[column]
        table = listing(
            "",
            list(widths),
            [
                [escape(cell) for cell in row]
                for row in zip(*(cells[column] for column in widths), strict=True)
            ],
        )
        for shown, name in zip(table.columns, widths, strict=True):
            shown.no_wrap = name not in self.running
        table.caption, table.caption_justify = self.caption or None, "left"
        yield table

    def _width(self, column: str, cells: Sequence[str]) -> int:
        widest = max(len(text) for text in (*column.splitlines(), *cells))
        return min(widest, _RUNNING) if column in self.running else widest
