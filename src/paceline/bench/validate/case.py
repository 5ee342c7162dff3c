"""One measured row, and how to read the files they come in."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import DataError

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """A predicted value with its 90 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row: what was measured, by metric; how to predict it; what a naive guess divides by its constant.

    `skip` names the reason where a row cannot be predicted; such rows are counted, never dropped.
    """

    name: str
    device: str
    measured: Mapping[str, float] = field(default_factory=dict)
    predict: Callable[[], Mapping[str, Answer]] | None = None
    #: what the naive guess takes time (or bytes) to be proportional to, in seconds at peak (or bytes)
    naive: Callable[[], Mapping[str, float]] | None = None
    skip: str | None = None
    #: rows of a set with the same text here differ only in how the work was spread over devices
    sweep: str = ""


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
        raise DataError(f"{path}: no column {missing[0]!r}; it has {', '.join(reader.fieldnames or ['none'])[:200]}")
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
