"""Sets of single operators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from paceline.bench import kernels
from paceline.bench.validate.case import Case, PredictedValue, csv_rows, find, json_rows
from paceline.bench.validate.devices import curves_without
from paceline.catalog import devices
from paceline.cost.chip import chip
from paceline.cost.curves import Curves, curves_for
from paceline.cost.operators import times
from paceline.cost.pack import pack_ops
from paceline.predict.interval import around
from paceline.spec.device import Device
from paceline.spec.workload import Op

#: what CUDA events around one call add on the H200's host, and what autograd needs at least for a backward
#: pass
EVENT_S = 3.3e-6
BACKWARD_FLOOR_S, CONV_BACKWARD_FLOOR_S = 4.6e-5, 7e-5
#: the host between the two events of one framework call, by operator, on servers of 2017 to 2021 (kernels/)
CALL_S = {"linear": 5.2e-5, "bmm": 3.2e-5, "conv": 6.5e-5, "ln": 4.7e-5, "softmax": 3.4e-5}
POINTWISE_CALL_S = 2.9e-5
#: the same of kernels_fp16/
FP16_CALL_S = 1.9e-5
#: standard deviations of the logarithm: one shape's error is larger than a step's
H200_SIGMA = {"gemm_s": 0.11, "memory_bound_s": 0.13, "attention_s": 0.10, "conv_s": 0.32}
NOT_GIVEN = "make-up not given by the source"
KERNEL_SIGMA = {"vector": 0.21, "bmm": 0.33, "conv": 0.37, "linear": 0.37, "fp16": 0.24}
#: a device that was left out of the fit errs by so much more
UNSEEN = 1.3


def _seconds(ops: Sequence[Op], device: Device, curves: Curves) -> np.ndarray:
    return times(pack_ops(ops), chip(device), curves).seconds


def _peak_seconds(ops: Sequence[Op], device: Device) -> float:
    """What the roofline's larger term would take: the naive guess is a constant times this."""
    target = chip(device)
    flops = sum(op.flops / target.peaks.get(op.dtype, target.peaks["fp32"]) for op in ops)
    return flops or sum(op.bytes_read + op.bytes_written for op in ops) / target.bandwidth


_H200_METRIC = {"gemm": "gemm_s", "bmm": "gemm_s", "conv2d": "conv_s", "sdpa": "attention_s"}


def h200_ops(folder: Path, leave_out: bool) -> Iterable[Case] | None:
    """Microbenchmarks of one H200."""
    path = find(folder / "h200", "ops.jsonl")
    if path is None:
        return None
    device = devices.get("h200")
    curves = curves_for(device)
    cases = []
    for number, row in enumerate(json_rows(path), 1):
        columns = kernels.h200_op(row)
        if not columns:
            cases.append(
                Case(
                    name=f"{number} {row['op']}",
                    device="h200",
                    skip=f"{row['op']}: not an operator of a training step",
                )
            )
        for column, ops in columns.items():
            if not row.get(column):
                continue
            metric = _H200_METRIC.get(row["op"], "memory_bound_s")
            value = float(_seconds(ops, device, curves).sum()) + EVENT_S
            if column.startswith("bwd"):
                value = max(value, CONV_BACKWARD_FLOOR_S if row["op"] == "conv2d" else BACKWARD_FLOOR_S)
            answer, metrics = PredictedValue(value, *around(value, H200_SIGMA[metric])), (metric, "op_s")
            cases.append(
                _known(
                    f"{number} {row['op']} {column}",
                    device,
                    metrics,
                    row[column],
                    answer,
                    _peak_seconds(ops, device),
                )
            )
    return cases


