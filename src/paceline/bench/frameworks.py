"""What a framework and its host add to a step or take from it, as properties of the framework named in
a row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.catalog import frameworks
from paceline.errors import SpecError
from paceline.spec.framework import Framework
from paceline.spec.vocabulary import Precision, Recompute, Sharding, TensorOverlap

#: of the usual fp8 products: PyTorch's that scale by rows (CUTLASS), of the same steps with one scale per
#: tensor (cuBLAS)
ROWWISE_RATE = 0.65


def of_module(row: Mapping[str, Any]) -> Framework:
    """The framework of a row of the common schema that ran a captured module."""
    text, options = row["framework"], row.get("options") or ""
    found = re.search(r"variable_update=(\w+)", options)
    # tf_cnn_benchmarks; variables on devices are spread over them, so that traffic is that of an all-reduce
    if found:
        served = found[1] == "distributed_replicated" or (
            found[1] == "parameter_server" and "local_parameter_device=cpu" in options
        )
        return frameworks.get("tensorflow-1-server" if served else "tensorflow-1")
    words = (("MXNet", "nvidia-mxnet"), ("TensorFlow", "nvidia-tensorflow"), ("Paddle", "nvidia-paddle"))
    return frameworks.get(next((name for word, name in words if word in text), "nvidia-torch"))


# -- many devices ----------------------------------------------------------------------------------


def vtrain() -> Framework:
    """What ran vTrain's steps on many nodes."""
    return frameworks.get("megatron-deepspeed")


def vtrain_single() -> Framework:
    """The same on one node: per-layer times there contain two more passes over the scores, forward and
    backward.
    """
    return replace(vtrain(), unfused_mask=True)


#: words of the column `framework`, first match wins -> framework
_NAMES = (
    (("Sep 2020", "Jan 2021", "SC21", "PTD-P"), "megatron-2021"),
    (("Megatron-LM (2022)",), "megatron-2022"),
    (("DeepSpeed ZeRO-3",), "deepspeed-zero3"),
    (("Megatron-DeepSpeed", "DeepSpeed"), "megatron-deepspeed"),
    (("Meta internal",), "meta-4d"),
    (("NeMo 24.0", "NeMo Megatron 23"), "nemo-2024"),
    (("NeMo", "Nemo", "PyTorch NVIDIA Release"), "nemo"),
    (("Megatron",), "megatron-core"),
    (("llm-foundry",), "llm-foundry"),
    (("MaxText", "maxtext", "JAX", "PAX"), "jax"),
    (("llm.c",), "llm.c"),
)


def distributed(row: Mapping[str, Any]) -> Framework | None:
    """The framework of a row of the common schema that ran on many devices; None where it says nothing that
    is known.
    """
    text = row["framework"]
    logged = "mlcommons" in (row.get("source_path") or "")
    if "torchtitan" in text or ("PyTorch 2.0" in text and not logged):
        return _torch(row)
    if "bigscience" in (row.get("source_id") or ""):
        return kept_in_fp32(row, _bigscience(row))
    # their submissions run NVIDIA's code, whatever stack they name
    if logged and row.get("tp") and "NVIDIA" in row["gpu"]:
        return frameworks.get("nvidia-mlperf")
    for words, name in _NAMES:
        if any(word in text for word in words):
            return _with_options(row, name)
    if logged or not text:
        raise SpecError(f"framework {text[:40]!r} is not known")
    return None


def _torch(row: Mapping[str, Any]) -> Framework:
    """PyTorch as a row says that it was run."""
    text = row["framework"]
    options = (row.get("options") or "") + text
    compiled = "torch-compile" if (row.get("date") or "") >= "2025" else "torch-compile-2024"
    found = frameworks.get(compiled if "torch.compile" in options else "torch")
    if "nanoGPT" in text:
        found = replace(frameworks.get("nanogpt"), fusion=found.fusion)
    if "rowwise" in row["precision"]:
        found = replace(found, fp8_rate=ROWWISE_RATE)
    if "asynctp" in options.lower().replace(" ", ""):
        found = replace(found, tp_overlap=TensorOverlap.FULL)
    return found


