"""DeepSpeed's JSON.

Format: "DeepSpeed Configuration JSON", https://www.deepspeed.ai/docs/config-json/. Pipeline stages and tensor
parallel layers are in the model's code, and not said here; `activation_checkpointing` sets up what that code
calls, and is read as full recomputation.
"""

from __future__ import annotations

import json
from typing import Any

from paceline.errors import DataError
from paceline.readers.configuration import Keys, Settings, ignored
from paceline.readers.stream import printable

_STAGES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "fsdp"}


def settings(text: str, path: str) -> Settings:
    """What a DeepSpeed configuration says."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {printable(getattr(error, 'msg', error))}") from None
    if not isinstance(data, dict):
        raise DataError(f"{path}: a DeepSpeed configuration is a JSON object")
    known = ("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "bf16", "fp16")
    if not set(known) & set(data):
        raise DataError(f"{path}: no configuration of DeepSpeed: none of {', '.join(known)} is in it")
    return from_dict(data, path)


def from_dict(data: dict[str, Any], path: str) -> Settings:
    """The same of its keys."""
    keys = Keys(data, path, ignored("deepspeed"))
    out = Settings("deepspeed")
    _batch(keys, out)
    _sharding(keys, out, path)
    _precision(keys, out)
    _memory(keys, out)
    if cp := keys.whole("sequence_parallel_size"):
        out.said |= {"cp": cp, "context": "all-to-all"} if cp > 1 else {"cp": cp}
    if tp := keys.whole("tensor_parallel.autotp_size"):
        out.said["tp"] = tp
    out.compiled = bool(keys.flag("compile.enabled", "compile.deepcompile"))
    out.optimizer = (
        str(data.get("optimizer", {}).get("type", "")) if isinstance(data.get("optimizer"), dict) else ""
    )
    if out.optimizer.lower().startswith(("onebit", "zeroone")):
        out.not_understood.append(f"optimizer.type = {out.optimizer} (compressed communication)")
    out.not_understood += keys.left()
    return out


def _batch(keys: Keys, out: Settings) -> None:
    """Micro-batch, batch, and the data-parallel degree that they and the accumulation imply."""
    mbs = keys.whole("train_micro_batch_size_per_gpu")
    gbs = keys.whole("train_batch_size")
    steps = keys.whole("gradient_accumulation_steps")
    out.said |= {name: size for name, size in (("mbs", mbs), ("gbs", gbs)) if size}
    if mbs and gbs and steps and gbs % (mbs * steps) == 0:
        out.said["dp"] = gbs // (mbs * steps)
    elif steps and steps > 1 and not gbs:
        out.notes.append(f"gradient_accumulation_steps = {steps}: give gbs, which depends on the devices")


def _sharding(keys: Keys, out: Settings, path: str) -> None:
    stage = keys.whole("zero_optimization.stage")
    if stage is None:
        stage = 0
    if stage not in _STAGES:
        raise DataError(f"{path}: zero_optimization.stage is 0, 1, 2 or 3, got {stage}")
    # without ZeRO there is one replica or there are several
    (out.said if stage else out.usual)["sharding"] = _STAGES[stage]
    group = keys.whole("zero_optimization.mics_shard_size")
    if group and group > 0 and stage == 3:
        out.said |= {"sharding": "hsdp", "shard": group}
    bucket = keys.take("zero_optimization.reduce_bucket_size")
    if isinstance(bucket, int | float) and not isinstance(bucket, bool) and bucket > 0:
        out.said["bucket_bytes"] = 2.0 * bucket
    keys.take("zero_optimization.overlap_comm")
    out.usual["framework"] = "deepspeed-zero3" if stage == 3 else "deepspeed"


def _precision(keys: Keys, out: Settings) -> None:
    enabled = {name: keys.flag(f"{name}.enabled") for name in ("bf16", "fp16", "amp")}
    chosen = next((name for name in ("bf16", "fp16") if enabled[name]), None)
    if chosen is not None:
        out.said["precision"] = chosen
    elif enabled["amp"]:
        out.not_understood.append("amp.enabled (apex)")
    else:
        out.usual["precision"] = "fp32"


def _memory(keys: Keys, out: Settings) -> None:
    """Offloading and recomputation."""
    places = {"cpu": True, "none": False}
    moved = keys.choice(places, "zero_optimization.offload_optimizer.device")
    if moved or keys.flag("zero_optimization.cpu_offload"):
        out.said["offload"] = "optimizer"
    if keys.choice(places, "zero_optimization.offload_param.device"):
        out.not_understood.append("zero_optimization.offload_param.device = cpu")
    partitioned = keys.flag("activation_checkpointing.partition_activations")
    moved = keys.flag("activation_checkpointing.cpu_checkpointing")
    if partitioned is not None or moved is not None:
        out.usual["recompute"] = "full"
    if partitioned:
        out.not_understood.append("activation_checkpointing.partition_activations = True")
    if moved:
        out.said["offload"] = "activations"
