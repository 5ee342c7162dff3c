"""Which model a measurement file means: rows name models in the words of the framework that ran them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from paceline.catalog import clusters, devices
from paceline.errors import SpecError
from paceline.spec.cluster import Cluster
from paceline.spec.vocabulary import Precision

if TYPE_CHECKING:
    from paceline.spec.workload import Workload

#: family in the H200 files -> (model_type, head) of transformers
_HF = {
    "gpt2": ("gpt2", "AutoModelForCausalLM"),
    "bert": ("bert", "AutoModelForMaskedLM"),
    "llama": ("llama", "AutoModelForCausalLM"),
}


def h200_step(row: Mapping[str, Any]) -> Workload:
    """The step that a row of `h200/steps.jsonl` or of a profile ran."""
    from paceline.capture import capture
    from paceline.capture.resolve import huggingface
    from paceline.capture.step import CaptureSettings, trace

    family = row["family"]
    settings: dict[str, Any] = {
        "precision": row["precision"],
        "checkpointing": bool(row.get("checkpointing")),
        "compile": bool(row.get("compile")),
    }
    vision = family == "cnn" or row.get("type") == "vit"
    settings["optimizer"] = row.get("optimizer") or ("sgd" if family in ("cnn", "lstm") else "adamw")
    if family == "cnn":
        last = row.get("layout", "nhwc") == "nhwc"
        return capture(
            f"torchvision:{row['model']}",
            batch=row["batch"],
            image=row["size"],
            channels_last=last,
            **settings,
        )
    if family == "lstm":
        return capture("lstm-1500", batch=row["batch"], seq=row["size"], **settings)
    model_type, head = (row["type"], None) if family == "hf" else _HF.get(family, (family, None))
    config = {"model_type": model_type, **row["cfg"]}
    if model_type == "llama":
        config.setdefault("max_position_embeddings", 16384)
    # steps.jsonl was taken without dropout: its kernel counts have none of the dropout kernels that our own
    # profiles have
    job = huggingface(
        config,
        batch=row["batch"],
        seq=None if vision else row["size"],
        name=row["model"],
        head=head or _head(model_type),
        dropout=family == "hf",
    )
    return trace(job, CaptureSettings(channels_last=vision, **settings)).workload


def _head(model_type: str) -> str | None:
    masked = ("bert", "roberta", "distilbert", "electra", "deberta", "albert")
    return "AutoModelForMaskedLM" if any(model_type.startswith(m) for m in masked) else None


def without_optimizer(workload: Workload) -> Workload:
    """The same step, ending after the backward pass."""
    last = len(workload.segments) - 1
    return replace(
        workload,
        order=tuple(i for i in workload.order if i != last),
        resident={**workload.resident, "optimizer": 0},
    )


def timm_step(row: Mapping[str, Any]) -> Workload:
    """The step that a row of `timm_train_rtx3090.csv` ran."""
    from paceline.capture import capture

    # torch 1.12 had neither fused attention nor, by default, an optimizer that takes all parameters at once
    return capture(
        f"timm:{row['model']}",
        batch=int(row["train_batch_size"]),
        image=int(row["train_img_size"]),
        precision="amp_fp16",
        optimizer="sgd-single",
        channels_last=row["memory_format"] == "nhwc",
        fused_attention=False,
    )


# -- the common schema ----------------------------------------------------------------------------

_DEVICES = {
    "P100-SXM2": "p100-sxm",
    "K80 (GK210, one of two dies per board)": "k80",
    "A100-SXM (DGX A100)": "a100-sxm-{gb}gb",
    "V100-SXM (DGX-1)": "v100-sxm-{gb}gb",
    "V100-SXM (DGX-2)": "v100-sxm-32gb",
    "V100-SXM (DGX-2H)": "v100-sxm-32gb",
}


def published_device(row: Mapping[str, Any]) -> str:
    """Catalog name of the GPU of a row."""
    memory = str(row.get("gpu_mem_gb") or "").split(".")[0]
    name: str = _DEVICES.get(row["gpu"], row["gpu"])
    default = "40" if "a100" in name else "16"
    return name.format(gb=memory if memory in ("16", "32", "40", "80") else default)


#: words of the columns `gpu` and `options`, first match wins -> the node
_HOSTS = (
    ("DGX A100", "dgx-a100"),
    ("DGX-2", "dgx-2"),
    ("P100", "dgx-1-p100"),
    ("DGX-1", "dgx-1-v100"),
    ("K80", "k80-node-10gbe"),
)


#: of the speeds of devices of one kind: clocks under load differ from board to board, and in a full chassis
#: they are lower than where a single device works. What published steps on two to eight devices that have
#: little to communicate lose over those on one
DEVICE_CV = 0.025


def accumulation(row: Mapping[str, Any]) -> int:
    """Micro-batches per step: what the batch is made of, where that comes out whole, else what the row
    says.
    """
    batch, whole = int(row.get("global_batch") or 0), int(row["n_gpus"]) * int(row["micro_batch"])
    return batch // whole if batch and batch % whole == 0 else int(row["grad_accum"] or 1)


def published_cluster(row: Mapping[str, Any]) -> Cluster:
    """The devices of a row that ran on several, in the nodes it names; a part of one node keeps that node's
    links.
    """
    host = next((name for word, name in _HOSTS if word in row["gpu"]), None)
    if host is None:
        raise SpecError(f"no node of {row['gpu']!r} is known")
    node, count = clusters.get(host), int(row["n_gpus"])
    each = min(count, node.node_devices)
    if count % each:
        raise SpecError(f"{count} devices do not fill nodes of {each}")
    return replace(
        node,
        name=f"{count} of {node.name}",
        device=devices.get(published_device(row)),
        node_devices=each,
        nodes=count // each,
        straggler_cv=DEVICE_CV,
    )


_TF_MODELS = {
    "InceptionV3": "inception_v3",
    "ResNet-50": "resnet50",
    "ResNet-152": "resnet152",
    "AlexNet": "alexnet",
    "VGG16": "vgg16",
}

#: model names of the reference trainings -> a model that capture resolves
_DLE_MODELS = {
    "ResNet-50 v1.5": "resnet50",
    "ResNet-50": "resnet50",
    "resnet50": "resnet50",
    "ResNeXt101-32x4d": "timm:resnext101_32x4d",
    "SE-ResNeXt101-32x4d": "timm:seresnext101_32x4d",
    "efficientnet-b0": "torchvision:efficientnet_b0",
    "efficientnet-b4": "torchvision:efficientnet_b4",
    "EfficientNet-B0": "torchvision:efficientnet_b0",
    "EfficientNet-B4": "torchvision:efficientnet_b4",
    "BERT-large": "bert-large",
    "BioBERT (BERT-base)": "bert-base",
}
#: frameworks whose BERT reads data sorted into bins by length: the sequence length of a row is only the
#: longest
_BINNED = ("PyTorch", "PaddlePaddle")
_DLE_PRECISION = {"AMP-fp16": "amp_fp16", "FP32": "fp32", "TF32": "tf32"}


def unknown(row: Mapping[str, Any]) -> str | None:
    """Why a row's model cannot be built, or None."""
    model = row["model"]
    if model in _TF_MODELS or model in _DLE_MODELS:
        if "BERT" in model and not row["seq_len"]:
            return f"model {model}: no sequence length given"
        if "BERT" in model and row["framework"].startswith(_BINNED):
            return (
                f"model {model} in {row['framework']}: sequences come in bins of like length, which are not"
                " given"
            )
        if model in _DLE_MODELS and row["precision"] not in _DLE_PRECISION:
            return f"precision {row['precision']}: not modelled"
        return None
    return f"model {model}: not in the catalog"


