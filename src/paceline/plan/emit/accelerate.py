"""Accelerate's YAML."""

from __future__ import annotations

from paceline.plan.emit.facts import Facts, filled
from paceline.spec.vocabulary import Offload, Precision, Recompute

#: precisions that Accelerate trains in, besides that of the parameters
_MIXED = (Precision.BF16, Precision.FP16, Precision.FP8)
_LAUNCH = """\
compute_environment: LOCAL_MACHINE
debug: false
use_cpu: false
num_machines: {c.nodes}
num_processes: {c.device_count}
machine_rank: 0
main_training_function: main
mixed_precision: {precision}
rdzv_backend: static
"""
_COMPILED = """\
dynamo_config:
  dynamo_backend: INDUCTOR
  dynamo_mode: default
  dynamo_use_dynamic: false
  dynamo_use_fullgraph: false
"""
_FSDP = """\
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: {reshard}
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_activation_checkpointing: {recompute}
  fsdp_offload_params: {offload}
  fsdp_state_dict_type: SHARDED_STATE_DICT
parallelism_config:
  parallelism_config_dp_replicate_size: {replicas}
  parallelism_config_dp_shard_size: {shard}
  parallelism_config_tp_size: {p.tp}
  parallelism_config_cp_size: {p.cp}
"""


def config(f: Facts) -> list[str]:
    """Lines of machines, precision, and FSDP2 or DDP."""
    f.refuse("accelerate", pp=(1,), sharding=("none", "ddp", "fsdp", "hsdp"))
    p, c = f.plan, f.cluster
    several = "MULTI_GPU" if c.device_count > 1 else "'NO'"
    switches = {
        "reshard": p.reshard,
        "recompute": p.recompute is Recompute.FULL,
        "offload": p.offload is Offload.OPTIMIZER,
    }
    shard = p.shard or p.dp
    return filled(
        {
            _LAUNCH: True,
            _COMPILED: f.compiled,
            f"distributed_type: {several}" if p.sharding.whole else _FSDP: True,
        },
        p=p,
        c=c,
        precision=p.precision if p.precision in _MIXED else "'no'",
        shard=shard,
        replicas=p.dp // shard,
        **{name: str(on).lower() for name, on in switches.items()},
    )


def files(f: Facts) -> dict[str, str]:
    """The YAML; batch and accumulation are arguments of the training script."""
    head = f.head(
        "start your training script with it: accelerate launch --config_file accelerate.yaml YOUR_SCRIPT.py",
        f"micro-batch {f.plan.mbs} on a device, gradient_accumulation_steps={f.accumulate}",
    )
    return {"accelerate.yaml": head + "\n".join(config(f)) + "\n"}
