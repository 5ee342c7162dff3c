"""Constants of the Hopper file, from whole training steps profiled on an H200 and its microbenchmarks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.bench import kernels, models, profiled
from paceline.bench.fit import solve
from paceline.bench.fit.tables import line, plain, take
from paceline.bench.validate.case import json_rows
from paceline.catalog import devices
from paceline.cost.chip import Chip, chip
from paceline.cost.curves import from_tables
from paceline.cost.operators import times
from paceline.cost.pack import AttentionEntries, MatrixEntries, PackedOps, StreamEntries, pack_ops
from paceline.spec.vocabulary import Precision
from paceline.spec.workload import Op

Array = NDArray[np.float64]

#: what a CUDA event pair around one call adds to a microbenchmark on the H200; fitted with the rest
EVENT_S = 3.3e-6
#: a profile of which less pairs with captured operators was run by another version of the model
PAIRED = 0.9
#: what operators measured alone count for, relative to those measured within steps
ALONE, ALONE_SOURCE = 0.25, "microbenchmark"
#: below so many rows, a matrix group keeps what it cannot tell from its dense sibling
FEW_ROWS = 60
_KEPT = ("intensity", "slope", "cache", "split_s", "reduction", "power", "quantisation", "memory")


@dataclass(frozen=True, slots=True)
class OperatorSample:
    """One operator, its device time and the number of its kernels; `source` for cross-validation."""

    op: Op
    seconds: float
    kernels: float
    source: str


def from_profiles(path: Path) -> list[OperatorSample]:
    """Every operator of every profiled step that pairs with a captured one."""
    out: list[OperatorSample] = []
    for row in profiled.read(path):
        if row["compile"]:
            continue
        pairs, share = profiled.pair(row, models.h200_step(row))
        if share < PAIRED:
            continue
        out += [OperatorSample(p.op, p.seconds, p.kernels, row["model"]) for p in pairs if p.seconds > 0]
    return out


def from_microbenchmarks(path: Path) -> list[OperatorSample]:
    """Every operator of `h200/ops.jsonl`, less the cost of the events around it."""
    out = []
    for row in json_rows(path):
        for column, ops in kernels.h200_op(row).items():
            seconds = row.get(column)
            host_bound = column.startswith("bwd") and (seconds or 0) < 1e-4  # autograd's own overhead shows
            if seconds and len(ops) == 1 and not host_bound:
                out.append(OperatorSample(ops[0], max(seconds - EVENT_S, 0.2 * seconds), 0.0, ALONE_SOURCE))
    return out


def fit(observations: Sequence[OperatorSample], report: list[str]) -> dict[str, Any]:
    """All groups that the observations hold, as tables for a TOML file."""
    target = chip(devices.get("h200"))
    usable = [o for o in observations if o.op.kind != "rnn"]
    packed = pack_ops(o.op for o in usable)
    measured = np.array([o.seconds for o in usable])
    counts = np.array([o.kernels for o in usable])
    tables: dict[str, Any] = {"matrix": {}, "stream": {}, "attention": {}, "kernels": {}}
    _fit_matrices(
        target, packed, measured, np.array([o.source == ALONE_SOURCE for o in usable]), tables, report
    )
    for group, stream in sorted(packed.stream.items()):
        curve, quality = solve.fit_stream(target, stream, measured[stream.owner])
        tables["stream"][group] = plain(curve)
        report.append(line(group, quality))
    for group, attention in sorted(packed.attention.items()):
        peak = target.peaks["tf32" if "fp32" in group else "bf16"]
        curve2, quality = solve.fit_attention(target, peak, attention, measured[attention.owner])
        tables["attention"][group] = plain(curve2)
        report.append(line(group, quality))
    tables["scale"] = _recurrent_scale(target, tables, observations, report)
    for group, entries in _all_groups(packed):
        launches = entries.launches if isinstance(entries, StreamEntries) else np.ones(len(entries.owner))
        inside = counts[entries.owner] > 0  # microbenchmarks do not count kernels
        if inside.any():
            tables["kernels"][group] = round(
                float(counts[entries.owner][inside].sum() / launches[inside].sum()), 2
            )
    return tables


def _recurrent_scale(
    target: Chip, tables: dict[str, Any], observations: Sequence[OperatorSample], report: list[str]
) -> dict[str, float]:
    """How much slower cuDNN's small products per step are than a product of that shape alone."""
    plain = from_tables("fit", {"fit": {"source": "", **tables}})
    scale = {}
    groups: dict[str, list[OperatorSample]] = defaultdict(list)
    for o in observations:
        if o.op.kind == "rnn":
            groups[f"rnn.{o.op.dtype}.{o.op.tags[0]}"].append(o)
    for group, rows in groups.items():
        predicted = times(pack_ops(o.op for o in rows), target, plain).busy
        scale[group] = float(f"{sum(o.seconds for o in rows) / predicted.sum():.3g}")
        report.append(f"{group:40s} rows {len(rows):6d}  scale {scale[group]}")
    return scale


