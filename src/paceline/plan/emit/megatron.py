"""Arguments of Megatron-LM's pretrain_gpt.py."""

from __future__ import annotations

from paceline.plan.emit.facts import Facts, filled
from paceline.plan.emit.launch import command, script
from paceline.spec.vocabulary import ContextExchange, Offload, Precision, Recompute, Sharding

#: what of optimizer state, gradients and parameters Megatron's own sharding takes apart
_SHARDED = {Sharding.ZERO2: "optim_grads", Sharding.FSDP: "optim_grads_params"}
_TAKES = {
    "schedule": ("", "1f1b", "interleaved"),
    "sharding": ("none", "ddp", "zero1", "zero2", "fsdp"),
    "offload": ("none", "optimizer"),
    "precision": ("bf16", "fp16", "fp8"),
}
_SIZES = """\
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
"""
_EXPERTS = """\
--num-experts {m.experts}
--moe-router-topk {m.top_k}
--expert-model-parallel-size {p.ep}
--moe-grouped-gemm
--moe-token-dispatcher-type alltoall
"""
_FULL = """\
--recompute-granularity full
--recompute-method uniform
--recompute-num-layers 1
"""


def arguments(f: Facts) -> list[str]:
    """Model, degrees, batch and memory, one argument with its values per item."""
    f.refuse("megatron", **_TAKES)
    m, p = f.model_arguments, f.plan
    wanted = {
        _SIZES: True,
        "--fp16" if p.precision is Precision.FP16 else "--bf16": True,
        "--cp-comm-type a2a": p.context is ContextExchange.ALL_TO_ALL,
        "--group-query-attention\n--num-query-groups {m.kv_heads}": m.kv_heads not in (0, m.heads),
        "--swiglu": m.gated,
        "--normalization RMSNorm": m.norm == "rms",
        "--disable-bias-linear": not m.bias,
        "--position-embedding-type rope": m.positions == "rotary",
        "--untie-embeddings-and-output-weights": not m.tied,
        _EXPERTS: m.experts,
        "--sequence-parallel": p.sp,
        "--num-virtual-stages-per-pipeline-rank {p.vpp}": p.vpp > 1,
        "--fp8-format hybrid": p.precision is Precision.FP8,
        _FULL: p.recompute is Recompute.FULL,
        "--recompute-granularity selective": p.recompute is Recompute.SELECTIVE,
        "--use-megatron-fsdp\n--data-parallel-sharding-strategy {sharded}": p.sharding in _SHARDED,
        "--use-distributed-optimizer\n--overlap-param-gather": not p.sharding.whole,
        "--overlap-grad-reduce": p.sharding is not Sharding.NONE,
        "--optimizer-cpu-offload": p.offload is Offload.OPTIMIZER,
    }
    return filled(wanted, m=m, p=p, positions=max(p.seq, m.seq), sharded=_SHARDED.get(p.sharding))


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
