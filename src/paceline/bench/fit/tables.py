"""Small helpers that every fit shares: subsets of entries, curves as plain tables, report lines."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.bench.fit.solve import FitQuality
from paceline.cost.pack import Labels, MatrixEntries


def take(entries: MatrixEntries, keep: NDArray[np.bool_]) -> MatrixEntries:
    """A subset of the products of a group."""
    columns: dict[str, Any] = {f.name: getattr(entries, f.name) for f in fields(entries)}
    kept: dict[str, Any] = {
        name: c.take(keep) if isinstance(c, Labels) else c[keep] for name, c in columns.items()
    }
    return MatrixEntries(**kept)


def plain(curve: Any) -> dict[str, Any]:
    """A curve as a table of four-digit numbers; zeros that a constructor supplies are left out."""
    out: dict[str, Any] = {}
    for f in fields(curve):
        value = getattr(curve, f.name)
        if isinstance(value, dict):
            if value:
                out[f.name] = {k: float(f"{v:.4g}") for k, v in value.items()}
        elif value or f.name not in ("element", "row", "step"):
            out[f.name] = float(f"{value:.4g}")
    return out


def line(group: str, quality: FitQuality) -> str:
    """One line of a fit's report."""
    return (
        f"{group:40s} rows {quality.rows:6d}  median {100 * quality.median:5.1f} %  mean"
        f" {100 * quality.mean:5.1f} %"
    )
