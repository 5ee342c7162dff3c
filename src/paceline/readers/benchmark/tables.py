"""Benchmarks as tables: CSV, tables of Markdown, a JSON object a line."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.errors import DataError
from paceline.readers.benchmark.fields import assembled, row_of
from paceline.spec.benchmark import BenchmarkReport, ReportedRow


def csv_report(text: str, source: str) -> BenchmarkReport:
    """A table whose first line names the columns; commas, semicolons or tabs between cells."""
    first = text.lstrip("\ufeff").partition("\n")[0]
    delimiter = max(",;\t", key=first.count)
    lines = csv.reader(io.StringIO(text.lstrip("\ufeff"), newline=""), delimiter=delimiter)
    try:
        return assembled(source, list(_rows(lines, source)))
    except csv.Error as error:
        raise DataError(f"{source}, line {lines.line_num}: not CSV: {error}") from None


def _rows(lines: Any, source: str) -> Iterator[ReportedRow]:
    head: list[str] = []
    for cells in lines:
        if not any(cell.strip() for cell in cells):
            continue
        if not head:
            head = [cell.strip() for cell in cells]
            continue
        if len(cells) > len(head):
            raise DataError(
                f"{source}, line {lines.line_num}: {len(cells)} cells under {len(head)} columns; quote cells"
                " that hold the separator"
            )
        pairs = zip(head, cells, strict=False)
        yield row_of((name, cell.strip(), lines.line_num, name) for name, cell in pairs)


def markdown_report(text: str, source: str) -> BenchmarkReport:
    """The first table of a Markdown file."""
    rows: list[ReportedRow] = []
    head: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.lstrip().startswith("|"):
            if head:
                break
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not head:
            head = cells
        elif any(cell.strip("-: ") for cell in cells):
            rows.append(row_of((name, cell, number, name) for name, cell in zip(head, cells, strict=False)))
    return assembled(source, rows)


def lines_report(text: str, source: str) -> BenchmarkReport:
    """A JSON object a line, each a row; or the record of one run (`paceline train --record`)."""
    entries: list[tuple[int, dict[str, Any]]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            raise DataError(f"{source}, line {number}: not JSON") from None
        if not isinstance(found, dict):
            raise DataError(f"{source}, line {number}: expected an object, got {type(found).__name__}")
        entries.append((number, found))
    if entries and entries[0][1].get("kind") == "run":
        return assembled(source, [record_row(entries)])
    return assembled(source, [row_of(flat(entry, number)) for number, entry in entries])


def record_row(entries: list[tuple[int, dict[str, Any]]], file: str = "") -> ReportedRow:
    """The run of a record: how it was started and how it ended."""
    row: dict[str, Any] = {}
    for number, entry in entries:
        if entry.get("kind") in ("run", "end"):
            row.update(row_of(flat(entry, number, leave=("kind", "start", "started_at", "steps")), file))
    return row


def flat(
    entry: Mapping[str, Any], line: int, prefix: str = "", leave: tuple[str, ...] = ()
) -> Iterator[tuple[str, str | float | bool | None, int, str]]:
    """The plain values of an object and of those in it; lists are left out."""
    for key, value in entry.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flat(value, line, f"{name}_")
        elif name not in leave and isinstance(value, str | int | float | bool | None):
            yield name, value, line, name
