"""Arguments of Megatron-LM's pretrain_gpt.py."""

from __future__ import annotations

from paceline.plan.emit.facts import Facts
from paceline.plan.emit.launch import command

#: what of optimizer state, gradients and parameters Megatron's own sharding takes apart
_SHARDED = {"zero2": "optim_grads", "fsdp": "optim_grads_params"}


def arguments(f: Facts) -> list[str]:
    """Model, degrees, batch and memory, one argument with its values per item."""
    f.refuse(
        "megatron",
        schedule=("", "1f1b", "interleaved"),
        sharding=("none", "ddp", "zero1", "zero2", "fsdp"),
        offload=("none", "optimizer"),
        precision=("bf16", "fp16", "fp8"),
    )
    m, p = f.model_arguments, f.plan
    out = [
        f"--num-layers {m.layers}",
        f"--hidden-size {m.hidden}",
        f"--ffn-hidden-size {m.ffn}",
        f"--num-attention-heads {m.heads}",
        f"--seq-length {p.seq}",
        f"--max-position-embeddings {max(p.seq, m.seq)}",
        f"--tensor-model-parallel-size {p.tp}",
        f"--pipeline-model-parallel-size {p.pp}",
        f"--context-parallel-size {p.cp}",
        f"--micro-batch-size {p.mbs}",
        f"--global-batch-size {p.gbs}",
        "--fp16" if p.precision == "fp16" else "--bf16",
    ]
    if p.context == "all-to-all":
        out.append("--cp-comm-type a2a")
    if m.kv_heads and m.kv_heads != m.heads:
        out += ["--group-query-attention", f"--num-query-groups {m.kv_heads}"]
    out += (
        ["--swiglu"] * m.gated
        + ["--normalization RMSNorm"] * (m.norm == "rms")
        + ["--disable-bias-linear"] * (not m.bias)
    )
    out += ["--position-embedding-type rope"] * (m.positions == "rotary") + [
        "--untie-embeddings-and-output-weights"
    ] * (not m.tied)
    if m.experts:
        out += [
            f"--num-experts {m.experts}",
            f"--moe-router-topk {m.top_k}",
            f"--expert-model-parallel-size {p.ep}",
            "--moe-grouped-gemm",
            "--moe-token-dispatcher-type alltoall",
        ]
    out += ["--sequence-parallel"] * p.sp + [f"--num-virtual-stages-per-pipeline-rank {p.vpp}"] * (p.vpp > 1)
    if p.precision == "fp8":
        out += ["--fp8-format hybrid"]
    if p.recompute == "full":
        out += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    elif p.recompute == "selective":
        out += ["--recompute-granularity selective"]
    if p.sharding in _SHARDED:
        out += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {_SHARDED[p.sharding]}"]
    if p.sharding in ("zero1", *_SHARDED):
        out += ["--use-distributed-optimizer", "--overlap-param-gather"]
    out += ["--overlap-grad-reduce"] * (p.sharding not in ("none",)) + ["--optimizer-cpu-offload"] * (
        p.offload == "optimizer"
    )
    return out


def files(f: Facts) -> dict[str, str]:
    """A script that starts Megatron-LM; data, tokenizer and learning rate are the user's to add."""
    lines = " \\\n    ".join(arguments(f))
    notes = ["add data, tokenizer, learning rate and iterations as arguments of this script"]
    if f.framework is not None and f.framework.state != "megatron":
        notes.append(
            f"predicted with the kernels of {f.framework.title}; plan with --fix framework=megatron-core to"
            " predict Megatron's own"
        )
    body = (
        f"#!/usr/bin/env bash\n{f.head()}{''.join(f'# {note}' + chr(10) for note in notes)}set -euo"
        " pipefail\n"
    )
    script = '"${MEGATRON:?set MEGATRON to a checkout of Megatron-LM}/pretrain_gpt.py"'
    return {"megatron.sh": f'{body}exec {command(f, script)} \\\n    {lines} \\\n    "$@"\n'}
