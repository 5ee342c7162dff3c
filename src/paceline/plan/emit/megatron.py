"""Arguments of Megatron-LM's pretrain_gpt.py."""

from __future__ import annotations

from paceline.errors import PlanError
from paceline.plan.emit.facts import Facts, filled
from paceline.plan.emit.launch import command, script
from paceline.spec.vocabulary import Sharding

#: what of optimizer state, gradients and parameters Megatron's own sharding takes apart
_SHARDED = {Sharding.ZERO2: "optim_grads", Sharding.FSDP: "optim_grads_params"}
_TAKES = {
    "schedule": ("", "1f1b", "interleaved"),
    "sharding": ("none", "ddp", "zero1", "zero2", "fsdp"),
    "offload": ("none", "optimizer"),
    "precision": ("bf16", "fp16", "fp8"),
}
_ARGUMENTS = """\
--num-layers {m.layers}
--hidden-size {m.hidden}
--ffn-hidden-size {m.ffn}
--num-attention-heads {m.heads}
--seq-length {p.seq}
--max-position-embeddings {positions}
--tensor-model-parallel-size {p.tp}
--pipeline-model-parallel-size {p.pp}
--context-parallel-size {p.cp}
--micro-batch-size {p.mbs}
--global-batch-size {p.gbs}
--fp16                                              #if p.precision = fp16
--bf16                                              #if p.precision != fp16
--cp-comm-type a2a                                  #if p.context = all-to-all
--group-query-attention                             #if grouped = True
--num-query-groups {m.kv_heads}                     #if grouped = True
--swiglu                                            #if m.gated = True
--normalization RMSNorm                             #if m.norm = rms
--disable-bias-linear                               #if m.bias = False
--position-embedding-type rope                      #if m.positions = rotary
--untie-embeddings-and-output-weights               #if m.tied = False
--num-experts {m.experts}                           #if m.experts != 0
--moe-router-topk {m.top_k}                         #if m.experts != 0
--expert-model-parallel-size {p.ep}                 #if m.experts != 0
--moe-grouped-gemm                                  #if m.experts != 0
--moe-token-dispatcher-type alltoall                #if m.experts != 0
--sequence-parallel                                 #if p.sp = True
--num-virtual-stages-per-pipeline-rank {p.vpp}      #if p.vpp != 1
--fp8-format hybrid                                 #if p.precision = fp8
--recompute-granularity full                        #if p.recompute = full
--recompute-method uniform                          #if p.recompute = full
--recompute-num-layers 1                            #if p.recompute = full
--recompute-granularity selective                   #if p.recompute = selective
--use-megatron-fsdp                                 #if sharded != None
--data-parallel-sharding-strategy {sharded}         #if sharded != None
--use-distributed-optimizer                         #if p.sharding.whole = False
--overlap-param-gather                              #if p.sharding.whole = False
--overlap-grad-reduce                               #if p.sharding != none
--optimizer-cpu-offload                             #if p.offload = optimizer
"""


def arguments(f: Facts) -> list[str]:
    """Model, degrees, batch and memory, one argument with its values per item."""
    f.refuse("megatron", **_TAKES)
    m, p = f.sizes, f.plan
    if m is None:
        raise PlanError(
            f"--emit: {f.model} is not known by its sizes; emit torchrun, accelerate or slurm for it"
        )
    return filled(
        _ARGUMENTS,
        m=m,
        p=p,
        positions=max(p.seq, m.seq),
        grouped=m.kv_heads not in (0, m.heads),
        sharded=_SHARDED.get(p.sharding),
    )


def files(f: Facts) -> dict[str, str]:
    """A script that starts Megatron-LM; data, tokenizer and learning rate are the user's to add."""
    notes = ["add data, tokenizer, learning rate and iterations as arguments of this script"]
    if f.framework is not None and f.framework.state != "megatron":
        notes.append(
            f"predicted with the kernels of {f.framework.title}; plan with --fix framework=megatron-core to"
            " predict Megatron's own"
        )
    place = '"${MEGATRON:?set MEGATRON to a checkout of Megatron-LM}/pretrain_gpt.py"'
    start = command(f, place, [*arguments(f), '"$@"'])
    return {"megatron.sh": script(f, f"exec {start}", *notes)}
