"""Benchmarks as people report them: a JSON document, a table (CSV, Markdown, JSON lines), or what `paceline
train` wrote.

The schema, and what else is understood, is in docs/benchmarks.md.
"""

from __future__ import annotations

import json
from pathlib import Path

from paceline.errors import DataError
from paceline.readers.benchmark.documents import document_report
from paceline.readers.benchmark.fields import assembled
from paceline.readers.benchmark.tables import csv_report, lines_report, markdown_report, record_row
from paceline.spec.benchmark import BenchmarkReport

#: the record of a run in a folder of them
RECORD = "record.jsonl"


def read(path: Path | str) -> BenchmarkReport:
    """The report in a file, or in a folder of records of runs."""
    path = Path(path)
    if path.is_dir():
        return _folder(path)
    text = _text(path)
    if not text.strip():
        raise DataError(f"{path}: empty; give a JSON report or a table of results (docs/benchmarks.md)")
    start = text.lstrip("\ufeff \t\r\n")[:1]
    if path.suffix == ".jsonl":
        return lines_report(text, str(path))
    if start in "{[":
        return document_report(text, str(path))
    if start == "|" or path.suffix == ".md":
        return markdown_report(text, str(path))
    return csv_report(text, str(path))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}; give JSON or CSV as text") from None


def _folder(path: Path) -> BenchmarkReport:
    files = sorted(path.rglob(RECORD))
    if not files:
        raise DataError(
            f"{str(path)!r} is a folder without a {RECORD}; give a file, or the folder that `paceline train"
            " --record` wrote"
        )
    rows = []
    for file in files:
        entries = []
        lines = _text(file).splitlines()
        for number, line in enumerate(lines, 1):
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                if number == len(lines):  # a run that was killed cuts its last line
                    break
                raise DataError(f"{file}, line {number}: not JSON") from None
            if isinstance(found, dict):
                entries.append((number, found))
        row = record_row(entries, str(file.relative_to(path)))
        if row:
            rows.append(row)
    return assembled(str(path), rows)
