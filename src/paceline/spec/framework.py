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
    #: transfers between pipeline stages run beside computation
    p2p_overlap: bool = False
    #: each tensor-parallel rank sends its part of an activation to the next stage
    p2p_scattered: bool = True
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
    #: share by which operators slow down while a collective runs beside them: its copies take multiprocessors and bandwidth
    contention: float = 0.3
    #: layers of one chunk of an interleaved pipeline where a plan does not say; 0: pipelines are not interleaved
    chunk_layers: int = 0
    #: host seconds per step that no kernel hides: data, logging, reading the loss back
    step_s: float = 0.0
    #: host seconds per micro-batch that no kernel hides
    micro_batch_s: float = 0.0


#: Megatron-LM until 2022, eager: own softmax kernel, jit fusions, nothing overlapped. Host times per operator of ours, which stands
#: for several calls of Python: from steps of 1F1B with small layers on one node (VIA-Research/vTrain)
MEGATRON_2021 = Framework(
    name="megatron-2021", title="Megatron-LM, 2020 to 2021", attention="softmax", dropout=True, fp32_gradients=False, fused_accumulation=False,
    tp_overlap="none", dp_overlap=False, issue_s=75e-6, issue_backward_s=70e-6,
)
#: PyTorch with FSDP2 or DTensor, eager; attention by FlashAttention 2
TORCH = Framework(
    name="torch", title="PyTorch, eager, with SDPA", fusion="none", fp32_gradients=False, fused_accumulation=False, tp_overlap="none",
    reduce_fp32=True, selective="ops", attention_flops_per_cycle=1400.0, tied_allreduce=False, issue_s=15e-6, issue_backward_s=20e-6,
)
NEMO = Framework(
    name="nemo", title="NeMo, Megatron-Bridge (Transformer Engine)", tp_overlap="full", p2p_overlap=True, fused_loss=True, chunk_layers=1,
    contention=0.12,
)
FRAMEWORKS: dict[str, Framework] = {f.name: f for f in (
    MEGATRON_2021,
    replace(MEGATRON_2021, name="megatron-2022", title="Megatron-LM with sequence parallelism, 2022", tp_overlap="wgrad", fp32_gradients=True,
            fused_accumulation=True),
    replace(MEGATRON_2021, name="megatron-deepspeed", title="Megatron-DeepSpeed", micro_batch_s=1.7e-3),
    # its production script sets CUDA_LAUNCH_BLOCKING=1 (bigscience-workshop/bigscience:train/tr11-176B-ml/tr11-176B-ml.slurm);
    # that the sweeps before it did too is inferred: what they lack is a constant time per layer and micro-batch
    replace(MEGATRON_2021, name="bigscience", title="Megatron-DeepSpeed as BigScience ran it, launches blocking", blocking=True, issue_s=160e-6,
            issue_backward_s=160e-6),
    Framework(name="megatron-core", title="Megatron-Core", fused_loss=True),
    NEMO,
    replace(NEMO, name="nemo-2024", title="NeMo until 24.07 (FlashAttention 2)", attention_flops_per_cycle=1400.0),
    TORCH,
    replace(TORCH, name="llm-foundry", title="llm-foundry (Composer, FSDP, FlashAttention 1)", attention_flops_per_cycle=690.0, fused_loss=True,
            selective="core", unpadded=4),
    replace(TORCH, name="torch-compile", title="PyTorch with torch.compile", fusion="compile", p2p_overlap=True),
    Framework(name="jax", title="JAX, XLA", fusion="compile", fp32_gradients=False, fused_accumulation=False, tp_overlap="full", p2p_overlap=True,
              issue_s=0.0, issue_backward_s=0.0, issue_collective_s=0.0),
)}


def get(name: str) -> Framework:
    """The framework called `name`."""
    if name not in FRAMEWORKS:
        raise UnknownName("framework", name, FRAMEWORKS, f"known: {', '.join(FRAMEWORKS)}")
    return FRAMEWORKS[name]
