"""How the gradients of data-parallel ranks are brought together, as far as it changes a step.

A plan says what is shared (`ddp`, `zero1`, `fsdp`...); a `Synchronisation` says in what pieces, when, and
through what, as frameworks do it; a `Relaxation` says what is sent less, or later, or not waited for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from paceline import units
from paceline.errors import PlanError, SpecError, UnitError, UnknownName
from paceline.spec import defaults
from paceline.spec.compression import SCHEMES, Scheme, from_dict
from paceline.spec.defaults import Defaults
from paceline.spec.framework import Framework
from paceline.spec.vocabulary import Mode, member


@dataclass(frozen=True, kw_only=True)
class Synchronisation:
    """Pieces, timing and path of the reduction of gradients."""

    name: str
    title: str
    #: gradients go to a parameter server in the host's memory, which sums and updates, and parameters come
    #: back
    server: bool = False
    #: bytes from which on a bucket is sent; None: what the plan says, 0: every gradient by itself
    bucket_bytes: float | None = None
    #: of the first bucket, kept small so that communication starts early
    first_bucket_bytes: float = math.inf
    #: seconds after which a bucket is sent even if it is not full
    cycle_s: float = math.inf
    #: buckets are reduced while the backward pass goes on, not after it
    overlap: bool = True
    #: and also where micro-batches are accumulated, or then once, after the last of them
    overlap_accumulated: bool = True
    #: in mixed precision, gradients cross in half precision, not as the parameter is kept
    half_when_mixed: bool = False
    #: times that gradients are copied on the device besides: into buckets, and back
    copies: float = 0.0
    #: share by which operators slow down while a collective runs beside them
    contention: float = Framework.contention


#: torch.nn.parallel.DistributedDataParallel: buckets in the order in which gradients become ready, a first
#: one of 1 MiB
DDP = Synchronisation(
    name="ddp",
    title="PyTorch DistributedDataParallel",
    first_bucket_bytes=defaults.DDP_FIRST_BYTES,
    copies=2.0,
)
#: Horovod: a background thread fuses what has become ready in a cycle, up to 64 MiB, and reduces it beside
#: the backward pass
HOROVOD = Synchronisation(
    name="horovod",
    title="Horovod",
    bucket_bytes=64 * 2.0**20,
    cycle_s=5e-3,
    copies=2.0,
    overlap_accumulated=False,
)
SYNCHRONISATIONS: dict[str, Synchronisation] = {
    s.name: s
    for s in (
        DDP,
        HOROVOD,
        replace(HOROVOD, name="horovod-half", title="Horovod under TensorFlow", half_when_mixed=True),
        # MPI on a node of 32 cores (Cori's Haswell nodes): sending takes one of them
        replace(DDP, name="own-core", title="buckets sent by a core of their own", contention=1 / 32),
        replace(
            DDP,
            name="after-backward",
            title="one all-reduce after the backward pass",
            bucket_bytes=math.inf,
            overlap=False,
        ),
        Synchronisation(
            name="replicated",
            title="TensorFlow replicated variables: every gradient is reduced by itself",
            bucket_bytes=0.0,
        ),
        Synchronisation(
            name="parameter-server",
            title="TensorFlow parameter server on the host",
            bucket_bytes=0.0,
            server=True,
            contention=0.0,
        ),
        Synchronisation(
            name="kvstore",
            title="MXNet kvstore on devices: every gradient is reduced by itself",
            bucket_bytes=0.0,
        ),
    )
}


def get(name: str) -> Synchronisation:
    """The synchronisation called `name`."""
    if name not in SYNCHRONISATIONS:
        raise UnknownName("synchronisation", name, SYNCHRONISATIONS, f"known: {', '.join(SYNCHRONISATIONS)}")
    return SYNCHRONISATIONS[name]


# -- sent less, later, or not waited for ------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Average:
    """Where a way of averaging is defined, as "module:name": what predicts it (a function that returns a
    `Way`) and what trains it (a `Strategy`). Neither is imported here.
    """

    way: str
    strategy: str


#: ways to average gradients every step, by their word in a plan
AVERAGE: Mapping[str, Average] = {
    # all-reduce
    "allreduce": Average(
        way="paceline.sync.way:usual", strategy="paceline.train.strategies.averaging:Averaging"
    ),
    # reduce-scatter under the backward pass and all-gather under the next forward pass, with activations and
    # errors in place of the gradients of fully connected layers (Lee et al. 2018)
    "overlap": Average(
        way="paceline.sync.overlapped:overlapped", strategy="paceline.train.strategies.overlap:Overlap"
    ),
    # what the next pass needs first, first
    "priority": Average(
        way="paceline.sync.overlapped:prioritised", strategy="paceline.train.strategies.priority:Priority"
    ),
}
#: their words, with those that were registered from outside
AVERAGES = list(AVERAGE)


_SERVED = (Mode.PS_SYNC, Mode.PS_ASYNC, Mode.PS_BOUNDED, Mode.PS_BACKUP, Mode.EASGD)
_ISLANDS = (Mode.LOCAL_SGD, Mode.DILOCO)
#: settings of a relaxation -> the modes that have them
SETTINGS: Mapping[str, tuple[Mode, ...]] = {
    "period": (*_ISLANDS, Mode.EASGD, Mode.GOSSIP),
    "island": _ISLANDS,
    "servers": _SERVED,
    "staleness": (Mode.PS_BOUNDED,),
    "backup": (Mode.PS_BACKUP,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """What a plan sends less of, later, or without waiting; 0 or empty: the usual."""

    compress: str = ""
    #: share of the elements that top-k and DGC send, and rank of PowerSGD's factors
    ratio: float = 0.0
    rank: int = 0
    average: str = "allreduce"
    mode: Mode = Mode.REPLICAS
    #: steps from one exchange to the next
    period: int = 0
    #: devices that average every step, where islands of them exchange once in a period
    island: int = 0
    #: hosts that keep the parameters, each with the network of a node
    servers: int = 0
    #: updates that a worker may be ahead of the slowest (ps-bounded)
    staleness: int = 0
    #: workers whose gradients a step does not wait for (ps-backup)
    backup: int = 0

    def __post_init__(self) -> None:
        if type(self.mode) is not Mode:
            object.__setattr__(self, "mode", member(Mode, "plan: mode", self.mode))

    @property
    def plain(self) -> bool:
        """Whether gradients are averaged in full, every step, by all-reduce."""
        return self == PLAIN

    @property
    def every(self) -> int:
        """Steps from one exchange to the next."""
        return self.period or self.defaults.period

    @property
    def defaults(self) -> Defaults:
        """What this way does where the plan does not say."""
        if self.mode is not Mode.REPLICAS:
            return defaults.DEFAULTS.get(self.mode, defaults.PLAIN)
        return defaults.ENGINE if self.compress else defaults.PLAIN

    def filled(self, replicas: int) -> Relaxation:
        """The same with its way's period, bound and backups, for so many replicas."""
        usual = self.defaults
        return replace(
            self,
            period=self.period or (usual.period if usual.period > 1 else 0),
            staleness=self.staleness or usual.staleness,
            backup=self.backup or min(usual.backup, replicas - 1),
        )

    @property
    def scheme(self) -> Scheme:
        """How gradients are compressed, with the plan's settings; float32 where they are not."""
        settings = {"ratio": self.ratio, "rank": self.rank}
        return from_dict(
            {"name": self.compress or "fp32", **{key: value for key, value in settings.items() if value}}
        )

    @property
    def label(self) -> str:
        """What it is called in a table."""
        return self.compress or (self.mode if self.mode is not Mode.REPLICAS else self.average)

    def __str__(self) -> str:
        """The words of a plan that `read_relaxation` reads."""
        # alone these two would be the precision of the step
        key = "compress=" if self.compress in ("fp16", "bf16") else ""
        words = [f"{key}{self.compress}"] if self.compress else []
        words += [self.average] * (self.average != "allreduce") + [self.mode] * (
            self.mode is not Mode.REPLICAS
        )
        words += [f"ratio={self.ratio:g}"] * (self.ratio > 0)
        return " ".join(
            [*words, *(f"{name}={value}" for name in RELAXED_SIZES if (value := getattr(self, name)))]
        )


