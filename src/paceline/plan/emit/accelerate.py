"""Accelerate's YAML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.plan.emit.facts import Facts


def config(f: Facts) -> dict[str, Any]:
    """Machines, precision, and FSDP2 or DDP."""
    f.refuse("accelerate", pp=(1,), sharding=("none", "ddp", "fsdp", "hsdp"))
    p, c = f.plan, f.cluster
    out: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "use_cpu": False,
        "num_machines": c.nodes,
        "num_processes": c.device_count,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": p.precision if p.precision in ("bf16", "fp16", "fp8") else "no",
        "rdzv_backend": "static",
    }
    if f.compiled:
        out["dynamo_config"] = {
            "dynamo_backend": "INDUCTOR",
            "dynamo_mode": "default",
            "dynamo_use_dynamic": False,
            "dynamo_use_fullgraph": False,
        }
    if p.sharding in ("none", "ddp"):
        return {**out, "distributed_type": "MULTI_GPU" if c.device_count > 1 else "NO"}
    shard = p.shard or p.dp
    mesh = {"dp_replicate_size": p.dp // shard, "dp_shard_size": shard, "tp_size": p.tp, "cp_size": p.cp}
    return {
        **out,
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": p.reshard,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": p.recompute == "full",
            "fsdp_offload_params": p.offload == "optimizer",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
        "parallelism_config": {f"parallelism_config_{name}": size for name, size in mesh.items()},
    }


def files(f: Facts) -> dict[str, str]:
    """The YAML; batch and accumulation are arguments of the training script."""
    note = (
        "# start your training script with it: accelerate launch --config_file accelerate.yaml"
        " YOUR_SCRIPT.py\n"
    )
    note += f"# micro-batch {f.plan.mbs} on a device, gradient_accumulation_steps={f.accumulate}\n"
    return {"accelerate.yaml": f.head() + note + "\n".join(_yaml(config(f))) + "\n"}


def _yaml(data: Mapping[str, Any], depth: int = 0) -> Iterator[str]:
    """Mappings of plain values, which need no library."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield f"{'  ' * depth}{key}:"
            yield from _yaml(value, depth + 1)
        else:
            text = (
                str(value).lower()
                if isinstance(value, bool)
                else f"'{value}'"
                if value == "no"
                else str(value)
            )
            yield f"{'  ' * depth}{key}: {text}"
