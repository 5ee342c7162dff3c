"""torchrun with our own wrappers, a DeviceMesh with FSDP2, and a batch script for Slurm."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from paceline.errors import PlanError
from paceline.plan.emit.facts import Facts, filled
from paceline.spec import schedules, trained

#: emitter -> the script of its own that starts it on one node
STARTS = {"torchrun": "torchrun.sh", "megatron": "megatron.sh", "torchtitan": "torchtitan.sh"}
#: tokens of a stand-in's sample, where the plan has none
_TOKENS = 128

_TRAINING = '''\
{head}# Put your model, data and loss into the functions below.

import contextlib                                                                       #if loop = averaged
import os
from collections.abc import Iterable

import torch

import paceline.train as pt
from paceline.catalog.models.gpt import Gpt

PLAN = {plan!r}
# samples of a micro-batch, and micro-batches of a step on a replica
SAMPLES, MICRO_BATCHES = {f.plan.mbs}, {f.plan.micro_batches}
# tokens of a sample, and steps to take
SEQ, STEPS = int(os.environ.get("SEQ", "{seq}")), int(os.environ.get("STEPS", "100"))


def build() -> torch.nn.Module:
    """The model. Yours goes here; a small decoder stands in for it, so that the launch can be tried as
    it is.
    """
    torch.manual_seed(0)
    return Gpt(vocab=1024, context=SEQ, width={width}, depth={depth}, heads={heads}, p=0.0)


def batch(samples: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets. Your data goes here; random tokens stand in for it."""
    tokens = torch.randint(1024, (samples, SEQ + 1), device=device)
    return tokens[:, :-1], tokens[:, 1:]


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def make_optimizer(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)

                                                                                        #if loop = averaged
def averaging(model: torch.nn.Module, last: bool) -> contextlib.AbstractContextManager:  #if loop = averaged
    """Gradients add up over the micro-batches of a step; ranks average them with the last one."""\
  #if loop = averaged
    return contextlib.nullcontext() if last else pt.of(model).no_sync()                 #if loop = averaged
                                                                                        #if loop = averaged

