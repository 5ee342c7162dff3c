"""Half-precision constants of Ampere, from transformer operators measured by others on an A100
(`kernels_fp16/`).

A backward pass of a linear layer is measured as one figure: it is shared between its products by
their FLOPs. bf16 runs the same kernels, so both types get the same constants.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.bench import kernels
from paceline.bench.fit import solve
from paceline.bench.fit.tables import line, plain
from paceline.bench.validate.case import csv_rows
from paceline.catalog import devices
from paceline.cost.chip import Chip, chip
from paceline.cost.curves import Curves
from paceline.cost.pack import pack_ops
from paceline.spec.vocabulary import Precision
from paceline.spec.workload import Op

DEVICE = "a100-sxm-80gb"
FOLDER = "a100_sxm4_80gb"
#: rows of each operator that go into a fit
SAMPLE = 400
_PRODUCTS = ("linear1", "linear2", "linear3", "linear4", "linear_final", "bmm", "baddbmm")


def read(folder: Path, operators: Sequence[str]) -> tuple[list[Op], np.ndarray]:
    """Single operators with their seconds."""
    ops: list[Op] = []
    seconds: list[float] = []
    for operator in operators:
        rows = csv_rows(folder / FOLDER / f"operator_{operator}_fp16.csv.gz", ("F_dur(us)", "B_dur(us)"))
        for row in random.Random(0).sample(rows, min(SAMPLE, len(rows))):
            for column, made in zip(
                ("F_dur(us)", "B_dur(us)"), kernels.fp16_kernel(operator, row) or ((), ()), strict=True
            ):
                total = sum(op.flops for op in made)
                for op in made:
                    if op.flops:
                        ops.append(op)
                        seconds.append(float(row[column]) * 1e-6 * op.flops / total)
    return ops, np.array(seconds)


def _per_cycle(target: Chip) -> float:
    return target.peaks["bf16"] / target.sm_hz


def fit(folder: Path, base: Curves, report: list[str]) -> dict[str, Any]:
    """Tables to add to those of the architecture; `base` is the file of the H200."""
    target = chip(devices.get(DEVICE))
    tables: dict[str, Any] = {"matrix": {}, "stream": {}, "attention": {}, "scale": {}}
    ops, seconds = read(folder, _PRODUCTS)
    entries = pack_ops(ops).matrix["gemm.fp16"]
    # a constant of some 20 us is the framework's, between the clock's two readings
    host = np.zeros(len(entries.owner), dtype=int)
    block = solve.MeasuredProducts(target, target.peaks["fp16"], entries, seconds[entries.owner], host)
    curve, quality, (call_s,) = solve.fit_matrix([block], layouts=("tn", "nn"), fixed=("launch_s",))
    report.append(f"{'host time per call':40s} {1e6 * call_s:.1f} us")
    # all shapes measured are aligned. Ragged ones are limited by issuing loads, at the H200's rate per cycle:
    # a larger share of a smaller peak
    faster = _per_cycle(chip(devices.get("h200"))) / _per_cycle(target)
    ragged = {
        elements: min(1.0, share * faster) for elements, share in base.matrix["gemm.bf16"].alignment.items()
    }
    curve = replace(curve, alignment=ragged)
    tables["matrix"] |= {f"gemm.{dtype}": plain(curve) for dtype in (Precision.FP16, Precision.BF16)}
    report.append(line(f"gemm.fp16 {DEVICE}", quality))
    ops, seconds = read(folder, ("flash_atten",))
    for group, attention in pack_ops(ops).attention.items():
        curve2, quality = solve.fit_attention(
            target, target.peaks["fp16"], attention, seconds[attention.owner]
        )
        stem = group.rpartition(".")[0]
        tables["attention"] |= {f"{stem}.{mask}": plain(curve2) for mask in ("full", "causal")}
        report.append(line(f"{stem} {DEVICE}", quality))
    return tables
