"""FP32 constants of older GPUs, from single operators measured by others on six of them (`kernels/`).

Each architecture gets curves for matrix products and convolutions, and a factor by which its memory
falls short of what Hopper's reaches of the datasheet. For every device there is also a file fitted
without it, which `paceline validate --leave-out-device` uses.
"""

from __future__ import annotations

import csv
import gzip
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.bench import kernels
from paceline.bench.fit import solve
from paceline.bench.fit.tables import line, plain, take
from paceline.catalog import devices
from paceline.cost.chip import chip
from paceline.cost.curves import Curves
from paceline.cost.operators import features
from paceline.cost.pack import MOST_ALIGNED, PackedOps, pack_ops
from paceline.cost.stream import StreamCurve, constants
from paceline.spec.device import Device
from paceline.spec.workload import Op

#: rows of each operator and device that go into a fit: more change nothing but its time
SAMPLE = 400
#: curve file -> devices it is fitted to; the P4's multiprocessors are not those of the P100, which stands for
#: the rest of Pascal
ARCHITECTURES = {
    "pascal": ("p100-pcie",),
    "p4": ("p4",),
    "volta": ("v100-pcie-32gb",),
    "turing": ("t4",),
    "ampere": ("a100-pcie-40gb", "a100-pcie-80gb"),
}
#: architectures whose multiprocessors are most alike: they stand in for each other
ALIKE = (("pascal", "p4"), ("volta", "turing", "ampere"))
#: device time of an empty kernel; rows below which a group is left to the file it inherits
BARE_S, FEW = 3e-6, 20
_POINTWISE = ("add", "mul", "relu", "tanh", "divu", "addu")
#: every group whose time is traffic
STREAMS = (
    "elementwise",
    "cast",
    "copy",
    "cat",
    "fill",
    "gather",
    "scatter",
    "reduce",
    "batchnorm",
    "pool",
    "optimizer",
    "norm",
    "softmax",
)


@dataclass(frozen=True, slots=True)
class OperatorRows:
    """Rows of one operator on one device."""

    ops: list[Op]
    seconds: list[float]


def read(folder: Path) -> dict[str, dict[str, OperatorRows]]:
    """Device -> operator -> a sample of its rows."""
    out: dict[str, dict[str, OperatorRows]] = defaultdict(dict)
    for path in sorted(folder.glob("*.csv.gz")):
        by_device: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        with gzip.open(path, "rt") as f:
            for row in csv.DictReader(f):
                by_device[devices.get(row["Device"]).name].append(row)
        for name, rows in by_device.items():
            chosen = random.Random(0).sample(rows, min(SAMPLE, len(rows)))
            out[name][path.name.split(".")[0]] = OperatorRows(
                [kernels.fp32_kernel(r)[0] for r in chosen], [float(r["Latency"]) * 1e-3 for r in chosen]
            )
    return out


def others(left_out: str) -> tuple[str, ...]:
    """The devices to learn from when `left_out` is to be predicted unseen: its own architecture, else those
    built alike.
    """
    own = next(name for name, members in ARCHITECTURES.items() if left_out in members)
    alike = next(names for names in ALIKE if own in names)
    nearest = tuple(d for d in ARCHITECTURES[own] if d != left_out)
    return nearest or tuple(d for name in alike for d in ARCHITECTURES[name] if d != left_out)


def fit(
    data: Mapping[str, Mapping[str, OperatorRows]], names: Sequence[str], base: Curves, report: list[str]
) -> dict[str, Any]:
    """Tables of one file, fitted to the devices `names` together; `base` is the file it inherits from."""
    chips = [devices.get(name) for name in names]
    tables: dict[str, Any] = {"matrix": {}, "stream": {}, "scale": {}}
    products = _group(data, names, ("linear", "bmm"))
    tables["matrix"]["gemm.fp32"] = _matrix(
        "gemm.fp32", chips, products, report, layouts=("tn",), alignments=("1",)
    )
    convolutions = _group(data, names, ("conv",))
    # filters of one tap were not measured, but are plain products
    shapes = {
        "conv1": {k: v for k, v in tables["matrix"]["gemm.fp32"].items() if k not in ("layouts", "alignment")}
    }
    for kind in ("conv", "winograd", "stem"):
        group = f"{kind}.fprop.fp32"
        if any(group in packed.matrix for packed, _, _ in convolutions):
            shapes[kind] = _matrix(group, chips, convolutions, report)
    # nor were backward passes: they are taken to reach what the forward pass does
    tables["matrix"] |= {
        f"{kind}.{which}.fp32": curve
        for kind, curve in shapes.items()
        for which in ("fprop", "dgrad", "wgrad")
    }
    shortfall = np.median(
        [
            _memory_factor(device, data[device.name], base)
            for device in chips
            if any(op in data[device.name] for op in _POINTWISE)
        ]
    )
    tables["scale"] |= {group: float(f"{shortfall:.3g}") for group in STREAMS}
    report.append(f"{'memory traffic against hopper':40s} x {shortfall:.2f}")
    for op, group in (
        ("ln", "norm.forward"),
        ("softmax", "softmax.forward.warp"),
        ("softmax", "softmax.forward.block"),
    ):
        curve2 = _stream(group, chips, data, op, report)
        if curve2 is not None:
            tables["stream"][group] = plain(curve2)
            tables["scale"][group] = 1.0
    return tables


