"""Accelerate's YAML."""

from __future__ import annotations

from paceline.plan.emit.facts import Facts, filled
from paceline.spec.vocabulary import Offload, Precision, Recompute

#: precisions that Accelerate trains in, besides that of the parameters
_MIXED = (Precision.BF16, Precision.FP16, Precision.FP8)
_YAML = """\
compute_environment: LOCAL_MACHINE
debug: false
use_cpu: false
num_machines: {c.nodes}
num_processes: {c.device_count}
machine_rank: 0
main_training_function: main
mixed_precision: {precision}
rdzv_backend: static
dynamo_config:                                                      #if compiled = True
  dynamo_backend: INDUCTOR                                          #if compiled = True
  dynamo_mode: default                                              #if compiled = True
  dynamo_use_dynamic: false                                         #if compiled = True
  dynamo_use_fullgraph: false                                       #if compiled = True
distributed_type: {distributed}
fsdp_config:                                                        #if distributed = FSDP
  fsdp_version: 2                                                   #if distributed = FSDP
  fsdp_reshard_after_forward: {reshard}                             #if distributed = FSDP
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP                     #if distributed = FSDP
  fsdp_activation_checkpointing: {recompute}                        #if distributed = FSDP
  fsdp_offload_params: {offload}                                    #if distributed = FSDP
  fsdp_state_dict_type: SHARDED_STATE_DICT                          #if distributed = FSDP
parallelism_config:                                                 #if distributed = FSDP
  parallelism_config_dp_replicate_size: {replicas}                  #if distributed = FSDP
  parallelism_config_dp_shard_size: {shard}                         #if distributed = FSDP
  parallelism_config_tp_size: {p.tp}                                #if distributed = FSDP
  parallelism_config_cp_size: {p.cp}                                #if distributed = FSDP
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
        _YAML,
        p=p,
        c=c,
        precision=p.precision if p.precision in _MIXED else "'no'",
        compiled=f.compiled,
        distributed=several if p.sharding.whole else "FSDP",
        shard=shard,
        replicas=p.dp // shard,
        **{name: str(on).lower() for name, on in switches.items()},
    )


def files(f: Facts) -> dict[str, str]:
    """The YAML; batch and accumulation are arguments of the training script."""
    head = f.head(
        "start your training script with it: accelerate launch --config_file accelerate.yaml YOUR_SCRIPT.py",
        f"micro-batch {f.plan.mbs} on a device, gradient_accumulation_steps={f.plan.micro_batches}",
    )
    return {"accelerate.yaml": head + "\n".join(config(f)) + "\n"}
