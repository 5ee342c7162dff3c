"""Benchmarks as one JSON document: the schema of docs/benchmarks.md, or output of `paceline train --json`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.errors import DataError
from paceline.readers.benchmark.fields import assembled, checked, row_of
from paceline.readers.benchmark.positions import Path, load
from paceline.spec.benchmark import BenchmarkReport, ReportedRow, ReportedRun

#: keys of a run that hold its evaluations
_EVALUATIONS = ("evaluations", "looks", "history", "curve")
#: lists of `paceline train --json` with a value per seed -> field
_PER_SEED = {"accuracies": "accuracy", "seconds": "seconds", "reached_s": "reached_s"}


def document_report(text: str, source: str) -> BenchmarkReport:
    """The report in a JSON text."""
    try:
        data, lines = load(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{source}: not valid JSON: line {error.lineno} column {error.colno}: {error.msg}"
        ) from None
    except RecursionError:
        raise DataError(f"{source}: nested too deeply for a report") from None
    document = _Document(data, lines, source)
    if isinstance(data, list):
        return assembled(source, [document.row((index,)) for index in range(len(data))])
    rows = data.get("rows")
    if isinstance(rows, list) and rows and all(isinstance(row, dict) and "accuracies" in row for row in rows):
        return document.compared()
    if "runs" not in data:
        raise DataError(
            f"{source}: no `runs`; a report has a list of runs with their evaluations (docs/benchmarks.md),"
            f" got the keys {', '.join(list(data)[:8]) or '(none)'}"
        )
    return document.report()


class _Document:
    """A JSON document with the lines of its values."""

    def __init__(self, data: Any, lines: Mapping[Path, int], source: str) -> None:
        self.data = data
        self.lines = lines
        self.source = source

    def report(self) -> BenchmarkReport:
        """The schema's own form."""
        runs = []
        for index, _ in enumerate(self.list("runs")):
            place: Path = ("runs", index)
            fields = self.row(place)
            runs.append(ReportedRun(fields=fields, evaluations=tuple(self.evaluations(place))))
        names = ("contestants", "claims", "charts")
        parts = {name: tuple(self.row((name, i)) for i in range(len(self.list(name)))) for name in names}
        stated = self.row(("stated",)) if "stated" in self.data else {}
        return checked(BenchmarkReport(source=self.source, stated=stated, runs=tuple(runs), **parts))

    def compared(self) -> BenchmarkReport:
        """What `paceline train --json` prints: a row per strategy, with a list of values by seed."""
        stated = row_of(self.cells((), ("task", "world", "target")))
        runs = []
        for number, row in enumerate(self.list("rows")):
            for index in range(len(row.get("accuracies", ()))):
                cells = [*self.cells(("rows", number), ("strategy",))]
                for key, name in _PER_SEED.items():
                    values = row.get(key) or ()
                    if index < len(values):
                        where: Path = ("rows", number, key, index)
                        cells.append((name, values[index], self.lines[where], shown(where)))
                runs.append(ReportedRun(fields=row_of(cells)))
        return checked(BenchmarkReport(source=self.source, stated=stated, runs=tuple(runs)))

    def list(self, name: str) -> list[Any]:
        found = self.data.get(name, [])
        if not isinstance(found, list):
            raise DataError(f"{self.source}, {name}: expected a list, got {type(found).__name__}")
        return found

    def at(self, path: Path) -> Any:
        value = self.data
        for part in path:
            value = value[part]
        return value

    def row(self, path: Path) -> ReportedRow:
        if not isinstance(self.at(path), Mapping):
            kind = type(self.at(path)).__name__
            raise DataError(
                f"{self.source}, line {self.lines[path]}, {shown(path)}: expected an object, got {kind}"
            )
        return row_of(self.cells(path))

    def cells(
        self, path: Path, only: tuple[str, ...] = (), prefix: str = ""
    ) -> Iterator[tuple[str, str | float | bool | None, int, str]]:
        """The plain values of an object and of those in it; a list of plain values is a text of them."""
        for key, value in self.at(path).items():
            place = (*path, key)
            name = f"{prefix}{key}"
            if only and key not in only:
                continue
            if isinstance(value, Mapping):
                yield from self.cells(place, prefix=f"{name}_")
            elif isinstance(value, list):
                if key not in _EVALUATIONS and all(isinstance(one, str | int | float) for one in value):
                    yield name, " ".join(map(str, value)), self.lines[place], shown(place)
            else:
                yield name, value, self.lines[place], shown(place)

    def evaluations(self, path: Path) -> Iterator[ReportedRow]:
        run = self.at(path)
        key = next((name for name in _EVALUATIONS if isinstance(run.get(name), list)), None)
        for index in range(len(run[key]) if key else 0):
            yield self.row((*path, key or "", index))


def shown(path: Path) -> str:
    """A path as people write it: runs[3].seed."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")
