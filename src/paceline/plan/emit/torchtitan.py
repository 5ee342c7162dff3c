"""Arguments of torchtitan's trainer."""

from __future__ import annotations

from paceline.plan.emit.facts import Facts
from paceline.plan.emit.launch import command
from paceline.spec import schedules

#: catalog name -> torchtitan's module and configuration
_KNOWN = {
    "llama3-8b": ("llama3", "llama3_8b"),
    "llama3-70b": ("llama3", "llama3_70b"),
    "llama3-405b": ("llama3", "llama3_405b"),
}


def arguments(f: Facts) -> list[str]:
    """Batch, degrees and schedule as overrides of a configuration."""
    f.refuse(
        "torchtitan",
        sharding=("none", "ddp", "fsdp", "hsdp"),
        offload=("none", "optimizer"),
        recompute=("none", "selective", "full"),
    )
    if f.plan.pp > 1:
        runs = tuple(name for name, schedule in schedules.SCHEDULES.items() if schedule.torch)
        f.refuse("torchtitan", schedule=runs)
    p = f.plan
    replicas = p.dp if p.sharding in ("none", "ddp") else p.dp // (p.shard or p.dp)
    module, config = _KNOWN.get(f.model, ("llama3", "llama3_8b"))
    out = [
        f"--module {module}",
        f"--config {config}",
        f"--training.local_batch_size {p.mbs if p.pp == 1 else p.gbs // p.dp}",
        f"--training.global_batch_size {p.gbs}",
        f"--training.seq_len {p.seq}",
        f"--parallelism.data_parallel_replicate_degree {replicas}",
        f"--parallelism.data_parallel_shard_degree {p.dp // replicas}",
        f"--parallelism.tensor_parallel_degree {p.tp}",
        f"--parallelism.context_parallel_degree {p.cp}",
        f"--parallelism.fsdp_reshard_after_forward {'always' if p.reshard else 'never'}",
    ]
    if p.tp > 1:
        out.append(f"--parallelism.{'' if p.sp else 'no-'}enable_sequence_parallel")
    if p.pp > 1:
        out += [
            f"--parallelism.pipeline_parallel_degree {p.pp}",
            f"--parallelism.pipeline_parallel_schedule {schedules.get(p.schedule).torch}",
            f"--parallelism.pipeline_parallel_microbatch_size {p.mbs}",
        ]
    out += ["--training.enable_cpu_offload"] * (p.offload == "optimizer") + ["--compile.enable"] * f.compiled
    return out


def files(f: Facts) -> dict[str, str]:
    """A script that starts torchtitan."""
    needs = "# needs torchtitan installed on every node\n"
    note = (
        ""
        if f.model in _KNOWN
        else (
            f"# torchtitan has no configuration called {f.model}: put yours in place of --module and"
            " --config\n"
        )
    )
    recompute = f"# activation checkpointing of the configuration: {f.plan.recompute}\n"
    lines = " \\\n    ".join(arguments(f))
    return {
        "torchtitan.sh": (
            f"#!/usr/bin/env bash\n{f.head()}{needs}{note}{recompute}set -euo pipefail\n"
            f'exec {command(f, "-m torchtitan.train")} \\\n    {lines} \\\n    "$@"\n'
        )
    }