def _group(
    data: Mapping[str, Mapping[str, OperatorRows]], names: Sequence[str], operators: Sequence[str]
) -> list[tuple[PackedOps, np.ndarray, np.ndarray]]:
    """Per device: packed operators, their times, and the number of their operator."""
    out = []
    for name in names:
        ops, seconds, which = [], [], []
        for number, operator in enumerate(operators):
            rows = data[name].get(operator, OperatorRows([], []))
            ops += rows.ops
            seconds += rows.seconds
            which += [number] * len(rows.ops)
        out.append((pack_ops(ops), np.array(seconds), np.array(which, dtype=int)))
    return out


def _matrix(
    group: str,
    chips: Sequence[Device],
    packed: list[tuple[PackedOps, np.ndarray, np.ndarray]],
    report: list[str],
    **options: Any,
) -> dict[str, Any]:
    blocks: list[solve.MeasuredProducts] = []
    for device, (rows, seconds, which) in zip(chips, packed, strict=True):
        if group not in rows.matrix:
            continue
        entries = rows.matrix[group]
        entries = take(entries, (entries.m > 1) & (entries.n > 1))
        entries = replace(entries, align=np.where(entries.align < MOST_ALIGNED, 1, MOST_ALIGNED))
        # each device was measured on a host of its own: its launch time is its own unknown per operator
        host = which[entries.owner] + 2 * len(blocks)
        blocks.append(
            solve.MeasuredProducts(
                chip(device), chip(device).peaks["fp32"], entries, seconds[entries.owner], host
            )
        )
    curve, quality, _ = solve.fit_matrix(blocks, vector=True, **options)
    report.append(line(f"{group} {'+'.join(d.name for d in chips)}", quality))
    # below 16 elements it hardly matters how far
    shares = {str(2**i): share for share in curve.alignment.values() for i in range(4)}
    return plain(replace(curve, alignment=shares))


def _memory_factor(device: Device, rows: Mapping[str, OperatorRows], base: Curves) -> float:
    """Measured over predicted time of large pointwise operators, with Hopper's share of the datasheet
    bandwidth.
    """
    ratios = []
    for operator in _POINTWISE:
        if operator not in rows:
            continue
        packed = pack_ops(rows[operator].ops)
        entries = packed.stream["elementwise"]
        predicted = features(entries, chip(device)) @ constants(base.stream_curve("elementwise"))
        measured = np.array(rows[operator].seconds)[entries.owner]
        large = predicted > 1e-4
        floor = np.quantile(measured, 0.02)  # host time, which large rows contain as well
        ratios += list((measured[large] - floor) / predicted[large])
    return float(np.median(ratios))


def _stream(
    group: str,
    chips: Sequence[Device],
    data: Mapping[str, Mapping[str, OperatorRows]],
    operator: str,
    report: list[str],
) -> StreamCurve | None:
    tables, measured = [], []
    for device in chips:
        rows = data[device.name].get(operator)
        packed = pack_ops(rows.ops).stream if rows is not None else {}
        if rows is None or group not in packed:
            continue
        seconds = np.array(rows.seconds)[packed[group].owner]
        floor = np.quantile(rows.seconds, 0.02)  # host time; rows near it say nothing of the device
        clear = seconds > 1.5 * floor
        tables.append(features(packed[group], chip(device))[clear])
        measured.append(seconds[clear] - floor + BARE_S)
    if sum(map(len, measured)) < FEW:
        return None
    curve, quality = solve.fit_stream_table(np.concatenate(tables), np.concatenate(measured))
    report.append(line(f"{group} {'+'.join(d.name for d in chips)}", quality))
    return curve