def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    pt.join("nccl" if device == "cuda" else "gloo")
    model = build().to(device)
    for block in model.blocks:  # the repeated blocks of your model: the plan counts on what\
 torch.compile fuses                                                                    #if compiled = blocks
        block.compile()                                                                 #if compiled = blocks
    model.compile()  # the plan counts on what torch.compile fuses                      #if compiled = whole
    runner = pt.Pipeline(model, make_optimizer, PLAN, loss)                             #if loop = pipeline
    for step in range(1, STEPS + 1):                                                    #if loop = pipeline
        value = runner.step(*batch(SAMPLES * MICRO_BATCHES, device))                    #if loop = pipeline
        if value is not None:                                                           #if loop = pipeline
            print(f"step {{step}}: loss {{value:.4f}}", flush=True)                     #if loop = pipeline
    pt.close(runner)                                                                    #if loop = pipeline
    model, optimizer = pt.parallelize(model, make_optimizer(model.parameters()), plan=PLAN)\
  #if loop != pipeline
    for step in range(1, STEPS + 1):                                                    #if loop != pipeline
        for _ in range(MICRO_BATCHES):                                                  #if loop = plain
            inputs, targets = batch(SAMPLES, device)                                    #if loop = plain
            value = loss(model(inputs), targets) / MICRO_BATCHES                        #if loop = plain
            value.backward()                                                            #if loop = plain
        for i in range(MICRO_BATCHES):                                                  #if loop = averaged
            with averaging(model, last=i == MICRO_BATCHES - 1):                         #if loop = averaged
                inputs, targets = batch(SAMPLES, device)                                #if loop = averaged
                value = loss(model(inputs), targets) / MICRO_BATCHES                    #if loop = averaged
                value.backward()                                                        #if loop = averaged
        optimizer.step()                                                                #if loop != pipeline
        optimizer.zero_grad()                                                           #if loop != pipeline
        if torch.distributed.get_rank() == 0:                                           #if loop != pipeline
            print(f"step {{step}}: loss {{value.item() * MICRO_BATCHES:.4f}}", flush=True)\
  #if loop != pipeline
    pt.close(model)                                                                     #if loop != pipeline
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
'''


def script(f: Facts, code: str, *notes: str) -> str:
    """A shell script that stops at the first error."""
    return f"#!/usr/bin/env bash\n{f.head(*notes)}set -euo pipefail\n{code}\n"


def torchrun(f: Facts, tool: str = "torchrun") -> dict[str, str]:
    """A training script that applies the plan and runs as it is, and the command that starts it."""
    code = f'cd "$(dirname "${{BASH_SOURCE[0]}}")"\nexec {command(f, "train.py")} "$@"'
    return {"train.py": training(f, tool), "torchrun.sh": script(f, code)}


def training(f: Facts, tool: str) -> str:
    """The training script; PlanError, in the name of the tool that was asked for, where `paceline.train` does
    not run the plan.
    """
    _refuse(f, tool)
    p = f.plan
    scattered = p.tp > 1 or p.sharding in trained.SHARDED  # by FSDP2
    heads, each = max(2, p.tp), schedules.get(p.schedule).chunks_per_rank(p.vpp)
    # FSDP2 scatters the gradients of each micro-batch, as was predicted; others are averaged with the last
    loop = "averaged" if p.micro_batches > 1 and not scattered else "plain"
    blocks = "blocks" if f.sizes else "whole"
    lines = filled(
        _TRAINING,
        f=f,
        head=f.head(),
        plan=str(replace(p, vpp=each, seq=0)),  # SEQ says how long samples are
        seq=p.seq or _TOKENS,
        width=32 * heads,
        depth=max(2, p.pp * each),
        heads=heads,
        loop="pipeline" if p.pp > 1 else loop,
        compiled=blocks if f.compiled else "",
    )
    return "\n".join(lines) + "\n"


def _refuse(f: Facts, tool: str) -> None:
    f.refuse(tool, schedule=("", *(name for name, one in schedules.SCHEDULES.items() if one.trains)))
    try:
        trained.resolved(f.plan, f.plan.ranks)
    except PlanError as error:
        raise PlanError(f"--emit {tool}: {error}; plan with --fix, or leave {tool} out") from None


def command(f: Facts, script: str, arguments: Sequence[str] = ()) -> str:
    """How torchrun starts a script on every node, with arguments one a line."""
    c = f.cluster
    where = "--standalone" if c.nodes == 1 else f"--nnodes {c.nodes}"
    meeting = "" if c.nodes == 1 else _MEETING
    return " \\\n    ".join(
        [f"torchrun {where} --nproc-per-node {c.node_devices} {meeting}{script}", *arguments]
    )


#: where processes of several nodes find each other
_MEETING = (
    '--rdzv-id "${SLURM_JOB_ID:-paceline}" --rdzv-backend c10d --rdzv-endpoint "${HEAD:?set HEAD to the'
    ' first node}:29500" '
)
_SLURM = """\
#!/usr/bin/env bash
#SBATCH --job-name={name}
#SBATCH --nodes={c.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={c.node_devices}                #if c.device.kind != cpu
#SBATCH --exclusive
{head}# submit it in this folder, which {script} is in: sbatch job.sbatch
set -euo pipefail
cd "${{SLURM_SUBMIT_DIR:-.}}"
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD
srun bash {script}
"""


def slurm(f: Facts) -> dict[str, str]:
    """A batch script that runs on each node what starts the first of the other tools that has a script; else
    torchrun's.
    """
    torch = STARTS["torchrun"]
    start = next((STARTS[tool] for tool in f.beside if tool in STARTS), torch)
    lines = filled(_SLURM, name=job_name(f.model), c=f.cluster, head=f.head(), script=start)
    text = "\n".join(lines) + "\n"
    return {**(torchrun(f, "slurm") if start == torch else {}), "job.sbatch": text}


def job_name(model: str) -> str:
    """A name that Slurm and the shell take for a word: letters, digits, dots, dashes and underscores."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-.") or "paceline"


_FSDP2 = '''\
{head}
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def parallelize(model: torch.nn.Module, blocks: list[torch.nn.Module]) -> torch.nn.Module:
    """Lays out a model whose repeated blocks are `blocks`; {p.mbs} samples a micro-batch,
    {p.micro_batches} of them a step.
    """
    mesh = init_device_mesh("cuda", {sizes}, mesh_dim_names={names})
    # name the model's own projections:\
 torch.distributed.tensor.parallel.parallelize_module(block, mesh["tp"], {{...}})\
  #if p.tp != 1
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing\
  #if p.recompute = full
                                                                                  #if p.recompute = full
    apply_activation_checkpointing(model, check_fn=lambda module: module in set(blocks))\
  #if p.recompute = full
    for block in blocks:  # the plan counts on what torch.compile fuses           #if f.compiled = True
        block.compile()                                                           #if f.compiled = True
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh[{data}], mp_policy=policy, reshard_after_forward={p.reshard})
    for block, ahead in zip(blocks, [blocks[i + 1 : i + 1 + {p.prefetch}] for i in range(len(blocks))]):
        block.set_modules_to_forward_prefetch(ahead)
    return model
'''


def fsdp2(f: Facts) -> dict[str, str]:
    """A function that lays a model out on a mesh; which of its projections tensor parallelism splits, only
    its author knows.
    """
    f.refuse("fsdp2", sharding=("fsdp", "hsdp"), pp=(1,), offload=("none",))
    p = f.plan
    shard = p.shard or p.dp
    degrees = {"replicate": p.dp // shard, "shard": shard * p.cp, "tp": p.tp}
    mesh = {f'"{name}"': str(size) for name, size in degrees.items() if size > 1 or name == "shard"}
    names = ", ".join(mesh)
    sizes = f"({', '.join(mesh.values())},)"
    data = names.removesuffix(', "tp"')
    lines = filled(_FSDP2, f=f, p=p, head=f.head(), sizes=sizes, names=f"({names},)", data=data)
    return {"fsdp2.py": "\n".join(lines) + "\n"}
