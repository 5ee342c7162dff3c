"""torchrun with our own wrappers, a DeviceMesh with FSDP2, and a batch script for Slurm."""

from __future__ import annotations

import re
from dataclasses import replace

from paceline.errors import PlanError
from paceline.plan.emit.facts import Facts
from paceline.spec import schedules, trained

#: emitter -> the script of its own that starts it on one node
STARTS = {"torchrun": "torchrun.sh", "megatron": "megatron.sh", "torchtitan": "torchtitan.sh"}
_PIPELINES = ("", "gpipe", "1f1b", "interleaved", "looped-bfs", "zb-v", "dualpipev")

_BUILD = '''

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

'''
_COMPILE_BLOCKS = (
    "    for block in model.blocks:  # the repeated blocks of your model:"
    " the plan counts on what torch.compile fuses\n"
    "        block.compile()\n"
)
_COMPILE = "    model.compile()  # the plan counts on what torch.compile fuses\n"
_AVERAGING = '''
def averaging(model: torch.nn.Module, last: bool) -> contextlib.AbstractContextManager:
    """Gradients add up over the micro-batches of a step; ranks average them with the last one."""
    return contextlib.nullcontext() if last else pt.of(model).no_sync()

'''
_PASSES = """        for _ in range(MICRO_BATCHES):
            inputs, targets = batch(SAMPLES, device)
            value = loss(model(inputs), targets) / MICRO_BATCHES
            value.backward()"""
_AVERAGED = """        for i in range(MICRO_BATCHES):
            with averaging(model, last=i == MICRO_BATCHES - 1):
                inputs, targets = batch(SAMPLES, device)
                value = loss(model(inputs), targets) / MICRO_BATCHES
                value.backward()"""
#: tokens of a stand-in's sample, where the plan has none
_TOKENS = 128


def torchrun(f: Facts, tool: str = "torchrun") -> dict[str, str]:
    """A training script that applies the plan and runs as it is, and the command that starts it."""
    start = (
        f'#!/usr/bin/env bash\n{f.head()}set -euo pipefail\ncd "$(dirname "${{BASH_SOURCE[0]}}")"\n'
        f'exec {command(f, "train.py")} "$@"\n'
    )
    return {"train.py": training(f, tool), "torchrun.sh": start}


def training(f: Facts, tool: str) -> str:
    """The training script; PlanError, in the name of the tool that was asked for, where `paceline.train` does
    not run the plan.
    """
    p = f.plan
    sharded = p.sharding in trained.SHARDED or p.tp > 1
    f.refuse(
        tool,
        cp=(1,),
        ep=(1,),
        offload=("none", "activations"),
        precision=trained.SPLIT if sharded else trained.REPLICATED,
        schedule=_PIPELINES,
        framework=("", *trained.FRAMEWORKS),
        sp=(False,),
    )
    try:
        trained.resolved(p, p.ranks)
    except PlanError as error:
        raise PlanError(f"--emit {tool}: {error}; plan with --fix, or leave {tool} out") from None
    each = schedules.get(p.schedule).chunks_per_rank(p.vpp)
    chunks = p.pp * each
    stand_in = {"width": 32 * max(2, p.tp), "depth": max(2, chunks), "heads": max(2, p.tp)}
    trained_as = replace(p, vpp=each, seq=0)  # SEQ says how long samples are
    names = [
        f"PLAN = {str(trained_as)!r}",
        "# samples of a micro-batch, and micro-batches of a step on a replica",
        f"SAMPLES, MICRO_BATCHES = {p.mbs}, {f.accumulate}",
        "# tokens of a sample, and steps to take",
        f'SEQ, STEPS = int(os.environ.get("SEQ", "{p.seq or _TOKENS}")), int(os.environ.get("STEPS", "100"))',
    ]
    imports = [
        *(["import contextlib"] if _waits(f) else []),
        "import os",
        "from collections.abc import Iterable",
        "",
        "import torch",
        "",
        "import paceline.train as pt",
        "from paceline.catalog.models.gpt import Gpt",
    ]
    return "".join(
        [
            f.head(),
            "# Put your model, data and loss into the functions below.\n\n",
            "\n".join(imports),
            "\n\n",
            "\n".join(names),
            "\n",
            _BUILD.format(**stand_in),
            _main(f),
            '\n\nif __name__ == "__main__":\n    main()\n',
        ]
    )


