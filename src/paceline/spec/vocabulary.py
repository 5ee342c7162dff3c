"""The closed sets of words of plans, devices, frameworks and steps, as enums whose members are the words that
users type.

Schedules, compressors and ways of averaging are open sets: they are registered by name (`spec.schedules`,
`spec.compression`, `spec.synchronisation`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from paceline.errors import PacelineError, PlanError, nearest

#: other spellings of words, which plans and training take -> the word
ALIASES: Mapping[str, str] = {
    "zero3": "fsdp",
    "zero-1": "zero1",
    "zero-2": "zero2",
    "zero-3": "fsdp",
    "fsdp2": "fsdp",
    "1F1B": "1f1b",
    "zbv": "zb-v",
    "zbh1": "zb-h1",
    "local": "local-sgd",
}


class Word(StrEnum):
    """A word of a plan; it prints as it is typed."""

    def __repr__(self) -> str:
        return repr(self.value)


Kind = TypeVar("Kind", bound=Word)


class Sharding(Word):
    """What the data-parallel ranks share out: nothing, or optimizer state, gradients and parameters in turn.

    HSDP shards within groups of ranks and replicates across them.
    """

    NONE = "none"
    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    FSDP = "fsdp"
    HSDP = "hsdp"

    @property
    def whole(self) -> bool:
        """Each rank holds parameters, gradients and optimizer state in full."""
        return self in (Sharding.NONE, Sharding.DDP)

    @property
    def shards_gradients(self) -> bool:
        """Gradients are reduced by reduce-scatter, each rank keeping its own part."""
        return self in (Sharding.ZERO2, Sharding.FSDP, Sharding.HSDP)

    @property
    def shards_parameters(self) -> bool:
        """Parameters are gathered layer by layer before they are used."""
        return self in (Sharding.FSDP, Sharding.HSDP)


class Recompute(Word):
    """Activations that the backward pass computes again."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class Precision(Word):
    """Number format of matrix products; `amp_...`: parameters in fp32, products under autocast."""

    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    FP4 = "fp4"
    AMP_BF16 = "amp_bf16"
    AMP_FP16 = "amp_fp16"

    @property
    def autocast(self) -> bool:
        """Parameters stay in fp32; only captured modules are predicted so."""
        return self in (Precision.AMP_BF16, Precision.AMP_FP16)

    @property
    def scaled(self) -> bool:
        """Narrower than 16 bits, with scale factors; everything but matrix products stays in bf16."""
        return self in (Precision.FP8, Precision.FP4)


#: precisions that words of a plan may name
PLAN_PRECISIONS = tuple(precision for precision in Precision if not precision.autocast)


class Offload(Word):
    """What is kept in the host's memory between its uses."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"


class ContextExchange(Word):
    """How context-parallel ranks see one another's keys and values."""

    RING = "ring"
    ALL_TO_ALL = "all-to-all"


class Mode(Word):
    """Who keeps the parameters, and who waits for whom."""

    REPLICAS = "replicas"
    LOCAL_SGD = "local-sgd"
    DILOCO = "diloco"
    PS_SYNC = "ps-sync"
    PS_ASYNC = "ps-async"
    PS_BOUNDED = "ps-bounded"
    PS_BACKUP = "ps-backup"
    EASGD = "easgd"
    GOSSIP = "gossip"
    HOGWILD = "hogwild"

    @property
    def every_step(self) -> bool:
        """All ranks exchange gradients in every step and wait for them."""
        return self in (Mode.REPLICAS, Mode.PS_SYNC)

    @property
    def averages_rarely(self) -> bool:
        """Islands of ranks train apart and average their parameters once in a period."""
        return self in (Mode.LOCAL_SGD, Mode.DILOCO)


class DeviceKind(Word):
    """What a device is, as far as it changes how it runs."""

    GPU = "gpu"
    TPU = "tpu"
    CPU = "cpu"


class Phase(Word):
    """Part of a training step that an operator belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"


class BoundBy(Word):
    """What limits a part of a step."""

    COMPUTE = "compute"
    MEMORY = "memory"
    LATENCY = "latency"
    COMMUNICATION = "communication"
    BUBBLE = "bubble"
    HOST = "host"


class PassKind(Word):
    """A pass through a chunk, in the letters of torch; I and W are the two halves of a backward pass."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"


class NormKind(Word):
    """Norms of a transformer: with a mean and a bias, or the root mean square alone."""

    LAYER = "layer"
    RMS = "rms"


class Positions(Word):
    """How a transformer knows the order of tokens."""

    LEARNED = "learned"
    ROTARY = "rotary"
    ALIBI = "alibi"


class AttentionKernel(Word):
    """One flash-attention kernel, or two products round a fused softmax."""

    FUSED = "fused"
    SOFTMAX = "softmax"


class Fusion(Word):
    """Pointwise work of a framework: a kernel each, by torch.jit, or by torch.compile."""

    NONE = "none"
    JIT = "jit"
    COMPILE = "compile"


class Selective(Word):
    """What selective recomputation runs again: the core of attention, or most operators."""

    CORE = "core"
    OPS = "ops"


class TensorOverlap(Word):
    """What tensor-parallel collectives hide behind: nothing, weight gradients, or the product they feed."""

    NONE = "none"
    WGRAD = "wgrad"
    FULL = "full"


class ExpertKernels(Word):
    """How the experts of a rank run: each by kernels of its own, or in grouped products."""

    APART = "apart"
    FUSED = "fused"


class Dispatch(Word):
    """How tokens get to experts: one copy to each expert, or one to each rank."""

    ALL_TO_ALL = "alltoall"
    ONCE = "once"


class StateKeeper(Word):
    """Whose way of holding parameters, gradients and optimizer state a framework has."""

    MEGATRON = "megatron"
    DEEPSPEED = "deepspeed"
    TORCH = "torch"


class ServerMode(Word):
    """When a parameter server applies the updates of its workers."""

    ASYNC = "async"
    SYNC = "sync"
    BOUNDED = "bounded"
    BACKUP = "backup"

    @property
    def in_rounds(self) -> bool:
        """Updates are applied together, once enough of them have come."""
        return self in (ServerMode.SYNC, ServerMode.BACKUP)


class ServerRule(Word):
    """What workers send to a parameter server: gradients, or parameters that it and they move towards."""

    GRADIENT = "gradient"
    ELASTIC = "elastic"


def member(kind: type[Kind], what: str, value: str, error: type[PacelineError] = PlanError) -> Kind:
    """The member of `kind` that `value` spells; `error` names `what` and the words that are allowed."""
    try:
        return kind(value)
    except ValueError:
        near = nearest(str(value), list(kind))
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise error(f"{what}={value}: expected one of {', '.join(kind)}{hint}") from None
