"""Measured steps with the errors of their predictions, as `benchmarks/validated_rows.py` wrote them."""

from __future__ import annotations

import csv
import gzip
import math
from functools import cache
from importlib.resources import files

from paceline.catalog import devices
from paceline.errors import UnknownName
from paceline.spec.prediction import DistributedPrediction
from paceline.spec.validated import Validated


@cache
def rows() -> tuple[Validated, ...]:
    """Every row that ships."""
    data = (files(__package__) / "validated.csv.gz").read_bytes()
    lines = gzip.decompress(data).decode().splitlines()
    return tuple(_read(row) for row in csv.DictReader(lines))


def _read(row: dict[str, str]) -> Validated:
    texts = {key: row[key] for key in ("set", "name", "model", "unit", "device", "precision")}
    return Validated(
        parameters=float(row["parameters"]),
        devices=int(row["devices"]),
        error_pct=float(row["error_pct"]),
        inside=row["inside"] == "1",
        **texts,
    )


def near(p: DistributedPrediction, count: int = 8) -> tuple[Validated, ...]:
    """The rows most like a prediction: of the same unit, by model, device, size and precision."""
    alike = [row for row in rows() if row.unit == p.unit]
    return tuple(sorted(alike, key=lambda row: _apart(row, p))[:count])


def _apart(row: Validated, p: DistributedPrediction) -> float:
    """How unlike two steps are; factors of two in parameters and in devices count alike."""
    size = abs(math.log2(max(1.0, row.parameters) / max(1, p.parameters)))
    many = abs(math.log2(row.devices / p.devices))
    return (
        size
        + 0.5 * many
        + _apart_by_device(row.device, p.device)
        + 1.0 * (row.precision != p.precision)
        - 1.0 * (row.model == p.model)
    )


def _apart_by_device(one: str, other: str) -> float:
    """Another device counts as much as a factor of two in size; another architecture as much as four."""
    if one == other:
        return 0.0
    return 1.0 if _architecture(one) == _architecture(other) else 4.0


@cache
def _architecture(device: str) -> str:
    try:
        return devices.get(device).architecture
    except UnknownName:
        return device
