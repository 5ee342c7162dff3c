"""A benchmark as it was reported: runs with their evaluations, what is claimed of them, charts; each value
with the place in the file where it is written.

Fields go by the names of docs/benchmarks.md (`seconds`, `tuning_trials`, ...); readers translate others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

#: metrics of which less is better, by a part of their name
LESS_IS_BETTER = ("loss", "perplexity", "error", "latency", "wer", "seconds", "time", "steps")
#: settings that make runs of one contestant different experiments
SETTINGS = ("task", "batch", "precision", "device", "devices", "lr", "weight_decay", "optimizer", "steps")
_TIMES = {
    "": 1.0,
    "s": 1.0,
    "sec": 1.0,
    "seconds": 1.0,
    "ms": 1e-3,
    "us": 1e-6,
    "min": 60.0,
    "h": 3600.0,
    "x": 1.0,
}
_NUMBER = re.compile(r"^\s*([-+]?[\d,]*\.?\d+(?:e[-+]?\d+)?)\s*(%|[a-zA-Z]*)(?:\s*(?:±|\+-|\().*)?$", re.I)

#: as many runs of so many
_OF = re.compile(r"^\d+ of (\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedValue:
    """A value of a report, and where it is written."""

    value: str | float | bool | None
    line: int
    column: str
    #: the file, where a report is a folder of them
    file: str = ""

    @property
    def text(self) -> str:
        return "" if self.value is None else str(self.value).strip()

    @property
    def number(self) -> float | None:
        """The value as a number: shares of a per cent sign, seconds of a time with a unit; None of a text."""
        if isinstance(self.value, bool) or self.value is None:
            return None
        if isinstance(self.value, int | float):
            return float(self.value) if math.isfinite(self.value) else None
        found = _NUMBER.match(self.value)
        if found is None:
            return None
        plain, unit = float(found[1].replace(",", "")), found[2].lower()
        if unit == "%":
            return plain / 100
        return plain * _TIMES[unit] if unit in _TIMES else None

    @property
    def rounding(self) -> float:
        """Half a unit of the last digit that is written."""
        found = _NUMBER.match(self.text)
        if found is None or "e" in found[1].lower():
            return 0.0
        digits = len(found[1].partition(".")[2])
        share = 100 if found[2] == "%" else 1
        return 0.5 * 10.0**-digits / share * _TIMES.get(found[2].lower(), 1.0)

    def __str__(self) -> str:
        place = f"{self.file}, line {self.line}" if self.file else f"line {self.line}"
        return f"{place}, {self.column}: {self.text}"


#: the fields of a row by name
ReportedRow = Mapping[str, ReportedValue]


@dataclass(frozen=True, kw_only=True)
class ReportedRun:
    """One run: its settings and end, and its evaluations in order."""

    fields: ReportedRow
    evaluations: tuple[ReportedRow, ...] = ()

    def get(self, name: str) -> ReportedValue | None:
        return self.fields.get(name)

    def number(self, name: str) -> float | None:
        found = self.fields.get(name)
        return found.number if found is not None else None

    def text(self, name: str) -> str:
        found = self.fields.get(name)
        return found.text if found is not None else ""

    @cached_property
    def contestant(self) -> str:
        return self.text("contestant")

    @cached_property
    def settings(self) -> tuple[str, ...]:
        """What has to be equal for two runs to be repetitions."""
        return tuple(self.text(name) for name in SETTINGS)

    @cached_property
    def repeats(self) -> int:
        """How many runs a row stands for: one, or as many as an aggregated row says; with a spread, two or
        more.
        """
        said = [self.number("count") or 0.0]
        said += [float(found[1]) for cell in self.fields.values() if (found := _OF.search(cell.text))]
        spread = "interval" in self.fields or any("±" in cell.text for cell in self.fields.values())
        return round(max(*said, 2.0 if spread else 1.0))


@dataclass(frozen=True, kw_only=True)
class BenchmarkReport:
    """All that was reported; `stated` is what is said of all runs together."""

    source: str
    stated: ReportedRow = field(default_factory=dict)
    contestants: tuple[ReportedRow, ...] = ()
    runs: tuple[ReportedRun, ...] = ()
    claims: tuple[ReportedRow, ...] = ()
    charts: tuple[ReportedRow, ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Contestants in the order in which they first appear."""
        said = [row["contestant"].text for row in self.contestants if "contestant" in row]
        return tuple(dict.fromkeys([*said, *(run.contestant for run in self.runs)]))

    @cached_property
    def by_contestant(self) -> Mapping[str, Sequence[ReportedRun]]:
        found: dict[str, list[ReportedRun]] = {name: [] for name in self.names}
        for run in self.runs:
            found[run.contestant].append(run)
        return found

    def about(self, contestant: str, name: str) -> ReportedValue | None:
        """A field of a contestant: from its own row, else from the first of its runs that has it."""
        for row in self.contestants:
            if name in row and "contestant" in row and row["contestant"].text == contestant:
                return row[name]
        return next(
            (run.fields[name] for run in self.by_contestant.get(contestant, ()) if name in run.fields), None
        )

    def role(self, contestant: str) -> str:
        """`baseline`, `ours`, or nothing."""
        found = self.about(contestant, "role")
        return found.text.lower() if found is not None else ""

    def baselines(self) -> Iterator[str]:
        """Contestants that are named as the ones to beat."""
        yield from (name for name in self.names if self.role(name) == "baseline")