#: in full, every step
PLAIN = Relaxation()
RELAXED_SIZES = ("rank", "period", "island", "servers", "staleness", "backup")
#: every word and key of a relaxation, for messages
RELAXED_KEYS = tuple(field.name for field in fields(Relaxation))
#: these are words of a precision or mean nothing by themselves: `compress=fp16`, `mode=replicas`
_WITH_THEIR_KEY = ("fp16", "bf16", "replicas")


def register_average(name: str) -> None:
    """Makes `name` a word of a plan: gradients are averaged every step, in a way of its own. What it costs is
    registered with `paceline.sync`, what runs it with `paceline.train.strategies`.
    """
    if not name:
        raise SpecError("a way of averaging is registered by its name; give it one")
    taken = {*compressions(), *Mode}
    if name in taken:
        raise SpecError(f"way of averaging {name!r} is a word of a plan already; choose another name")
    if name not in AVERAGES:
        AVERAGES.append(name)


def compressions() -> tuple[str, ...]:
    """What a gradient may become before it is sent: the schemes of `spec.compression` that are registered."""
    return tuple(name for name in SCHEMES if name != "fp32")


def relaxed_words() -> tuple[str, ...]:
    """Every word of a relaxation that a plan takes without its key."""
    words = (word for choices in _choices().values() for word in choices)
    return tuple(dict.fromkeys(word for word in words if word not in _WITH_THEIR_KEY))


def _choices() -> dict[str, tuple[str, ...]]:
    return {"compress": compressions(), "average": tuple(AVERAGES), "mode": tuple(Mode)}


def read_relaxation(key: str, value: str | None) -> Iterator[tuple[str, Any]]:
    """(field of a Relaxation, what it becomes) for one word of a plan; nothing where the word is not of its
    kind.
    """
    choices = _choices()
    if value is None:
        alone = key not in _WITH_THEIR_KEY
        yield from ((name, key) for name, words in choices.items() if alone and key in words)
    elif key in choices:
        if value not in (*choices[key], "none"):
            raise PlanError(f"plan: {key}={value}: expected one of {', '.join(choices[key])}")
        yield key, value if value != "none" else getattr(PLAIN, key)
    elif key in RELAXED_SIZES:
        if not value.isdigit() or int(value) < 1:
            raise PlanError(f"plan: {key} must be a whole number of 1 or more, got {value!r}")
        yield key, int(value)
    elif key == "ratio":
        try:
            share = units.parse(value, "fraction")
        except UnitError as error:
            raise PlanError(f"plan: ratio: {error}") from None
        if not 0 < share <= 1:
            raise PlanError(f"plan: ratio is a share above 0 and up to 1, got {value!r}")
        yield key, share
