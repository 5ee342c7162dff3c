"""Sets of whole training steps of captured models, on one device and on several."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from paceline import api
from paceline.bench import models
from paceline.bench.frameworks import of_module
from paceline.bench.validate.case import Case, PredictedValue, Row, csv_rows, find, json_rows
from paceline.bench.validate.devices import curves_without
from paceline.catalog import devices, frameworks
from paceline.cost.chip import chip
from paceline.cost.curves import Curves
from paceline.errors import PacelineError, SpecError, UnknownName
from paceline.predict.interval import around
from paceline.spec.cluster import Cluster
from paceline.spec.device import Device
from paceline.spec.framework import Framework
from paceline.spec.plan import Plan
from paceline.spec.prediction import DistributedPrediction, Prediction
from paceline.spec.workload import Workload

#: of the time on several devices over that on one: hosts that feed more of them, and devices of unequal
#: clocks, which no row tells of
SCALING_SIGMA = 0.07


def _naive(workload: Workload, device: Device) -> dict[str, float]:
    """FLOPs at the peak of the precision, and sixteen bytes per parameter: each is given its best
    constant.
    """
    target = chip(device)
    seconds = 0.0
    for index in workload.order:
        seconds += sum(
            op.flops / target.peaks.get(op.dtype, target.peaks["fp32"])
            for op in workload.segments[index].ops
            if op.flops
        )
    return {"step_s": seconds, "kernel_s": seconds, "peak_bytes": 16.0 * workload.parameter_count}


def _answers(p: Prediction) -> dict[str, PredictedValue]:
    return {
        "step_s": PredictedValue(p.step_s, p.step_s_low, p.step_s_high),
        "kernel_s": PredictedValue(p.kernel_s, p.kernel_s_low, p.kernel_s_high),
        "peak_bytes": PredictedValue(p.peak_bytes, p.memory.peak_low_bytes, p.memory.peak_high_bytes),
    }


def _case(
    name: str,
    device: Device,
    measured: Mapping[str, float],
    make: Callable[[], Workload],
    framework: Framework | None = None,
    accumulate: int = 1,
    curves: Curves | None = None,
) -> Case:
    """A step of `accumulate` micro-batches and one update, on one device."""
    built: list[Workload] = []

    def workload() -> Workload:
        if not built:
            built.append(make())
        return built[0]

    def forget(answer: dict[str, Any]) -> dict[str, Any]:
        built.clear()  # hundreds of captured models would not fit in memory
        return answer

    def answers() -> dict[str, PredictedValue]:
        if accumulate > 1:
            p = _accumulated(workload(), _alone(device), accumulate, framework)
            return {"step_s": PredictedValue(p.step_s, p.step_s_low, p.step_s_high)}
        return _answers(api.predict(workload(), device, framework=framework, curves=curves))

    def naive() -> dict[str, float]:
        return forget({metric: accumulate * value for metric, value in _naive(workload(), device).items()})

    return Case(name=name, device=device.name, measured=measured, predict=answers, naive=naive)


def _alone(device: Device) -> Cluster:
    return Cluster(name=device.name, title=device.title, device=device, node_devices=1, tiers=())


def _accumulated(
    workload: Workload, cluster: Cluster, accumulate: int, framework: Framework | None
) -> DistributedPrediction:
    """A step of so many micro-batches on each device of a cluster."""
    plan = Plan(gbs=cluster.device_count * workload.batch * accumulate)
    return api.predict(workload, plan, cluster, framework=framework)


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
        out.append(_case(name, device, measured, partial(models.h200_step, row)))
    return out


# -- neusight_fp32_training ------------------------------------------------------------------------

_NEUSIGHT: dict[str, dict[str, Any]] = {
    "bert_large": {
        "model_type": "bert",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    "gpt2_large": {"model_type": "gpt2", "n_embd": 1280, "n_layer": 36, "n_head": 20},
    "gpt2_xl": {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25},
    "gpt3_xl": {"model_type": "gpt2", "n_embd": 3072, "n_layer": 24, "n_head": 24, "n_positions": 2048},
    "gpt3_27": {"model_type": "gpt2", "n_embd": 2560, "n_layer": 32, "n_head": 32, "n_positions": 2048},
    "opt_13": {
        "model_type": "opt",
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "ffn_dim": 8192,
        "word_embed_proj_dim": 2048,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
    },
}


def neusight(folder: Path, leave_out: bool) -> Iterable[Case] | None:
    """FP32 training steps (forward and backward, no optimizer) of transformers with unfused attention."""
    path = find(folder / "published", "neusight_fp32_training.csv")
    if path is None:
        return None
    out = []
    for number, row in enumerate(
        csv_rows(path, ("device", "model", "mode", "seq", "batch", "variant", "e2e_ms")), 1
    ):
        name = f"{number} {row['device']} {row['model']} b{row['batch']}"
        if row["variant"]:
            out.append(Case(name=name, device=row["device"], skip=f"variant {row['variant']}: several GPUs"))
            continue
        if row["model"] not in _NEUSIGHT:
            out.append(
                Case(name=name, device=row["device"], skip=f"model {row['model']}: routing depends on data")
            )
            continue
        try:
            device = devices.get(row["device"])
        except UnknownName as error:
            out.append(Case(name=name, device=row["device"], skip=str(error)))
            continue
        curves = curves_without(device) if leave_out else None
        measured = {"step_s": float(row["e2e_ms"]) * 1e-3}
        out.append(
            _case(
                name,
                device,
                measured,
                partial(_neusight_workload, row["model"], int(row["batch"]), int(row["seq"])),
                frameworks.get("transformers-2023"),
                curves=curves,
            )
        )
    return out


@cache
def _neusight_workload(model: str, batch: int, seq: int) -> Workload:
    from paceline.capture.resolve import huggingface
    from paceline.capture.step import CaptureSettings, trace

    head = "AutoModelForPreTraining" if model.startswith("bert") else None
    config = {"vocab_size": 30522, **_NEUSIGHT[model]} if model.startswith("bert") else _NEUSIGHT[model]
    job = huggingface(config, batch=batch, seq=seq, name=model, head=head, attention="eager")
    return models.without_optimizer(
        trace(job, CaptureSettings(precision="fp32", fused_attention=False)).workload
    )


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
        _case(
            f"{r['case_id']} {r['model']} {r['memory_format']}",
            device,
            {"step_s": float(r["train_step_time_ms"]) * 1e-3},
            partial(models.timm_step, r),
            frameworks.get("torch-1"),
        )
        for r in rows
    ]


# -- tables in the common schema -------------------------------------------------------------------


def tf_cnn(folder: Path, leave_out: bool) -> Iterable[Case] | None:
    """Convolutional networks in TensorFlow 1 on P100 and K80, 2017."""
    return _common(folder, "tf_cnn_benchmarks_2017.csv", models.tf_cnn_step)


def dle(folder: Path, leave_out: bool) -> Iterable[Case] | None:
    """NVIDIA's reference trainings on V100 and A100."""
    return _common(folder, "dle_training_throughput.csv", models.dle_step)


