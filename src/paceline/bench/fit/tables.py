"""Small helpers that every fit shares: subsets of entries, curves as plain tables, report lines."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.bench.fit.solve import Quality
from paceline.cost.pack import StreamEntries


def take(entries: Any, keep: NDArray[np.bool_]) -> Any:
    """A subset of entries; the accesses of stream entries are renumbered."""
    index = np.where(keep)[0]
    values: dict[str, Any] = {}
    for f in fields(entries):
        value = getattr(entries, f.name)
        if not f.name.startswith("access_"):
            values[f.name] = [value[i] for i in index] if isinstance(value, list) else value[index]
    if isinstance(entries, StreamEntries):
        inside = keep[entries.access_entry]
        number = np.cumsum(keep) - 1
        values |= {
            "access_entry": number[entries.access_entry[inside]], "access_bytes": entries.access_bytes[inside],
            "access_reuse": entries.access_reuse[inside],
        }
    return type(entries)(**values)


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


def line(group: str, quality: Quality) -> str:
    """One line of a fit's report."""
    return f"{group:40s} rows {quality.rows:6d}  median {100 * quality.median:5.1f} %  mean {100 * quality.mean:5.1f} %"