def _with_options(row: Mapping[str, Any], name: str) -> Framework:
    """The framework called `name` as a row says that it was run."""
    experts = row.get("family") == "moe-lm"
    name = "deepspeed" if name == "megatron-deepspeed" and sharding(row) is Sharding.FSDP else name
    found = frameworks.get(_bridge(row) if "Megatron-Bridge" in row["framework"] and experts else name)
    if "overlap disabled" in (row.get("options") or ""):
        return replace(found, tp_overlap=TensorOverlap.NONE, p2p_overlap=False, dp_overlap=False)
    return found


def _bridge(row: Mapping[str, Any]) -> str:
    """Which Megatron-Bridge ran a mixture of experts: its kernels changed with release 26.06, for MXFP8."""
    release = re.search(r"Megatron-Bridge (\d+)\.(\d+)", row["framework"])
    late = release is not None and (int(release[1]), int(release[2])) >= (26, 6)
    return "megatron-bridge-2026" if late and "MX" in (row.get("precision") or "") else "megatron-bridge"


def _bigscience(row: Mapping[str, Any]) -> Framework:
    """Processes were bound to the wrong sockets until 25 February 2022, which the source found and repaired:
    hosts were half as fast.
    """
    found = frameworks.get("bigscience")
    day = (row.get("notes") or "")[:5]
    return (
        replace(found, issue_s=2 * found.issue_s, issue_backward_s=2 * found.issue_backward_s)
        if day < "02-25"
        else found
    )


def sharding(row: Mapping[str, Any]) -> Sharding:
    """What the data-parallel ranks of a row share."""
    text = (row.get("sharding") or "").lower()
    if "offload" in text:
        raise SpecError("offloaded to the host")
    words = (
        ("zero3", Sharding.FSDP),
        ("zero2", Sharding.ZERO2),
        ("fsdp", Sharding.FSDP),
        ("shard_grad_op", Sharding.FSDP),
        ("zero1", Sharding.ZERO1),
        ("distributed", Sharding.ZERO1),
    )
    for word, kind in words:
        if word in text:
            return kind
    return Sharding.DDP


def sequence_parallel(row: Mapping[str, Any]) -> bool:
    """Whether norms are split over the tensor-parallel ranks: where a row says so, and in frameworks that
    always do.
    """
    options = (row.get("options") or "").lower()
    if "sequence parallel" in options:
        return "no sequence parallel" not in options
    always = ("NeMo", "Nemo", "Megatron-Core", "torchtitan", "NVIDIA Release", "Meta internal")
    return any(word in row["framework"] for word in always) and int(float(row["tp"] or 1)) > 1


def recompute(row: Mapping[str, Any]) -> Recompute:
    """What of a row's activations is computed again."""
    text = (row.get("recompute") or "").lower()
    return next((kind for kind in Recompute if kind in text), Recompute.NONE)


def precision(row: Mapping[str, Any]) -> Precision:
    """Of the products in the layers."""
    text = (row.get("precision") or "").lower()
    for word, kind in (
        ("fp4", Precision.FP4),
        ("fp8", Precision.FP8),
        ("float8", Precision.FP8),
        ("bf16", Precision.BF16),
        ("fp16", Precision.FP16),
        ("fp32", Precision.FP32),
    ):
        if word in text:
            return kind
    raise SpecError("no precision given")


def kept_in_fp32(row: Mapping[str, Any], found: Framework) -> Framework:
    """The framework where a row says that gradients are kept and reduced in fp32."""
    return (
        replace(found, fp32_gradients=True, reduce_fp32=True)
        if "fp32 grad" in (row.get("precision") or "")
        else found
    )


def adapters(row: Mapping[str, Any]) -> bool:
    """Whether only low-rank adapters are trained."""
    return "lora" in (row.get("options") or "").lower()


def reshard(row: Mapping[str, Any]) -> bool:
    """Whether gathered parameters are dropped again after the forward pass."""
    return "shard_grad_op" not in (row.get("sharding") or "").lower()
