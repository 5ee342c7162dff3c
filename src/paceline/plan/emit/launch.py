"""torchrun with our own wrappers, a DeviceMesh with FSDP2, and a batch script for Slurm."""

from __future__ import annotations

from paceline.plan.emit.facts import Facts


def torchrun(f: Facts) -> dict[str, str]:
    """A training script with the two lines that apply the plan, and the command that starts it."""
    script = f'''"""{f.summary[0]}

{f.summary[1]}
Put your model, data and loss where the dots are.
"""

import torch
import paceline.train as pt

model = ...
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = pt.parallelize(model, optimizer, plan="{f.plan}")
for inputs, targets in ...:
    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
'''
    return {"train.py": script, "torchrun.sh": f"#!/usr/bin/env bash\n{f.head()}set -euo pipefail\nexec {command(f, 'train.py')} \"$@\"\n"}


def command(f: Facts, script: str) -> str:
    """How torchrun starts a script on every node."""
    c = f.cluster
    if c.nodes == 1:
        return f"torchrun --standalone --nproc-per-node {c.node_devices} {script}"
    where = '--rdzv-backend c10d --rdzv-endpoint "${HEAD:?set HEAD to the first node}:29500"'
    return f"torchrun --nnodes {c.nodes} --nproc-per-node {c.node_devices} {where} {script}"


def slurm(f: Facts) -> dict[str, str]:
    """A batch script that starts one torchrun per node."""
    c = f.cluster
    text = f"""#!/usr/bin/env bash
#SBATCH --job-name={f.model.replace('/', '-')}
#SBATCH --nodes={c.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={c.node_devices}
#SBATCH --exclusive
{f.head()}set -euo pipefail
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD
srun torchrun --nnodes {c.nodes} --nproc-per-node {c.node_devices} --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d \\
    --rdzv-endpoint "$HEAD:29500" train.py
"""
    return {"job.sbatch": text}


def fsdp2(f: Facts) -> dict[str, str]:
    """A function that lays a model out on a mesh; which of its projections tensor parallelism splits, only its author knows."""
    f.refuse("fsdp2", sharding=("fsdp", "hsdp"), pp=(1,), offload=("none",))
    p = f.plan
    shard = p.shard or p.dp
    replicas = p.dp // shard
    axes = [("replicate", replicas)] * (replicas > 1) + [("shard", shard * p.cp)] + [("tp", p.tp)] * (p.tp > 1)
    names, sizes = ", ".join(f'"{name}"' for name, _ in axes), ", ".join(str(size) for _, size in axes)
    data = ", ".join(f'"{name}"' for name, _ in axes if name != "tp")
    recompute = """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    apply_activation_checkpointing(model, check_fn=lambda module: module in set(blocks))""" if p.recompute == "full" else ""
    split = """
    # name the model's own projections: torch.distributed.tensor.parallel.parallelize_module(block, mesh["tp"], {...})""" if p.tp > 1 else ""
    text = f'''"""{f.summary[0]}

{f.summary[1]}
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def parallelize(model: torch.nn.Module, blocks: list[torch.nn.Module]) -> torch.nn.Module:
    """Lays out a model whose repeated blocks are `blocks`; {p.mbs} samples a micro-batch, {f.accumulate} of them a step."""
    mesh = init_device_mesh("cuda", ({sizes},), mesh_dim_names=({names},)){split}{recompute}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh[{data}], mp_policy=policy, reshard_after_forward={p.reshard})
    for block, ahead in zip(blocks, [blocks[i + 1 : i + 1 + {p.prefetch}] for i in range(len(blocks))]):
        block.set_modules_to_forward_prefetch(ahead)
    return model
'''
    return {"fsdp2.py": text}