def _common(folder: Path, file: str, make: Callable[[Row], Workload]) -> Iterable[Case] | None:
    path = find(folder / "published", file)
    if path is None:
        return None
    rows = csv_rows(
        path,
        (
            "case_id",
            "model",
            "gpu",
            "n_gpus",
            "step_time_s",
            "precision",
            "micro_batch",
            "grad_accum",
            "framework",
        ),
    )
    alone = {_alike(row): row for row in rows if row["n_gpus"] == "1" and row["step_time_s"]}
    out = []
    for row in rows:
        several = f" x{row['n_gpus']}" if row["n_gpus"] != "1" else ""
        name = (
            f"{row['case_id']} {row['model']} {row['gpu']}{several} {row['precision']} b{row['micro_batch']}"
        )
        try:
            if not row["step_time_s"] or not re.fullmatch(r"\d+", row["micro_batch"]):
                raise SpecError("no step time or batch given")
            if (reason := models.unknown(row)) is not None:
                raise SpecError(reason)
            if several:
                out.append(_several(name, row, make, alone.get(_alike(row))))
                continue
            device = devices.get(models.published_device(row))
        except PacelineError as error:
            out.append(Case(name=name, device=row["gpu"], skip=str(error)))
            continue
        measured = {"step_s": float(row["step_time_s"])}
        out.append(
            _case(name, device, measured, partial(make, row), of_module(row), models.accumulation(row))
        )
    return out


def _alike(row: Row) -> tuple[str, ...]:
    """What rows that differ in the number of GPUs have in common."""
    columns = ("model", "framework", "gpu", "gpu_mem_gb", "precision", "seq_len", "micro_batch")
    source = re.findall(r"(?:data|instance)=[^;]*", row.get("options") or "")
    return (*(row.get(column) or "" for column in columns), *source)


def _several(name: str, row: Row, make: Callable[[Row], Workload], alone: Row | None) -> Case:
    """A step on several GPUs; where the same was measured on one, also by how much longer a micro-batch takes
    than there.
    """
    cluster, framework, accumulate = models.published_cluster(row), of_module(row), models.accumulation(row)
    measured = {"step_multi_s": float(row["step_time_s"])}
    single = models.accumulation(alone) if alone else 1
    if alone:
        measured["scaling"] = measured["step_multi_s"] / accumulate / (float(alone["step_time_s"]) / single)

    def answers() -> dict[str, PredictedValue]:
        p = _accumulated(make(row), cluster, accumulate, framework)
        one = _accumulated(make(row), _alone(cluster.device), single, framework)
        ratio = p.step_s / accumulate / (one.step_s / single)
        sigma = SCALING_SIGMA + 0.3 * p.exposed_s / p.step_s
        return {
            "step_multi_s": PredictedValue(p.step_s, p.step_s_low, p.step_s_high),
            "scaling": PredictedValue(ratio, *around(ratio, sigma)),
        }

    def naive() -> dict[str, float]:
        return {"step_multi_s": accumulate * _naive(make(row), cluster.device)["step_s"], "scaling": 1.0}

    return Case(name=name, device=cluster.device.name, measured=measured, predict=answers, naive=naive)
