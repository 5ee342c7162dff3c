"""Reading tables of measurements and traces: CSV, and JSON by lines, plain or compressed."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import DataError

Row = Mapping[str, Any]


def text_lines(path: Path) -> Iterator[str]:
    """Lines of a plain or compressed file."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt") as f:
                yield from f
        else:
            with path.open() as f:
                yield from f
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise DataError(f"cannot read {path}: {error}") from None


def csv_rows(path: Path, needed: tuple[str, ...]) -> list[Row]:
    """Rows of a CSV file that has at least the columns `needed`."""
    reader = csv.DictReader(text_lines(path))
    missing = [column for column in needed if column not in (reader.fieldnames or ())]
    if missing:
        raise DataError(
            f"{path}: no column {missing[0]!r}; it has {', '.join(reader.fieldnames or ['none'])[:200]}"
        )
    return list(reader)


def json_rows(path: Path) -> list[Row]:
    """Rows of a file with one JSON object per line."""
    out = []
    for number, line in enumerate(text_lines(path), 1):
        if line.strip():
            try:
                out.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise DataError(f"{path}: line {number}: not valid JSON: {error.msg}") from None
    return out


def find(folder: Path, name: str) -> Path | None:
    """The file `name` in `folder`, plain or compressed, where there is one."""
    return next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