def _all_groups(packed: PackedOps) -> Iterable[tuple[str, MatrixEntries | StreamEntries | AttentionEntries]]:
    yield from sorted(packed.matrix.items())
    yield from sorted(packed.stream.items())
    yield from sorted(packed.attention.items())


def _blocks(
    target: Chip, peak: float, entries: MatrixEntries, seconds: Array, alone: NDArray[np.bool_]
) -> list[solve.MeasuredProducts]:
    """Products inside steps and those measured alone: the former are many and alike, the latter cover more
    shapes.
    """
    shares = [(~alone, 1.0), (alone, max(1.0, np.sqrt(ALONE * (~alone).sum() / max(1, alone.sum()))))]
    return [
        solve.MeasuredProducts(target, peak, take(entries, rows), seconds[rows], weight=float(weight))
        for rows, weight in shares
        if rows.any()
    ]


def _fit_matrices(
    target: Chip,
    packed: PackedOps,
    measured: Array,
    alone: NDArray[np.bool_],
    tables: dict[str, Any],
    report: list[str],
) -> None:
    dense: dict[str, Any] = {}
    # dense groups first: those with few rows start from them
    for group in sorted(
        packed.matrix,
        key=lambda g: (g.split(".")[0] not in ("gemm", "conv", "conv1"), -len(packed.matrix[g].owner)),
    ):
        entries = packed.matrix[group]
        parts = group.split(".")
        dtype = next(p for p in parts if p in target.peaks)
        keep = (entries.m > 1) & (entries.n > 1)
        entries = take(entries, keep)
        seconds = measured[entries.owner]
        sibling = dense.get(".".join([parts[0].removesuffix("-nchw"), *parts[1:]])) or dense.get(
            ".".join(["conv", *parts[1:]])
        )
        sibling = sibling or dense.get(f"gemm.{dtype}") or dense.get("gemm.bf16")
        few = len(seconds) < FEW_ROWS and sibling is not None
        layouts = [
            v
            for v in ("tn", "nt", "nn")
            if parts[0] == "gemm" and entries.layout.total(np.ones(len(seconds))).get(v, 0) >= 20
        ]
        full = 8 if dtype in (Precision.FP16, Precision.BF16) else 4
        alignments = [
            a
            for a in ("1", "2", "4")
            if parts[0] == "gemm" and int(a) < full and (entries.align == int(a)).sum() >= 3
        ]
        if parts[0] == "gemm":
            entries = replace(entries, align=np.minimum(entries.align, full))
        curve, quality, _ = solve.fit_matrix(
            _blocks(target, target.peaks[dtype], entries, seconds, alone[entries.owner]),
            start=sibling,
            fixed=_KEPT if few else (),
            layouts=layouts,
            alignments=alignments,
            vector=dtype == Precision.FP32,
        )
        dense[group] = curve
        tables["matrix"][group] = plain(curve)
        report.append(line(group, quality))