def _main(f: Facts) -> str:
    """The loop, as the plan wants it."""
    begin = """
def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    pt.join("nccl" if device == "cuda" else "gloo")
    model = build().to(device)
"""
    end = "    torch.distributed.destroy_process_group()\n"
    compiled = ""
    if f.compiled:
        compiled = _COMPILE if f.sizes is None else _COMPILE_BLOCKS
    if f.plan.pp > 1:
        loop = """    runner = pt.Pipeline(model, make_optimizer, PLAN, loss)
    for step in range(1, STEPS + 1):
        value = runner.step(*batch(SAMPLES * MICRO_BATCHES, device))
        if value is not None:
            print(f"step {step}: loss {value:.4f}", flush=True)
    pt.close(runner)
"""
        return begin + compiled + loop + end
    passes = _AVERAGED if _waits(f) else _PASSES
    loop = f"""    model, optimizer = pt.parallelize(model, make_optimizer(model.parameters()), plan=PLAN)
    for step in range(1, STEPS + 1):
{passes}
        optimizer.step()
        optimizer.zero_grad()
        if torch.distributed.get_rank() == 0:
            print(f"step {{step}}: loss {{value.item() * MICRO_BATCHES:.4f}}", flush=True)
    pt.close(model)
"""
    return (_AVERAGING if _waits(f) else "") + begin + compiled + loop + end


def _waits(f: Facts) -> bool:
    """Whether gradients of all but a step's last micro-batch stay where they are; FSDP2 scatters those of
    each, as was predicted.
    """
    return f.plan.pp == 1 and f.plan.tp == 1 and f.plan.sharding not in trained.SHARDED and f.accumulate > 1


def command(f: Facts, script: str) -> str:
    """How torchrun starts a script on every node."""
    c = f.cluster
    if c.nodes == 1:
        return f"torchrun --standalone --nproc-per-node {c.node_devices} {script}"
    where = (
        '--rdzv-id "${SLURM_JOB_ID:-paceline}" --rdzv-backend c10d --rdzv-endpoint "${HEAD:?set HEAD to the'
        ' first node}:29500"'
    )
    return f"torchrun --nnodes {c.nodes} --nproc-per-node {c.node_devices} {where} {script}"


def slurm(f: Facts) -> dict[str, str]:
    """A batch script that runs on each node what starts the first of the other tools that has a script; else
    torchrun's.
    """
    script = next((STARTS[tool] for tool in f.beside if tool in STARTS), STARTS["torchrun"])
    c = f.cluster
    devices = f"#SBATCH --gpus-per-node={c.node_devices}\n" if c.device.kind != "cpu" else ""
    text = f"""#!/usr/bin/env bash
#SBATCH --job-name={job_name(f.model)}
#SBATCH --nodes={c.nodes}
#SBATCH --ntasks-per-node=1
{devices}#SBATCH --exclusive
{f.head()}# submit it in this folder, which {script} is in: sbatch job.sbatch
set -euo pipefail
cd "${{SLURM_SUBMIT_DIR:-.}}"
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD
srun bash {script}
"""
    others = torchrun(f, "slurm") if script == STARTS["torchrun"] else {}
    return {**others, "job.sbatch": text}


def job_name(model: str) -> str:
    """A name that Slurm and the shell take for a word: letters, digits, dots, dashes and underscores."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-.") or "paceline"


def fsdp2(f: Facts) -> dict[str, str]:
    """A function that lays a model out on a mesh; which of its projections tensor parallelism splits, only
    its author knows.
    """
    f.refuse("fsdp2", sharding=("fsdp", "hsdp"), pp=(1,), offload=("none",))
    p = f.plan
    shard = p.shard or p.dp
    replicas = p.dp // shard
    axes = (
        [("replicate", replicas)] * (replicas > 1) + [("shard", shard * p.cp)] + [("tp", p.tp)] * (p.tp > 1)
    )
    names, sizes = ", ".join(f'"{name}"' for name, _ in axes), ", ".join(str(size) for _, size in axes)
    data = ", ".join(f'"{name}"' for name, _ in axes if name != "tp")
    recompute = (
        """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    apply_activation_checkpointing(model, check_fn=lambda module: module in set(blocks))"""
        if p.recompute == "full"
        else ""
    )
    split = (
        "\n    # name the model's own projections:"
        ' torch.distributed.tensor.parallel.parallelize_module(block, mesh["tp"], {...})'
        if p.tp > 1
        else ""
    )
    compiled = (
        """
    for block in blocks:  # the plan counts on what torch.compile fuses
        block.compile()"""
        if f.compiled
        else ""
    )
    text = f'''{f.head()}
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def parallelize(model: torch.nn.Module, blocks: list[torch.nn.Module]) -> torch.nn.Module:
    """Lays out a model whose repeated blocks are `blocks`; {p.mbs} samples a micro-batch,
    {f.accumulate} of them a step.
    """
    mesh = init_device_mesh("cuda", ({sizes},), mesh_dim_names=({names},)){split}{recompute}{compiled}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh[{data}], mp_policy=policy, reshard_after_forward={p.reshard})
    for block, ahead in zip(blocks, [blocks[i + 1 : i + 1 + {p.prefetch}] for i in range(len(blocks))]):
        block.set_modules_to_forward_prefetch(ahead)
    return model
'''
    return {"fsdp2.py": text}
