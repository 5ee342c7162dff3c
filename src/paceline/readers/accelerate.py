"""Accelerate's YAML, as `accelerate config` writes it.

Format: https://huggingface.co/docs/accelerate/package_reference/cli (`accelerate launch`) and the guides on
FSDP, DeepSpeed and Megatron-LM there. Batch and sequence are in the training script, and not said here.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from paceline.errors import DataError, missing_extra
from paceline.readers import deepspeed
from paceline.readers.configuration import LONGEST, Keys, Settings, ignored
from paceline.readers.stream import opened, printable
from paceline.spec.vocabulary import Precision

_KINDS = {
    "no": "none", "multi_gpu": "ddp", "fsdp": "fsdp", "deepspeed": "deepspeed", "megatron_lm": "megatron",
    "multi_cpu": "ddp", "multi_npu": "ddp", "multi_xpu": "ddp", "tp": "none",
}  # fmt: skip
_STRATEGIES = {
    name: kind
    for names, kind in (
        (("full_shard", "1"), "fsdp"),
        (("shard_grad_op", "2"), "zero2"),
        (("no_shard", "3"), "ddp"),
        (("hybrid_shard", "4"), "hsdp"),
    )
    for name in names
}


def settings(text: str, path: Path) -> Settings:
    """What an Accelerate configuration says."""
    data = _parsed(text, str(path))
    if "distributed_type" not in data and "compute_environment" not in data:
        raise DataError(
            f"{path}: no configuration of Accelerate: neither distributed_type nor compute_environment"
        )
    keys = Keys(data, str(path), ignored("accelerate"))
    out = Settings("accelerate", devices=keys.whole("num_processes") or 0)
    kind = keys.choice(_KINDS, "distributed_type")
    _common(keys, out)
    if kind == "deepspeed":
        _deepspeed(keys, out, path)
    elif kind == "megatron":
        _megatron(keys, out)
    elif kind == "fsdp":
        _fsdp(keys, out)
    elif kind is not None:
        out.usual["sharding"] = kind
    _mesh(keys, out)
    out.not_understood += keys.left()
    return out


def _parsed(text: str, path: str) -> dict[str, Any]:
    """The mapping of a YAML file, without references to other parts of it."""
    try:
        import yaml
    except ImportError as error:
        raise missing_extra(error, "reading YAML") or error from None
    try:
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise DataError(f"{path}: YAML with references (*name) is not read")
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        problem = printable(getattr(error, "problem", None) or error)
        raise DataError(f"{path}: not YAML: {problem[:200]}") from None
    if not isinstance(data, dict):
        raise DataError(f"{path}: no mapping of settings in it")
    return data


def _common(keys: Keys, out: Settings) -> None:
    precision = keys.word("mixed_precision")
    if precision in (Precision.BF16, Precision.FP16, Precision.FP8):
        out.said["precision"] = precision
    elif precision is not None:
        out.usual["precision"] = "fp32"
    backend = keys.word("dynamo_config.dynamo_backend")
    out.compiled = backend is not None and backend.upper() != "NO"
    out.usual["framework"] = "torch-compile" if out.compiled else "torch"


def _fsdp(keys: Keys, out: Settings) -> None:
    """FSDP 1 names a strategy, FSDP 2 says whether parameters are dropped after the forward pass."""
    names = "fsdp_config.fsdp_reshard_after_forward", "fsdp_config.fsdp_sharding_strategy"
    reshard = keys.word(*names)
    strategy = _STRATEGIES.get((reshard or "").lower())
    out.said["sharding"] = strategy or "fsdp"
    if strategy is None and reshard is not None:
        out.said["reshard"] = reshard.lower() == "true"
    if keys.flag("fsdp_config.fsdp_activation_checkpointing"):
        out.said["recompute"] = "full"
    if keys.flag("fsdp_config.fsdp_offload_params"):
        out.said["offload"] = "optimizer"


def _mesh(keys: Keys, out: Settings) -> None:
    """Degrees; what is left of the devices is data parallel."""
    names = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size")
    prefix = "parallelism_config.parallelism_config"
    replicas, shard, tp, cp = (keys.whole(f"{prefix}_{name}", f"parallelism_config.{name}") for name in names)
    out.said |= {name: size for name, size in (("tp", tp), ("cp", cp)) if size}
    if shard:
        out.said["dp"] = shard * (replicas or 1)
        if (replicas or 1) > 1:
            out.said |= {"sharding": "hsdp", "shard": shard} if shard > 1 else {"sharding": "ddp"}
    elif out.devices:
        others = prod(int(out.said.get(axis, 1)) for axis in ("tp", "pp", "cp"))
        out.usual["dp"] = max(1, out.devices // others)


def _deepspeed(keys: Keys, out: Settings, path: Path) -> None:
    """ZeRO, or a file of DeepSpeed's own beside this one."""
    name = keys.word("deepspeed_config.deepspeed_config_file")
    if name is not None:
        beside = path.with_name(Path(name).name)
        if not beside.is_file():
            raise DataError(f"{path}: deepspeed_config_file {name!r} is not beside it")
        with opened(beside) as file:
            found = deepspeed.settings(file.read(LONGEST), str(beside))
    else:
        zero: dict[str, Any] = {"stage": keys.whole("deepspeed_config.zero_stage")}
        for part in ("optimizer", "param"):
            if device := keys.word(f"deepspeed_config.offload_{part}_device"):
                zero[f"offload_{part}"] = {"device": device}
        found = deepspeed.from_dict({"zero_optimization": zero}, str(path))
        if steps := keys.whole("deepspeed_config.gradient_accumulation_steps"):
            out.notes.append(
                f"gradient_accumulation_steps = {steps}: give gbs, which the training script decides"
            )
    out.usual = {**found.usual, **out.usual, "framework": found.usual["framework"]}
    out.said |= {key: value for key, value in found.said.items() if key not in out.said}
    out.not_understood += found.not_understood
    out.notes += found.notes


def _megatron(keys: Keys, out: Settings) -> None:
    prefix = "megatron_lm_config.megatron_lm"
    out.usual |= {"framework": "megatron-core", "sharding": "ddp"}
    for field, name in (("tp", "tp_degree"), ("pp", "pp_degree")):
        if size := keys.whole(f"{prefix}_{name}"):
            out.said[field] = size
    if keys.flag(f"{prefix}_sequence_parallelism"):
        out.said["sp"] = True
    if keys.flag(f"{prefix}_recompute_activations"):
        out.said["recompute"] = "selective"
    if keys.flag(f"{prefix}_use_distributed_optimizer"):
        out.said["sharding"] = "zero1"
