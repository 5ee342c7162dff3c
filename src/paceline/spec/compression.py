"""Ways to make gradients small for the wire: names and settings; what they cost is in `paceline.cost.compression`.

    parse("terngrad")
    parse("dgc:ratio=0.01,momentum=0.9")
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, ClassVar

from paceline.errors import SpecError, UnknownName, nearest

#: element types of the values that sparse schemes send, and bytes of one
VALUES = {"fp32": 4, "fp16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme(ABC):
    """One way to send a gradient; subclasses add their settings."""

    name: ClassVar[str]
    title: ClassVar[str]
    #: what the payload needs; what is gathered grows with the number of ranks, what is reduced does not
    collective: ClassVar[str] = "all_gather"
    #: what it may cost in accuracy, and who says so
    accuracy: ClassVar[str]
    evidence: ClassVar[str]

    #: tensors of fewer elements go in float32
    min_elements: int = 1024
    #: the last layer goes in float32
    keep_last: bool = False

    def __post_init__(self) -> None:
        _check(self, "min_elements", self.min_elements >= 0, "0 or more")

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` turns back into an equal scheme."""
        return {"name": self.name, **asdict(self)}

    def __str__(self) -> str:
        """As `parse` reads it: settings that are not the defaults."""
        changed = [f"{f.name}={_text(getattr(self, f.name))}" for f in fields(self) if getattr(self, f.name) != f.default]
        return self.name + (":" + ",".join(changed) if changed else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Float32(Scheme):
    """No compression: the all-reduce that everything else is measured against."""

    name: ClassVar[str] = "fp32"
    title: ClassVar[str] = "float32 all-reduce"
    collective: ClassVar[str] = "all_reduce"
    accuracy: ClassVar[str] = "none: the sum of all gradients, up to its order"
    evidence: ClassVar[str] = "definition of synchronous SGD"
    min_elements: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Float16(Scheme):
    """Half precision: 11 bits of significand, overflows above 65,504."""

    name: ClassVar[str] = "fp16"
    title: ClassVar[str] = "float16 all-reduce"
    collective: ClassVar[str] = "all_reduce"
    accuracy: ClassVar[str] = "none seen with loss scaling; without it small gradients vanish and large sums overflow"
    evidence: ClassVar[str] = "Micikevicius et al., Mixed Precision Training, ICLR 2018"
    min_elements: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BFloat16(Scheme):
    """Half the bytes with the range of float32: 8 bits of significand."""

    name: ClassVar[str] = "bf16"
    title: ClassVar[str] = "bfloat16 all-reduce"
    collective: ClassVar[str] = "all_reduce"
    accuracy: ClassVar[str] = "none seen: the range of float32, sums rounded to 8 bits"
    evidence: ClassVar[str] = "Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019"
    min_elements: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TernGrad(Scheme):
    """Ternary gradients: -1, 0, 1 times a scaler per tensor, five to a byte."""

    name: ClassVar[str] = "terngrad"
    title: ClassVar[str] = "TernGrad, 1.6 bit"
    accuracy: ClassVar[str] = "none on AlexNet, below 2 points on average on GoogLeNet; without clipping AlexNet loses 2.7 points"
    evidence: ClassVar[str] = "Wen et al., TernGrad, NIPS 2017 (ImageNet and CIFAR-10, 2 to 16 workers)"
    #: gradients are clipped at so many standard deviations of their tensor; 0: not
    clip: float = 2.5
    #: one scaler for all ranks, the largest; otherwise each rank sends its own
    share: bool = True
    keep_last: bool = True

    def __post_init__(self) -> None:
        Scheme.__post_init__(self)
        _check(self, "clip", self.clip >= 0 and math.isfinite(self.clip), "0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparse(Scheme, ABC):
    """A fixed share of the elements of each tensor."""

    ratio: float = 0.01

    def __post_init__(self) -> None:
        Scheme.__post_init__(self)
        _check(self, "ratio", 0 < self.ratio <= 1, "above 0, up to 1")

    def ratio_at(self, step: int) -> float:
        """The share that is sent in a step."""
        return self.ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK(Sparse):
    """The elements largest in magnitude; what is not sent is kept and added to the next gradient."""

    name: ClassVar[str] = "topk"
    title: ClassVar[str] = "top-k"
    accuracy: ClassVar[str] = "small at 1 % with error feedback, no loss of BLEU seen; momentum comes late, which costs where it is large"
    evidence: ClassVar[str] = "Aji and Heafield, EMNLP 2017; Stich et al., Sparsified SGD with Memory, NeurIPS 2018"
    feedback: bool = True
    values: str = "fp32"

    def __post_init__(self) -> None:
        Sparse.__post_init__(self)
        _check_values(self, self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomK(Sparse):
    """The same random elements on all ranks: indices follow from a shared seed and are not sent."""

    name: ClassVar[str] = "randomk"
    title: ClassVar[str] = "random-k"
    collective: ClassVar[str] = "all_reduce"
    accuracy: ClassVar[str] = "converges with error feedback, more slowly than top-k at the same share"
    evidence: ClassVar[str] = "Stich et al., Sparsified SGD with Memory, NeurIPS 2018"
    #: keep what is not sent; without it values are scaled up by 1 / ratio, which is unbiased
    feedback: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DGC(Sparse):
    """Deep Gradient Compression: top-k of locally accumulated momentum."""

    name: ClassVar[str] = "dgc"
    title: ClassVar[str] = "Deep Gradient Compression"
    accuracy: ClassVar[str] = "none on ResNet-50 up to 32 workers at 0.1 %, given momentum correction and warm-up; VGG-16 loses 1.7 points on 256"
    evidence: ClassVar[str] = "Lin et al., Deep Gradient Compression, ICLR 2018; the authors' repository synxlin/deep-gradient-compression"
    ratio: float = 0.001
    #: momentum correction: the optimizer's momentum, applied before selection (the optimizer then uses none)
    momentum: float = 0.9
    nesterov: bool = False
    #: clear momentum, too, where an element was sent
    masking: bool = True
    #: each rank clips a tensor's gradient to this norm over the square root of the number of ranks; 0: not
    clip_norm: float = 0.0
    #: steps over which the share falls from `warmup_ratio` to `ratio`, in `warmup_stages` geometric stages; 0: none
    warmup_steps: int = 0
    warmup_ratio: float = 0.25
    warmup_stages: int = 4
    #: share of the elements that the threshold is estimated from
    sample: float = 0.01
    values: str = "fp32"

    def __post_init__(self) -> None:
        Sparse.__post_init__(self)
        _check(self, "momentum", 0 <= self.momentum < 1, "from 0 to below 1")
        _check(self, "clip_norm", self.clip_norm >= 0, "0 or more")
        _check(self, "warmup_steps", self.warmup_steps >= 0, "0 or more")
        _check(self, "warmup_ratio", 0 < self.warmup_ratio <= 1, "above 0, up to 1")
        _check(self, "warmup_stages", self.warmup_stages >= 1, "1 or more")
        _check(self, "sample", 0 < self.sample <= 1, "above 0, up to 1")
        _check_values(self, self.values)

    def ratio_at(self, step: int) -> float:
        """Falls geometrically: 25 %, 6.3 %, 1.6 %, 0.4 %, then 0.1 %, by default."""
        if step >= self.warmup_steps or self.warmup_ratio <= self.ratio:
            return self.ratio
        stage = step * self.warmup_stages // self.warmup_steps
        return float(self.warmup_ratio * (self.ratio / self.warmup_ratio) ** (stage / self.warmup_stages))


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSGD(Scheme):
    """Low-rank approximation of each matrix by one warm-started power iteration, with error feedback."""

    name: ClassVar[str] = "powersgd"
    title: ClassVar[str] = "PowerSGD"
    collective: ClassVar[str] = "all_reduce"
    accuracy: ClassVar[str] = "none at rank 2 or 4 on ResNet-18 and an LSTM; rank 1 loses about half a point"
    evidence: ClassVar[str] = "Vogels et al., PowerSGD, NeurIPS 2019 (CIFAR-10, WikiText-2, 16 workers)"
    rank: int = 4

    def __post_init__(self) -> None:
        Scheme.__post_init__(self)
        _check(self, "rank", self.rank >= 1, "1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class QSGD(Scheme):
    """Stochastic rounding to a few levels, with a norm per bucket of elements."""

    name: ClassVar[str] = "qsgd"
    title: ClassVar[str] = "QSGD"
    accuracy: ClassVar[str] = "none seen at 4 bits and buckets of 512; fewer bits are noisier"
    evidence: ClassVar[str] = "Alistarh et al., QSGD, NIPS 2017 (ImageNet, CIFAR-10, AN4)"
    #: of one element, its sign included: 2, 4 or 8
    bits: int = 4
    #: elements that share a norm
    bucket: int = 512
    #: "max" or "l2"
    norm: str = "max"

    def __post_init__(self) -> None:
        Scheme.__post_init__(self)
        _check(self, "bits", self.bits in (2, 4, 8), "2, 4 or 8")
        _check(self, "bucket", self.bucket >= 8 and self.bucket % 8 == 0, "a multiple of 8")
        _check(self, "norm", self.norm in ("max", "l2"), "max or l2")

    @property
    def levels(self) -> int:
        """Levels above zero."""
        return int(2 ** (self.bits - 1)) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SignSGD(Scheme):
    """The sign of each element; ranks vote, the majority decides, and the mean magnitude scales the vote."""

    name: ClassVar[str] = "signsgd"
    title: ClassVar[str] = "signSGD, majority vote"
    accuracy: ClassVar[str] = "biased: it may not converge to the optimum; onebit, with error feedback, does"
    evidence: ClassVar[str] = "Bernstein et al., signSGD with Majority Vote, ICLR 2019 (ResNet-50); Karimireddy et al., ICML 2019 (counter-examples)"
    #: multiply the vote by the mean over ranks of the mean magnitude, so that the learning rate of SGD serves
    #: (Karimireddy et al.); otherwise each element is -1, 0 or 1 (Bernstein et al.), for a much lower rate
    scaled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class OneBit(Scheme):
    """The sign of each element, decoded as the mean of its side; the error is kept and added to the next gradient."""

    name: ClassVar[str] = "onebit"
    title: ClassVar[str] = "1-bit SGD, error feedback"
    accuracy: ClassVar[str] = "small: what is lost in a step is sent later; the first steps are best taken in full"
    evidence: ClassVar[str] = "Seide et al., 1-Bit SGD, Interspeech 2014; Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019"


SCHEMES: dict[str, type[Scheme]] = {
    kind.name: kind for kind in (Float32, Float16, BFloat16, TernGrad, DGC, PowerSGD, QSGD, SignSGD, OneBit, TopK, RandomK)
}


def parse(text: str) -> Scheme:
    """The scheme that `name` or `name:setting=value,...` describes."""
    name, _, rest = text.strip().partition(":")
    given: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, sep, value = part.partition("=")
        if not sep:
            raise SpecError(f"compression {text!r}: {part!r} is not setting=value; write for example dgc:ratio=0.01")
        given[key.strip()] = value.strip()
    return from_dict({"name": name.strip(), **given})


def from_dict(data: Mapping[str, Any]) -> Scheme:
    """The scheme that `Scheme.to_dict` described; values may be text."""
    name = str(data.get("name", ""))
    if name not in SCHEMES:
        raise UnknownName("compression", name, SCHEMES, f"known: {', '.join(SCHEMES)}")
    defaults = {f.name: f.default for f in fields(SCHEMES[name]) if f.default is not MISSING}
    given = {}
    for key, value in data.items():
        if key == "name":
            continue
        if key not in defaults:
            close = nearest(key, defaults)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(defaults)}"
            raise SpecError(f"compression {name!r} has no setting {key!r}; {hint}")
        given[key] = _read(name, key, value, type(defaults[key]))
    return SCHEMES[name](**given)


def _read(name: str, key: str, value: Any, kind: type) -> Any:
    """A setting as its type, from text or from a value of it."""
    if not isinstance(value, str):
        return value
    if kind is bool:
        if value.lower() not in ("true", "false", "yes", "no", "1", "0"):
            raise SpecError(f"compression {name!r}: {key} must be true or false; got {value!r}")
        return value.lower() in ("true", "yes", "1")
    try:
        return kind(value)
    except ValueError:
        raise SpecError(f"compression {name!r}: {key} must be {'a whole number' if kind is int else 'a number'}; got {value!r}") from None


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check(scheme: Scheme, key: str, fine: bool, allowed: str) -> None:
    if not fine:
        raise SpecError(f"compression {scheme.name!r}: {key} must be {allowed}; got {getattr(scheme, key)!r}")


def _check_values(scheme: Scheme, values: str) -> None:
    _check(scheme, "values", values in VALUES, " or ".join(VALUES))
