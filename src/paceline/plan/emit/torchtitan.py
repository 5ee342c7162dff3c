"""Arguments of torchtitan's trainer."""

from __future__ import annotations

from paceline.plan.emit.facts import Facts, filled
from paceline.plan.emit.launch import command, script
from paceline.spec import schedules

#: catalog name -> torchtitan's configuration
_KNOWN = {"llama3-8b": "llama3_8b", "llama3-70b": "llama3_70b", "llama3-405b": "llama3_405b"}
_TAKES = {
    "sharding": ("none", "ddp", "fsdp", "hsdp"),
    "offload": ("none", "optimizer"),
    "recompute": ("none", "selective", "full"),
}
_ARGUMENTS = """\
--module llama3
--config {config}
--training.local_batch_size {local}
--training.global_batch_size {p.gbs}
--training.seq_len {p.seq}
--parallelism.data_parallel_replicate_degree {replicas}
--parallelism.data_parallel_shard_degree {shard}
--parallelism.tensor_parallel_degree {p.tp}
--parallelism.context_parallel_degree {p.cp}
--parallelism.fsdp_reshard_after_forward {reshard}
--parallelism.{split}enable_sequence_parallel                       #if p.tp != 1
--parallelism.pipeline_parallel_degree {p.pp}                       #if p.pp != 1
--parallelism.pipeline_parallel_schedule {schedule}                 #if p.pp != 1
--parallelism.pipeline_parallel_microbatch_size {p.mbs}             #if p.pp != 1
--training.enable_cpu_offload                                       #if p.offload = optimizer
--compile.enable                                                    #if compiled = True
"""


def arguments(f: Facts) -> list[str]:
    """Batch, degrees and schedule as overrides of a configuration."""
    f.refuse("torchtitan", **_TAKES)
    p = f.plan
    if p.pp > 1:
        runs = tuple(name for name, schedule in schedules.SCHEDULES.items() if schedule.torch)
        f.refuse("torchtitan", schedule=runs)
    replicas = p.dp if p.sharding.whole else p.dp // (p.shard or p.dp)
    return filled(
        _ARGUMENTS,
        p=p,
        config=_KNOWN.get(f.model, "llama3_8b"),
        local=p.gbs // p.dp if p.pp > 1 else p.mbs,
        replicas=replicas,
        shard=p.dp // replicas,
        reshard="always" if p.reshard else "never",
        split="" if p.sp else "no-",
        schedule=schedules.get(p.schedule).torch,
        compiled=f.compiled,
    )


def files(f: Facts) -> dict[str, str]:
    """A script that starts torchtitan."""
    notes = ["needs torchtitan installed on every node"]
    if f.model not in _KNOWN:
        missing = f"torchtitan has no configuration called {f.model}"
        notes.append(f"{missing}: put yours in place of --module and --config")
    notes.append(f"activation checkpointing of the configuration: {f.plan.recompute}")
    start = command(f, "-m torchtitan.train", [*arguments(f), '"$@"'])
    return {"torchtitan.sh": script(f, f"exec {start}", *notes)}