def tf_cnn_step(row: Mapping[str, Any]) -> Workload:
    """The step that a row of `tf_cnn_benchmarks_2017.csv` ran: NCHW, plain SGD, static graph."""
    name = _TF_MODELS[row["model"]]
    # without the auxiliary head, as benchmarked
    source = f"torchvision:{name}" if name == "inception_v3" else name
    return _captured(
        source,
        batch=int(row["micro_batch"]),
        image=int(row["image_size"]),
        precision="fp32",
        optimizer="sgd-plain-fused",
        channels_last=False,
    )


@lru_cache(maxsize=8)
def _captured(source: str, **settings: Any) -> Workload:
    """Rows that differ in devices only run the same step, and stand together in their files."""
    from paceline.capture import capture

    return capture(source, **settings)


def dle_step(row: Mapping[str, Any]) -> Workload:
    """The step that one GPU of a row of `dle_training_throughput.csv` ran."""
    model, precision = _DLE_MODELS[row["model"]], _DLE_PRECISION[row["precision"]]
    if model.startswith("bert"):
        # before fused attention was common
        return _captured(
            model,
            batch=int(row["micro_batch"]),
            seq=int(row["seq_len"]),
            precision=precision,
            optimizer="adamw",
            fused_attention=False,
        )
    return _captured(
        model,
        batch=int(row["micro_batch"]),
        image=int(row["image_size"] or 224),
        precision=precision,
        optimizer="sgd",
        channels_last=precision == Precision.AMP_FP16,
    )
