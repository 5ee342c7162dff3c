"""One measured row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

# the readers stand with the specifications, where the other rooms can reach them too
from paceline.spec.tables import Row as Row
from paceline.spec.tables import csv_rows as csv_rows
from paceline.spec.tables import find as find
from paceline.spec.tables import json_rows as json_rows
from paceline.spec.tables import text_lines as text_lines


@dataclass(frozen=True, slots=True)
class PredictedValue:
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
    predict: Callable[[], Mapping[str, PredictedValue]] | None = None
    #: what the naive guess takes time (or bytes) to be proportional to, in seconds at peak (or bytes)
    naive: Callable[[], Mapping[str, float]] | None = None
    skip: str | None = None
    #: rows of a set with the same text here differ only in how the work was spread over devices
    sweep: str = ""
