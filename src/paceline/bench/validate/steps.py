"""Sets of whole training steps on one device."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from paceline.bench import frameworks, models
from paceline.bench.validate.case import Answer, Case, Row, csv_rows, find, json_rows
from paceline.bench.validate.devices import curves_without
from paceline.catalog import devices
from paceline.cost.chip import chip
from paceline.errors import PacelineError, UnknownName
from paceline.predict.interval import around
from paceline.predict.step import Conditions, predict
from paceline.spec.device import Device
from paceline.spec.prediction import Prediction
from paceline.spec.workload import Workload

#: of allocated memory; from the H200 steps, where lifetimes are exact and workspaces are not
MEMORY_SIGMA = 0.03


def _naive(workload: Workload, device: Device) -> dict[str, float]:
    """FLOPs at the peak of the precision, and sixteen bytes per parameter: each is given its best constant."""
    target = chip(device)
    seconds = 0.0
    for index in workload.order:
        seconds += sum(op.flops / target.peaks.get(op.dtype, target.peaks["fp32"]) for op in workload.segments[index].ops if op.flops)
    return {"step_s": seconds, "kernel_s": seconds, "peak_bytes": 16.0 * workload.parameter_count}


def _answers(p: Prediction) -> dict[str, Answer]:
    return {
        "step_s": Answer(p.step_s, p.step_s_low, p.step_s_high),
        "kernel_s": Answer(p.kernel_s, p.kernel_s_low, p.kernel_s_high),
        "peak_bytes": Answer(p.peak_bytes, *around(p.peak_bytes, MEMORY_SIGMA)),
    }


def _case(
    name: str, device: Device, measured: Mapping[str, float], make: Callable[[], Workload], conditions: Conditions, accumulate: int = 1,
) -> Case:
    """A step of `accumulate` micro-batches and one update."""
    built: list[Workload] = []

    def workload() -> Workload:
        if not built:
            built.append(make())
        return built[0]

    def forget(answer: dict[str, Any]) -> dict[str, Any]:
        built.clear()  # hundreds of captured models would not fit in memory
        return answer

    def answers() -> dict[str, Answer]:
        out = _answers(predict(workload(), device, conditions))
        if accumulate > 1:
            micro = _answers(predict(models.without_optimizer(workload()), device, conditions))
            out = {metric: out[metric].plus(micro[metric], accumulate - 1) for metric in ("step_s", "kernel_s")}
        return out

    def naive() -> dict[str, float]:
        return forget({metric: accumulate * value for metric, value in _naive(workload(), device).items()})

    return Case(name=name, device=device.name, measured=measured, predict=answers, naive=naive)


def h200_steps(folder: Path, leave_out: bool) -> Iterable[Case] | None:
    """Our own steps on one H200."""
    path = find(folder / "h200", "steps.jsonl")
    if path is None:
        return None
    device = devices.get("h200")
    out = []
    for number, row in enumerate(json_rows(path), 1):
        measured = {"step_s": row["step_s"], "kernel_s": row["kernel_s"]}
        if row.get("peak_alloc"):
            measured["peak_bytes"] = row["peak_alloc"]
        name = f"{number} {row['model']} b{row['batch']} {row['precision']}"
        out.append(_case(name, device, measured, partial(models.h200_step, row), Conditions()))
    return out


# -- neusight_fp32_training ------------------------------------------------------------------------

_NEUSIGHT: dict[str, dict[str, Any]] = {
    "bert_large": {"model_type": "bert", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    "gpt2_large": {"model_type": "gpt2", "n_embd": 1280, "n_layer": 36, "n_head": 20},
    "gpt2_xl": {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25},
    "gpt3_xl": {"model_type": "gpt2", "n_embd": 3072, "n_layer": 24, "n_head": 24, "n_positions": 2048},
    "gpt3_27": {"model_type": "gpt2", "n_embd": 2560, "n_layer": 32, "n_head": 32, "n_positions": 2048},
    "opt_13": {"model_type": "opt", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "ffn_dim": 8192,
               "word_embed_proj_dim": 2048, "vocab_size": 50272, "max_position_embeddings": 2048},
}


def neusight(folder: Path, leave_out: bool) -> Iterable[Case] | None:
    """FP32 training steps (forward and backward, no optimizer) of transformers with unfused attention."""
    path = find(folder / "published", "neusight_fp32_training.csv")
    if path is None:
        return None
    out = []
    for number, row in enumerate(csv_rows(path, ("device", "model", "mode", "seq", "batch", "variant", "e2e_ms")), 1):
        name = f"{number} {row['device']} {row['model']} b{row['batch']}"
        if row["variant"]:
            out.append(Case(name=name, device=row["device"], skip=f"variant {row['variant']}: several GPUs"))
            continue
        if row["model"] not in _NEUSIGHT:
            out.append(Case(name=name, device=row["device"], skip=f"model {row['model']}: routing depends on data"))
            continue
        try:
            device = devices.get(row["device"])
        except UnknownName as error:
            out.append(Case(name=name, device=row["device"], skip=str(error)))
            continue
        curves = curves_without(device) if leave_out else None
        measured = {"step_s": float(row["e2e_ms"]) * 1e-3}
        out.append(_case(name, device, measured, partial(_neusight_workload, row["model"], int(row["batch"]), int(row["seq"])),
                         replace(frameworks.NEUSIGHT, curves=curves)))
    return out


@cache
def _neusight_workload(model: str, batch: int, seq: int) -> Workload:
    from paceline.capture.resolve import huggingface
    from paceline.capture.step import Settings, trace

    head = "AutoModelForPreTraining" if model.startswith("bert") else None
    config = {"vocab_size": 30522, **_NEUSIGHT[model]} if model.startswith("bert") else _NEUSIGHT[model]
    job = huggingface(config, batch=batch, seq=seq, name=model, head=head, attention="eager")
    return models.without_optimizer(trace(job, Settings(precision="fp32", fused_attention=False)))


# -- timm_train_rtx3090 ----------------------------------------------------------------------------


def timm(folder: Path, leave_out: bool) -> Iterable[Case] | None:
    """AMP training steps of timm's models on one RTX 3090."""
    path = find(folder / "published", "timm_train_rtx3090.csv")
    if path is None:
        return None
    device = devices.get("rtx3090")
    needed = ("case_id", "model", "train_img_size", "train_batch_size", "train_step_time_ms", "memory_format")
    rows = sorted(csv_rows(path, needed), key=lambda r: r["model"])
    return [
        _case(f"{r['case_id']} {r['model']} {r['memory_format']}", device, {"step_s": float(r["train_step_time_ms"]) * 1e-3},
              partial(models.timm_step, r), frameworks.TIMM)
        for r in rows
    ]


