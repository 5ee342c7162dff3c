"""Training frameworks as far as they change a step: which kernels they run, what they overlap, what their host costs.

Few and named; a framework's year matters more than its version, because kernels were fused and collectives
overlapped one after another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.errors import UnknownName


@dataclass(frozen=True, kw_only=True)
class Framework:
    """How a framework runs a transformer."""

    name: str
    title: str
    #: fused: one flash-attention kernel; softmax: two products round a fused softmax
    attention: str = "fused"
    #: the most FLOPs per multiprocessor and cycle of its attention kernel; 0: of the best there is. FlashAttention 1 reaches about
    #: 690, on Ampere and Hopper alike, FlashAttention 2 about 1400
    attention_flops_per_cycle: float = 0.0
    #: of what the best fp8 products reach
    fp8_rate: float = 1.0
    #: pointwise work: none (a kernel each), jit (bias with activation or dropout and residual), compile (with norms too)
    fusion: str = "jit"
    #: trains with dropout (masks are drawn, written and read)
    dropout: bool = False
    #: gradients are kept in fp32, and weight-gradient products add to them in place
    fp32_gradients: bool = True
    fused_accumulation: bool = True
    #: gradients cross the network in fp32
    reduce_fp32: bool = False
    #: what selective recomputation runs again: core (of attention), ops (all but every second product and attention)
    selective: str = "core"
    #: the loss is one kernel, not a chain of passes over fp32 logits
    fused_loss: bool = False
    #: what tensor-parallel collectives hide behind: none; wgrad (the weight-gradient product, in the backward pass);
    #: full (the product they belong to, in pieces)
    tp_overlap: str = "wgrad"
    #: gradients are reduced during the last backward pass, and sharded parameters gathered during the first forward pass
    dp_overlap: bool = True
    #: sharded parameters and gradients cross the network once per device, not once per node
    flat_gathers: bool = False
    #: transfers between pipeline stages run beside computation
    p2p_overlap: bool = False
    #: each tensor-parallel rank sends its part of an activation to the next stage
    p2p_scattered: bool = True
    #: sequence parallel: of the input of a product split by columns a rank keeps its own part, and gathers it again for the weight gradient
    regathers: bool = True
    #: the embedding's gradient is reduced between first and last stage, where they share it
    tied_allreduce: bool = True
    #: host seconds to issue one operator in the forward and in the backward pass, and one collective
    issue_s: float = 8e-6
    issue_backward_s: float = 8e-6
    issue_collective_s: float = 20e-6
    #: the host waits for every kernel (CUDA_LAUNCH_BLOCKING): its time adds to the device's instead of hiding behind it
    blocking: bool = False
    #: scores are scaled and masked by kernels of their own, not within the softmax
    unfused_mask: bool = False
    #: widths of the model that are gathered before attention and scattered after it, where padding is taken out of sequences
    unpadded: int = 0
    #: how the experts of a rank run. apart: products, casts and biases of each by kernels of its own; fused: grouped products that
    #: apply biases and activations and cast their results
    experts: str = "apart"
    #: how tokens get to them. alltoall: sorted, one copy to each expert, sorted again by local expert; once: one copy to each rank, or
    #: to each node, which passes it on (DeepEP, HybridEP)
    dispatch: str = "alltoall"
    #: experts' exchanges run beside the computation of another micro-batch
    exchange_overlap: bool = False
    #: host seconds to launch one kernel of one expert, and to cast one tensor of one expert, which makes objects in Python
    issue_expert_s: float = 8e-6
    issue_expert_cast_s: float = 1e-4
    #: share by which operators slow down while a collective runs beside them: its copies take multiprocessors and bandwidth
    contention: float = 0.3
    #: layers of one chunk of an interleaved pipeline where a plan does not say; 0: pipelines are not interleaved
    chunk_layers: int = 0
    #: a step is one micro-batch unless a plan says otherwise: gradients are not accumulated
    whole_batch: bool = False
    #: who holds parameters, gradients and optimizer state, and what its update copies: megatron, deepspeed, torch (predict/memory.py)
    state: str = "megatron"
    #: bytes per gradient that is kept; 0: 4 in fp32, else those of a parameter
    kept_gradients: int = 0
    #: bytes per logit when most of the loss is live; 0: in low precision, in fp32 and, unless it is one kernel, once more in fp32
    loss_bytes: float = 0.0
    #: the same where the vocabulary is split over ranks; 0: no different
    split_loss_bytes: float = 0.0
    #: reserved over allocated bytes of what comes and goes; less where the allocator's segments can grow
    slack: float = 1.15
    #: driver, context and kernels: bytes that a process takes before it allocates; before CUDA 11.7 all kernels were loaded at once
    context_bytes: float = 0.6e9
    #: empty gradients in low precision stand for those that products add to in place (Transformer Engine keeps one of each shape)
    placeholders: bool = False
    #: bytes per weight of its copies in fp8 that are kept from the forward to the backward pass
    fp8_weights: float = 0.0
    #: what products save of their inputs is in fp8 where they are
    fp8_saved: bool = False
    #: host seconds per step that no kernel hides: data, logging, reading the loss back
    step_s: float = 0.0
    #: host seconds per micro-batch that no kernel hides
    micro_batch_s: float = 0.0


#: Megatron-LM until 2022, eager: own softmax kernel, jit fusions, nothing overlapped. Host times per operator of ours, which stands
#: for several calls of Python: from steps of 1F1B with small layers on one node (VIA-Research/vTrain)
MEGATRON_2021 = Framework(
    name="megatron-2021", title="Megatron-LM, 2020 to 2021", attention="softmax", dropout=True, fp32_gradients=False, fused_accumulation=False,
    tp_overlap="none", dp_overlap=False, issue_s=75e-6, issue_backward_s=70e-6, context_bytes=1.6e9,
)
#: PyTorch with FSDP2 or DTensor, eager; attention by FlashAttention 2
TORCH = Framework(
    name="torch", title="PyTorch, eager, with SDPA", fusion="none", fp32_gradients=False, fused_accumulation=False, tp_overlap="none",
    reduce_fp32=True, selective="ops", attention_flops_per_cycle=1400.0, regathers=False, tied_allreduce=False, issue_s=15e-6,
    issue_backward_s=20e-6,
    state="torch", loss_bytes=12.0, split_loss_bytes=18.0, slack=1.06,
)
#: gradients are kept and reduced in bf16 (NVIDIA-NeMo/Megatron-Bridge:src/megatron/bridge/perf_recipes/_common.py), weights in fp8 with their
#: transposes take what bf16 would
NEMO = Framework(
    name="nemo", title="NeMo, Megatron-Bridge (Transformer Engine)", tp_overlap="full", p2p_overlap=True, fused_loss=True, chunk_layers=1,
    contention=0.12, placeholders=True, fp8_saved=True, kept_gradients=2,
)
FRAMEWORKS: dict[str, Framework] = {f.name: f for f in (
    MEGATRON_2021,
    replace(MEGATRON_2021, name="megatron-2022", title="Megatron-LM with sequence parallelism, 2022", tp_overlap="wgrad", fp32_gradients=True,
            fused_accumulation=True),
    replace(MEGATRON_2021, name="megatron-deepspeed", title="Megatron-DeepSpeed", state="deepspeed", micro_batch_s=1.7e-3, flat_gathers=True),
    # collectives of ZeRO-3 in 2021 took no account of nodes and waited for each other
    replace(MEGATRON_2021, name="deepspeed-zero3", title="DeepSpeed ZeRO-3, 2021", state="deepspeed", flat_gathers=True, contention=1.0),
    # its production script sets CUDA_LAUNCH_BLOCKING=1 (bigscience-workshop/bigscience:train/tr11-176B-ml/tr11-176B-ml.slurm);
    # that the sweeps before it did too is inferred: what they lack is a constant time per layer and micro-batch
    replace(MEGATRON_2021, name="bigscience", title="Megatron-DeepSpeed as BigScience ran it, launches blocking", state="deepspeed", blocking=True,
            issue_s=160e-6, issue_backward_s=160e-6),
    Framework(name="megatron-core", title="Megatron-Core", fused_loss=True, placeholders=True, fp8_weights=2.0, fp8_saved=True),
    NEMO,
    # full-iteration CUDA graphs, HybridEP on 32 of a device's 148 multiprocessors, grouped products with fused activation and casts
    # (NVIDIA-NeMo/Megatron-Bridge:src/megatron/bridge/perf_recipes)
    replace(NEMO, name="megatron-bridge-2026", title="Megatron-Bridge from 26.06, experts in MXFP8", experts="fused", dispatch="once",
            exchange_overlap=True, contention=0.2, issue_s=0.0, issue_backward_s=0.0, issue_collective_s=0.0, issue_expert_s=0.0,
            issue_expert_cast_s=0.0),
    replace(NEMO, name="megatron-bridge", title="Megatron-Bridge until 26.04 (DeepEP, HybridEP)", dispatch="once"),
    replace(NEMO, name="nemo-2024", title="NeMo until 24.07 (FlashAttention 2)", attention_flops_per_cycle=1400.0),
    TORCH,
    replace(TORCH, name="llm-foundry", title="llm-foundry (Composer, FSDP, FlashAttention 1)", attention_flops_per_cycle=690.0, fused_loss=True,
            selective="core", unpadded=4, loss_bytes=6.0, slack=1.0),
    # its loss reads logits and writes their gradient, both in low precision
    replace(TORCH, name="torch-compile", title="PyTorch with torch.compile", fusion="compile", p2p_overlap=True, loss_bytes=4.0),
    replace(TORCH, name="torch-compile-2024", title="PyTorch with torch.compile, 2024", fusion="compile", p2p_overlap=True, fp8_weights=1.0),
    # attention written out in PyTorch, masked by a kernel of its own
    replace(TORCH, name="nanogpt", title="nanoGPT, PyTorch 2.0", attention="softmax", unfused_mask=True),
    replace(TORCH, name="meta-4d", title="Meta's Llama 3 training (interleaved pipelines, FSDP)", fusion="jit", chunk_layers=1, p2p_overlap=True),
    Framework(name="jax", title="JAX, XLA", fusion="compile", fp32_gradients=False, fused_accumulation=False, tp_overlap="full", p2p_overlap=True,
              issue_s=0.0, issue_backward_s=0.0, issue_collective_s=0.0, whole_batch=True),
    # one process per device in C, its own fused kernels, cuBLASLt and cuDNN; the host only launches
    Framework(name="llm.c", title="llm.c", fusion="compile", fp32_gradients=False, fused_accumulation=True, fused_loss=True, tp_overlap="none",
              issue_s=4e-6, issue_backward_s=4e-6),
)}


def get(name: str) -> Framework:
    """The framework called `name`."""
    if name not in FRAMEWORKS:
        raise UnknownName("framework", name, FRAMEWORKS, f"known: {', '.join(FRAMEWORKS)}")
    return FRAMEWORKS[name]
