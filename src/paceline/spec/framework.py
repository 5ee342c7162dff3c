"""Training frameworks as far as they change a step: which kernels they run, what they overlap, what their
host costs.

Facts come from TOML (`catalog/frameworks/*.toml`, or a user's own file), one file per framework:

    name = "my-stack"
    like = "torch-compile"             # optional: take what is not given here from another framework
    kind = "derived"
    source = "the code of my stack, release 3"
    [step]                             # fields of `Framework`
    dp_overlap = false

Few and named; a framework's year matters more than its version, because kernels were fused and collectives
overlapped one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from paceline.errors import SpecError, nearest
from paceline.spec.facts import KINDS, FactReader, read_text
from paceline.spec.vocabulary import (
    AttentionKernel,
    Dispatch,
    ExpertKernels,
    Fusion,
    Selective,
    StateKeeper,
    TensorOverlap,
    Word,
    member,
)

#: models that a framework is known to run: transformers by their sizes, captured modules, or both
RUNS = ("transformers", "modules", "both")
#: fields whose values are a closed set of words
_WORDS: Mapping[str, type[Word]] = {
    "attention": AttentionKernel,
    "fusion": Fusion,
    "selective": Selective,
    "tp_overlap": TensorOverlap,
    "experts": ExpertKernels,
    "dispatch": Dispatch,
    "state": StateKeeper,
}
#: what a field of each type may be given as in a file
_GIVEN: dict[str, tuple[type[Any], ...]] = {
    "float": (int, float),
    "int": (int,),
    "bool": (bool,),
    "str": (str,),
}


@dataclass(frozen=True, kw_only=True)
class Framework:
    """How a framework runs a training step."""

    name: str
    title: str
    #: how its properties are known, and where from
    kind: str = "declared"
    source: str = ""
    #: which models it runs: `transformers` by their sizes, captured `modules`, or `both`
    runs: str = "transformers"

    # -- captured modules: their operators are known, so only the host and the exchange of gradients differ
    # ----

    #: host time per operator over that of eager PyTorch 2
    host_scale: float = 1.0
    #: how gradients are brought together (`spec.synchronisation`)
    sync: str = "ddp"
    #: where the loop empties the allocator's cache before each step: seconds per byte to get memory again,
    #: and the share of the device's memory up to which the driver has enough in store
    reallocation_s: float = 0.0
    reallocation_above: float = 0.75

    # -- transformers: which operators there are, and what they overlap -------------------------------------

    #: fused: one flash-attention kernel; softmax: two products round a fused softmax
    attention: AttentionKernel = AttentionKernel.FUSED
    #: the most FLOPs per multiprocessor and cycle of its attention kernel; 0: of the best there is.
    #: FlashAttention 1 reaches about
    #: 690, on Ampere and Hopper alike, FlashAttention 2 about 1400
    attention_flops_per_cycle: float = 0.0
    #: of what the best fp8 products reach
    fp8_rate: float = 1.0
    #: pointwise work: none (a kernel each), jit (bias with activation or dropout and residual), compile (with
    #: norms too)
    fusion: Fusion = Fusion.JIT
    #: trains with dropout (masks are drawn, written and read)
    dropout: bool = False
    #: gradients are kept in fp32, and weight-gradient products add to them in place
    fp32_gradients: bool = True
    fused_accumulation: bool = True
    #: gradients cross the network in fp32
    reduce_fp32: bool = False
    #: what selective recomputation runs again: core (of attention), ops (all but every second product and
    #: attention)
    selective: Selective = Selective.CORE
    #: the loss is one kernel, not a chain of passes over fp32 logits
    fused_loss: bool = False
    #: what tensor-parallel collectives hide behind: none; wgrad (the weight-gradient product, in the backward
    #: pass); full (the product they belong to, in pieces)
    tp_overlap: TensorOverlap = TensorOverlap.WGRAD
    #: gradients are reduced during the last backward pass, and sharded parameters gathered during the first
    #: forward pass
    dp_overlap: bool = True
    #: sharded parameters and gradients cross the network once per device, not once per node
    flat_gathers: bool = False
    #: transfers between pipeline stages run beside computation
    p2p_overlap: bool = False
    #: each tensor-parallel rank sends its part of an activation to the next stage
    p2p_scattered: bool = True
    #: sequence parallel: of the input of a product split by columns a rank keeps its own part, and gathers it
    #: again for the weight gradient
    regathers: bool = True
    #: the embedding's gradient is reduced between first and last stage, where they share it
    tied_allreduce: bool = True
    #: host seconds to issue one operator in the forward and in the backward pass, and one collective
    issue_s: float = 8e-6
    issue_backward_s: float = 8e-6
    issue_collective_s: float = 20e-6
    #: the host waits for every kernel (CUDA_LAUNCH_BLOCKING): its time adds to the device's instead of hiding
    #: behind it
    blocking: bool = False
    #: scores are scaled and masked by kernels of their own, not within the softmax
    unfused_mask: bool = False
    #: widths of the model that are gathered before attention and scattered after it, where padding is taken
    #: out of sequences
    unpadded: int = 0
    #: how the experts of a rank run. apart: products, casts and biases of each by kernels of its own; fused:
    #: grouped products that apply biases and activations and cast their results
    experts: ExpertKernels = ExpertKernels.APART
    #: how tokens get to them. alltoall: sorted, one copy to each expert, sorted again by local expert; once:
    #: one copy to each rank, or to each node, which passes it on (DeepEP, HybridEP)
    dispatch: Dispatch = Dispatch.ALL_TO_ALL
    #: experts' exchanges run beside the computation of another micro-batch
    exchange_overlap: bool = False
    #: host seconds to launch one kernel of one expert, and to cast one tensor of one expert, which makes
    #: objects in Python
    issue_expert_s: float = 8e-6
    issue_expert_cast_s: float = 1e-4
    #: share by which operators slow down while a collective runs beside them: its copies take multiprocessors
    #: and bandwidth
    contention: float = 0.3
    #: layers of one chunk of an interleaved pipeline where a plan does not say; 0: pipelines are not
    #: interleaved
    chunk_layers: int = 0
    #: a step is one micro-batch unless a plan says otherwise: gradients are not accumulated
    whole_batch: bool = False
    #: who holds parameters, gradients and optimizer state, and what its update copies: megatron, deepspeed,
    #: torch (predict/memory.py)
    state: StateKeeper = StateKeeper.MEGATRON
    #: bytes per gradient that is kept; 0: 4 in fp32, else those of a parameter
    kept_gradients: int = 0
    #: bytes per logit when most of the loss is live; 0: in low precision, in fp32 and, unless it is one
    #: kernel, once more in fp32
    loss_bytes: float = 0.0
    #: the same where the vocabulary is split over ranks; 0: no different
    split_loss_bytes: float = 0.0
    #: reserved over allocated bytes of what comes and goes; less where the allocator's segments can grow
    slack: float = 1.15
    #: driver, context and kernels: bytes that a process takes before it allocates; before CUDA 11.7 all
    #: kernels were loaded at once
    context_bytes: float = 0.6e9
    #: empty gradients in low precision stand for those that products add to in place (Transformer Engine
    #: keeps one of each shape)
    placeholders: bool = False
    #: bytes per weight of its copies in fp8 that are kept from the forward to the backward pass
    fp8_weights: float = 0.0
    #: what products save of their inputs is in fp8 where they are
    fp8_saved: bool = False
    #: host seconds per step that no kernel hides: data, logging, reading the loss back
    step_s: float = 0.0
    #: host seconds per micro-batch that no kernel hides
    micro_batch_s: float = 0.0

    def __post_init__(self) -> None:
        for key, kind in _WORDS.items():
            if type(value := getattr(self, key)) is not kind:
                word = member(kind, f"framework {self.name}: {key}", value, SpecError)
                object.__setattr__(self, key, word)

    def sped_up(self, times: float) -> Framework:
        """The framework on a host that is so many times as fast."""
        names = ("issue_s", "issue_backward_s", "issue_collective_s", "step_s", "micro_batch_s")
        faster = {name: getattr(self, name) / times for name in names}
        return replace(self, host_scale=self.host_scale / times, **faster)


_STEP = {f.name: str(f.type) for f in fields(Framework) if f.name not in ("name", "title", "kind", "source")}


def parse(text: str, where: str, get: Callable[[str], Framework]) -> Framework:
    """The framework that a TOML text describes; `get` finds the one it is `like`."""
    reader = FactReader(text, where, {"name", "title", "like", "kind", "source"}, {"step"}, {})
    given = reader.data.get("step", {})
    for key, value in given.items():
        _check(reader, key, value)
    kind = reader.text("kind", "declared")
    if kind not in KINDS:
        raise reader.error("kind", f"kind {kind!r} is not one of {', '.join(KINDS)}")
    name = reader.text("name")
    about: dict[str, Any] = {
        "name": name,
        "title": reader.text("title", name),
        "kind": kind,
        "source": reader.text("source", where),
    }
    if "like" in reader.data:
        return replace(get(reader.text("like")), **about, **given)
    return Framework(**about, **given)


def _check(reader: FactReader, key: str, value: Any) -> None:
    """That a key is a field of a framework, and its value of the field's type."""
    if key not in _STEP:
        near = nearest(key, _STEP)
        hint = f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(sorted(_STEP))}"
        raise reader.error(f"step.{key}", f"unknown key {key!r}; {hint}")
    if key in _WORDS:
        if value not in tuple(_WORDS[key]):
            raise reader.error(f"step.{key}", f"{value!r} is not one of {', '.join(_WORDS[key])}")
        return
    wanted = _GIVEN[_STEP[key]]
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        raise reader.error(f"step.{key}", f"expected {_STEP[key]}, got {value!r}")
    if isinstance(value, (int, float)) and not 0 <= value < float("inf"):
        raise reader.error(f"step.{key}", f"must be zero or more and finite, got {value!r}")
    if key == "contention" and value >= 1:
        raise reader.error("step.contention", f"is a share below 1, got {value!r}")
    if key == "runs" and value not in RUNS:
        raise reader.error("step.runs", f"runs {value!r} is not one of {', '.join(RUNS)}")


def read(path: Path, get: Callable[[str], Framework]) -> Framework:
    """The framework that a TOML file describes."""
    return parse(read_text(path, "framework"), str(path), get)