# -- tables in the common schema -------------------------------------------------------------------


def tf_cnn(folder: Path, leave_out: bool) -> Iterable[Case] | None:
    """Convolutional networks in TensorFlow 1 on P100 and K80, 2017."""
    return _common(folder, "tf_cnn_benchmarks_2017.csv", models.tf_cnn_step, lambda row: frameworks.TENSORFLOW_2017)


def dle(folder: Path, leave_out: bool) -> Iterable[Case] | None:
    """NVIDIA's reference trainings on V100 and A100."""
    return _common(folder, "dle_training_throughput.csv", models.dle_step, frameworks.of_row)


def _common(folder: Path, file: str, make: Callable[[Row], Workload], surroundings: Callable[[Row], Conditions]) -> Iterable[Case] | None:
    path = find(folder / "published", file)
    if path is None:
        return None
    out = []
    for row in csv_rows(path, ("case_id", "model", "gpu", "n_gpus", "step_time_s", "precision", "micro_batch", "grad_accum", "framework")):
        name = f"{row['case_id']} {row['model']} {row['gpu']} {row['precision']} b{row['micro_batch']}"
        reason = None
        if row["n_gpus"] != "1":
            reason = "several GPUs: comes with distributed prediction"
        elif not row["step_time_s"] or not re.fullmatch(r"\d+", row["micro_batch"]):
            reason = "no step time or batch given"
        else:
            reason = models.unknown(row)
        if reason:
            out.append(Case(name=name, device=row["gpu"], skip=reason))
            continue
        try:
            device = devices.get(models.published_device(row))
        except PacelineError as error:
            out.append(Case(name=name, device=row["gpu"], skip=str(error)))
            continue
        accumulate = int(row["grad_accum"] or 1)
        out.append(_case(name, device, {"step_s": float(row["step_time_s"])}, partial(make, row), surroundings(row), accumulate))
    return out
