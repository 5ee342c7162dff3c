"""The measurement sets, by name: each turns a data folder into cases, or None where it is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from paceline.bench.validate import operators, steps
from paceline.bench.validate.case import Case

Reader = Callable[[Path, bool], Iterable[Case] | None]

SETS: dict[str, Reader] = {
    "h200_ops": operators.h200_ops,
    "h200_steps": steps.h200_steps,
    "kernels": operators.fp32_kernels,
    "kernels_fp16": operators.fp16_kernels,
    "neusight_fp32_training": steps.neusight,
    "timm_train_rtx3090": steps.timm,
    "tf_cnn_benchmarks_2017": steps.tf_cnn,
    "dle_training_throughput": steps.dle,
}
