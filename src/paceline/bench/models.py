"""Which model a measurement file means: rows name models in the words of the framework that ran them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.errors import UnknownName

if TYPE_CHECKING:
    from paceline.spec.workload import Workload

#: family in the H200 files -> (model_type, head) of transformers
_HF = {
    "gpt2": ("gpt2", "AutoModelForCausalLM"),
    "bert": ("bert", "AutoModelForMaskedLM"),
    "llama": ("llama", "AutoModelForCausalLM"),
}


def h200_step(row: dict[str, Any]) -> Workload:
    """The step that a row of `h200/steps.jsonl` or of a profile ran."""
    from paceline.capture import capture
    from paceline.capture.resolve import huggingface
    from paceline.capture.step import Settings, trace

    family = row["family"]
    settings: dict[str, Any] = {"precision": row["precision"], "checkpointing": bool(row.get("checkpointing"))}
    vision = family == "cnn" or row.get("type") == "vit"
    settings["optimizer"] = row.get("optimizer") or ("sgd" if family in ("cnn", "lstm") else "adamw")
    if family == "cnn":
        return capture(f"torchvision:{row['model']}", batch=row["batch"], image=row["size"], channels_last=True, **settings)
    if family == "lstm":
        return capture("lstm-1500", batch=row["batch"], seq=row["size"], **settings)
    model_type, head = (row["type"], None) if family == "hf" else _HF.get(family, (family, None))
    config = {"model_type": model_type, **row["cfg"]}
    if model_type == "llama":
        config.setdefault("max_position_embeddings", 16384)
    # steps.jsonl was taken without dropout: its kernel counts have none of the dropout kernels that our own profiles have
    job = huggingface(
        config, batch=row["batch"], seq=None if vision else row["size"], name=row["model"], head=head or _head(model_type), dropout=family == "hf",
    )
    return trace(job, Settings(channels_last=vision, **settings))


def _head(model_type: str) -> str | None:
    masked = ("bert", "roberta", "distilbert", "electra", "deberta", "albert")
    return "AutoModelForMaskedLM" if any(model_type.startswith(m) for m in masked) else None


__all__ = ["UnknownName", "h200_step"]
