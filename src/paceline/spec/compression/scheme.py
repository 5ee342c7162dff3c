"""What a compression scheme is: its settings, its bytes on the wire, the work of its encoder, and who trains
with it.

A scheme is one file: a frozen dataclass with these methods, and `register`. Nothing here imports torch;
`encoder` names the class that does the work (`paceline.train.compress`), and is imported when something is
trained.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, ClassVar, TypeVar

from paceline import extend
from paceline.errors import SpecError, UnknownName, nearest

Shape = int | Sequence[int]
#: past any warm-up
LATE = 2**62
SCHEMES: dict[str, type[Scheme]] = {}

_Kind = TypeVar("_Kind", bound="type[Scheme]")


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective of a gradient: `op` is "max", "sum" or "gather", `bytes` what one rank contributes."""

    op: str
    bytes: int

    @property
    def collective(self) -> str:
        """As `paceline.cost.collectives` calls it."""
        return "all_gather" if self.op == "gather" else "all_reduce"

    def sent_bytes(self, world: int) -> float:
        """What one of `world` ranks sends in a ring: all of the others' for a gather, 2 (n-1)/n for a
        reduction.
        """
        return self.bytes * (world - 1) * (1.0 if self.op == "gather" else 2.0 / world)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What encoding or decoding one gradient takes of a device: arithmetic, and memory traffic of fused
    kernels.
    """

    flops: float
    read_bytes: float
    written_bytes: float
    #: passes over the gradient, each at least one kernel
    passes: int

    @property
    def bytes(self) -> float:
        """Read and written."""
        return self.read_bytes + self.written_bytes


NO_WORK = Work(flops=0, read_bytes=0, written_bytes=0, passes=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme(ABC):
    """One way to send a gradient; subclasses add their settings, their bytes and their work."""

    name: ClassVar[str]
    title: ClassVar[str]
    #: what the payload needs; what is gathered grows with the number of ranks, what is reduced does not
    collective: ClassVar[str] = "all_gather"
    #: what it may cost in accuracy, and who says so
    accuracy: ClassVar[str]
    evidence: ClassVar[str]
    #: the compressor, as "module:Class"
    encoder: ClassVar[str]

    #: tensors of fewer elements go in float32
    min_elements: int = 1024
    #: the last layer goes in float32
    keep_last: bool = False

    def __post_init__(self) -> None:
        self.check("min_elements", self.min_elements >= 0, "0 or more")

    def check(self, key: str, fine: bool, allowed: str) -> None:
        """Raises where a setting is not `fine`."""
        if not fine:
            raise SpecError(f"compression {self.name!r}: {key} must be {allowed}; got {getattr(self, key)!r}")

    @property
    def state_bytes(self) -> int:
        """Bytes per element that an encoder keeps from one step to the next."""
        return 0

    # -- bytes -------------------------------------------------------------------------------------

    def payload_bytes(self, shape: Shape, step: int) -> int:
        """Bytes one rank contributes for a float32 gradient in a step, what is agreed on first not
        counted.
        """
        raise TypeError(f"compression {self.name!r} does not say its payload_bytes")

    def shared_bytes(self, shape: Shape) -> int:
        """Bytes that are all-reduced with MAX before a gradient can be encoded."""
        numel(shape)
        return 0

    def exchanges(self, shape: Shape, step: int = LATE) -> tuple[Exchange, ...]:
        """The collectives of one gradient, one after another."""
        shared = self.shared_bytes(shape)
        agreed = (Exchange("max", shared),) if shared else ()
        op = "gather" if self.collective == "all_gather" else "sum"
        return (*agreed, Exchange(op, self.payload_bytes(shape, step)))

    # -- work --------------------------------------------------------------------------------------

    def encode_work(self, shape: Shape) -> Work:
        """Of one rank, for one gradient."""
        raise TypeError(f"compression {self.name!r} does not say its encode_work")

    def decode_work(self, shape: Shape, world: int) -> Work:
        """Of one rank, for one gradient, from what all ranks sent."""
        raise TypeError(f"compression {self.name!r} does not say its decode_work")

    def per_element(self, shape: Shape, flops: float, read: float, written: float, passes: int) -> Work:
        """Work of an encoder by element: arithmetic, and bytes read and written besides the payload."""
        n, payload = numel(shape), self.payload_bytes(shape, LATE)
        return Work(
            flops=flops * n,
            read_bytes=read * n,
            written_bytes=written * n + (payload if passes else 0),
            passes=passes,
        )

    def added_up(self, shape: Shape, world: int, flops: float) -> Work:
        """Work of a decoder that adds up, in one pass, `flops` an element for each payload that arrives."""
        n, ranks = numel(shape), world if self.collective == "all_gather" else 1
        arrived = self.payload_bytes(shape, LATE) * ranks
        return Work(flops=flops * n * ranks, read_bytes=arrived, written_bytes=4 * n, passes=1)

    # -- as text and data --------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` turns back into an equal scheme."""
        return {"name": self.name, **asdict(self)}

    def __str__(self) -> str:
        """As `parse` reads it: settings that are not the defaults."""
        changed = [
            f"{f.name}={_text(getattr(self, f.name))}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        ]
        return self.name + (":" + ",".join(changed) if changed else "")


def register(kind: _Kind) -> _Kind:
    """Makes a scheme known by its name: to plans, predictions, the search, `auto` and training."""
    extend.claim("compression", kind.name, kind, SCHEMES)
    SCHEMES[kind.name] = kind
    return kind


# -- sizes -----------------------------------------------------------------------------------------


def numel(shape: Shape) -> int:
    """Elements of a shape; a number of elements stands for itself."""
    n = shape if isinstance(shape, int) else math.prod(shape)
    if n < 1:
        raise SpecError(f"a gradient has at least one element; got shape {shape}")
    return n


def bytes_of(bits: int) -> int:
    """Bytes that so many bits take."""
    return -(-bits // 8)


# -- reading ---------------------------------------------------------------------------------------


def parse(text: str) -> Scheme:
    """The scheme that `name` or `name:setting=value,...` describes."""
    name, _, rest = text.strip().partition(":")
    given: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, sep, value = part.partition("=")
        if not sep:
            raise SpecError(
                f"compression {text!r}: {part!r} is not setting=value; write for example dgc:ratio=0.01"
            )
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
    read: Callable[[str], Any] = _truth if kind is bool else kind
    wanted = {bool: "true or false", int: "a whole number"}.get(kind, "a number")
    try:
        return read(value)
    except ValueError:
        raise SpecError(f"compression {name!r}: {key} must be {wanted}; got {value!r}") from None


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false", "yes", "no", "1", "0"):
        raise ValueError(text)
    return text.lower() in ("true", "yes", "1")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