def fp32_kernels(folder: Path, leave_out: bool) -> Iterable[Case] | None:
    """FP32 operators on several GPUs."""
    paths = sorted((folder / "kernels").glob("*.csv.gz")) + sorted((folder / "kernels").glob("*.csv"))
    if not paths:
        return None
    cases: list[Case] = []
    for path in paths:
        by_device: dict[str, list[tuple[str, float, list[Op]]]] = {}
        for number, row in enumerate(csv_rows(path, ("Device", "OPName", "Latency")), 1):
            by_device.setdefault(row["Device"], []).append(
                (f"{path.name}:{number}", float(row["Latency"]) * 1e-3, kernels.fp32_kernel(row))
            )
        for name, rows in by_device.items():
            device = devices.get(name)
            curves = curves_without(device) if leave_out else curves_for(device)
            operator = path.name.split(".")[0]
            predicted = _seconds([op for _, _, ops in rows for op in ops], device, curves) + CALL_S.get(
                operator, POINTWISE_CALL_S
            )
            kind = operator if operator in ("linear", "bmm", "conv") else "vector"
            for (label, measured, ops), value in zip(rows, predicted, strict=True):
                cases.append(
                    _kernel_case(
                        label, device, kind, measured, float(value), ops, UNSEEN if leave_out else 1.0
                    )
                )
    return cases


def _kernel_case(
    label: str, device: Device, kind: str, measured: float, value: float, ops: list[Op], wider: float = 1.0
) -> Case:
    answer = PredictedValue(value, *around(value, wider * KERNEL_SIGMA[kind]))
    return _known(label, device, ("latency_s", f"{kind}_s"), measured, answer, _peak_seconds(ops, device))


def _known(
    name: str, device: Device, metrics: Sequence[str], measured: float, answer: PredictedValue, naive: float
) -> Case:
    """A row whose prediction is there already; it counts under each of the metrics."""
    return Case(
        name=name,
        device=device.name,
        measured=dict.fromkeys(metrics, measured),
        predict=lambda: dict.fromkeys(metrics, answer),
        naive=lambda: dict.fromkeys(metrics, naive),
    )


_FP16_DEVICES = {"a100_sxm4_80gb": "a100-sxm-80gb", "gh200": "gh200"}


def fp16_kernels(folder: Path, leave_out: bool) -> Iterable[Case] | None:
    """FP16 transformer operators on A100 and GH200."""
    root = folder / "kernels_fp16"
    if not root.is_dir():
        return None
    cases: list[Case] = []
    for path in sorted(root.glob("*/*.csv.gz")) + sorted(root.glob("*/*.csv")):
        operator = path.name.split(".")[0].removeprefix("operator_").removesuffix("_fp16")
        name = _FP16_DEVICES.get(path.parent.name, path.parent.name)
        if path.name.startswith("nccl"):
            continue  # collectives belong to distributed prediction
        device = devices.get(name)
        rows = csv_rows(path, ())
        if "F_dur(us)" not in (rows[0] if rows else {}):
            cases += [
                Case(name=f"{path.name}:{i}", device=name, skip=f"{operator}: {NOT_GIVEN}")
                for i in range(1, len(rows) + 1)
            ]
            continue
        pending: list[tuple[str, float, list[Op]]] = []
        for number, row in enumerate(rows, 1):
            pair = kernels.fp16_kernel(operator, row)
            label = f"{path.parent.name}/{path.name}:{number}"
            if pair is None:
                cases.append(Case(name=label, device=name, skip=f"{operator}: {NOT_GIVEN}"))
                continue
            for column, ops in zip(("F_dur(us)", "B_dur(us)"), pair, strict=True):
                measured = float(row[column]) * 1e-6
                if measured < 0.9 * max(_peak_seconds(ops, device), 1e-9):
                    cases.append(
                        Case(
                            name=label,
                            device=name,
                            skip=f"{operator} {column}: faster than the device's peak",
                        )
                    )
                else:
                    pending.append((f"{label} {column[0]}", measured, ops))
        cases += _fp16_cases(pending, device, curves_for(device))
    return cases


def _fp16_cases(pending: list[tuple[str, float, list[Op]]], device: Device, curves: Curves) -> list[Case]:
    flat = [op for _, _, ops in pending for op in ops]
    if not flat:
        return []
    seconds = _seconds(flat, device, curves)
    owner = np.repeat(np.arange(len(pending)), [len(ops) for _, _, ops in pending])
    totals = np.bincount(owner, weights=seconds + FP16_CALL_S, minlength=len(pending))
    return [
        _kernel_case(label, device, "fp16", measured, float(t), ops)
        for (label, measured, ops), t in zip(pending, totals, strict=True)
    ]
