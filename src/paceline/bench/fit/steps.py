"""Factors by which a device departs from the curves it inherits, from whole training steps measured on it by
others.

Device time of a step is a sum over classes of operators; one factor per class is fitted, drawn
towards the factor that all classes share where the steps do not tell them apart.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import lsq_linear

from paceline.bench import models
from paceline.bench.validate.case import csv_rows
from paceline.catalog import devices
from paceline.cost.chip import chip
from paceline.cost.curves import Curves, closest
from paceline.cost.operators import sustained, times
from paceline.cost.pack import pack
from paceline.errors import PacelineError
from paceline.spec.device import Device
from paceline.spec.workload import Workload

Array = NDArray[np.float64]

#: classes of operators, each by the patterns of its groups' names; "" is what no other pattern matches
Classes = Sequence[tuple[str, ...]]
#: half-precision vision models: which kernels a library has depends on layout and grouping
VISION: Classes = tuple(
    (pattern,)
    for pattern in (
        "",
        "conv.",
        "conv-nchw",
        "conv1.",
        "conv1-nchw",
        "stem",
        "depthwise-plain*nchw",
        "depthwise-plain*nhwc",
        "depthwise-large",
        "depthwise-ragged",
        "grouped*nchw",
        "grouped*nhwc",
        "batchnorm*nchw",
        "batchnorm*nhwc",
        "gemm",
        "elementwise",
        "elementwise.strided",
        "norm",
        "softmax",
        "pool",
        "reduce",
        "copy",
        "cast",
        "optimizer",
    )
)
#: what a handful of steps can tell: arithmetic from memory
COARSE: Classes = (("",), ("conv", "winograd", "stem", "gemm"))
#: one model in so many goes into the fit of a large table; the others are left to judge it by
ONE_IN = 4
#: weight of the common factor, as a share of the weight of the steps
DRAWN = 0.05
#: classes with less of the time than this are left at the common factor
LEAST_SHARE = 0.02
#: how far a class may be from the common factor
APART = 6.0


@dataclass(frozen=True, slots=True)
class StepSample:
    """Predicted device seconds by group, and the step's measured seconds."""

    groups: dict[str, float]
    seconds: float


def timm_steps(path: Path, base: Curves) -> Iterable[StepSample]:
    """A sample of the AMP steps of timm's models on an RTX 3090."""
    device = devices.get("rtx3090")
    for row in csv_rows(path, ("model", "train_step_time_ms")):
        if zlib.crc32(row["model"].encode()) % ONE_IN == 0:
            try:
                yield _step(models.timm_step(row), device, base, float(row["train_step_time_ms"]) * 1e-3)
            except PacelineError:
                continue  # a model that the package no longer has


def k80_steps(path: Path, base: Curves) -> Iterable[StepSample]:
    """One-GPU steps in TensorFlow on one die of a K80."""
    for row in csv_rows(path, ("gpu", "n_gpus", "step_time_s")):
        if row["gpu"].startswith("K80") and row["n_gpus"] == "1" and row["step_time_s"]:
            yield _step(models.tf_cnn_step(row), devices.get("k80"), base, float(row["step_time_s"]))


def _step(workload: Workload, device: Device, base: Curves, seconds: float) -> StepSample:
    packed = pack(workload)
    sizes = np.array([len(segment.ops) for segment in workload.segments])
    runs = np.repeat(np.bincount(workload.order, minlength=len(sizes)), sizes)
    costs = sustained(times(packed, chip(device), base), packed, device)
    return StepSample(packed.groups.total(costs.seconds * runs), seconds)


def fit(steps: Sequence[StepSample], classes: Classes, report: list[str]) -> dict[str, Any]:
    """A table of factors."""
    patterns = tuple(pattern for members in classes for pattern in members)
    of = {group: closest(group, patterns) for step in steps for group in step.groups}
    table = np.array(
        [
            [sum(t for g, t in step.groups.items() if of[g] in members) for members in classes]
            for step in steps
        ]
    )
    measured = np.array([step.seconds for step in steps])
    solution = _solve(table, measured)
    error = np.abs(table @ solution / measured - 1)
    report.append(
        f"{'whole steps':40s} rows {len(steps):6d}  median {100 * np.median(error):5.1f} %  mean"
        f" {100 * error.mean():5.1f} %"
    )
    shares = (table * solution).sum(axis=0) / (table @ solution).sum()
    for members, factor, share in zip(classes, solution, shares, strict=True):
        report.append(
            f"    {', '.join(members) or 'all others':36s} x {factor:.2f}  of time {100 * share:4.1f} %"
        )
    return {
        "scale": {
            name: float(f"{factor:.3g}")
            for members, factor in zip(classes, solution, strict=True)
            for name in members
        }
    }


def _solve(table: Array, measured: Array) -> Array:
    common = float(np.median(measured / table.sum(axis=1)))
    relative = table / measured[:, None]
    draw = np.diag(np.sqrt(DRAWN * len(measured)) * np.maximum(relative.mean(axis=0), LEAST_SHARE))
    weight = np.ones(len(measured))
    for _ in range(15):  # towards the median: some rows have kernels of their own
        left = np.vstack([relative * weight[:, None], draw])
        right = np.concatenate([weight, draw @ np.full(table.shape[1], common)])
        solution = lsq_linear(left, right, bounds=(common / APART, common * APART)).x
        weight = np.sqrt(0.1 / np.maximum(np.abs(relative @ solution - 1), 0.05))
    return np.asarray(solution)
