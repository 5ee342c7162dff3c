"""The space of plans: every combination of degrees, batch, schedule, sharding and options that a model can
run in on a cluster.

The space is a list of blocks. A block fixes the mesh, the batch and whose kernels run; its plans are the
product of three short lists: how a layer computes (`shapes`), how passes are ordered (`orders`), how state is
shared (`states`). What a plan costs factors the same way, so that a block of hundreds of plans is a few small
arrays.

The parts of a plan are frozen dataclasses whose fields are named as those of `Plan`: they are put together
into a plan, and into the keys of `plan.table`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, reduce
from itertools import product
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.catalog import frameworks
from paceline.errors import PlanError, meant
from paceline.plan.evidence import unmeasured
from paceline.spec.cluster import Cluster
from paceline.spec.device import Device
from paceline.spec.plan import SHARED, SPREAD, Degrees, Plan, divisors, meshes, problems, resolve
from paceline.spec.schedules import SCHEDULES
from paceline.spec.transformer import Transformer
from paceline.spec.vocabulary import ContextExchange, Offload, Precision, Recompute, Sharding

T = TypeVar("T")
#: tokens of a sample that a context-parallel rank has at least: less leaves no work to hide the exchange
#: behind
FEWEST_TOKENS = 1024
#: bytes of gradients that are reduced at once: the framework's own rule, and two larger sizes
BUCKETS = (Plan.bucket_bytes, 100e6, 400e6)
#: layers whose parameters are gathered ahead
PREFETCH = (1, 2)
#: field of a plan -> its values, where not all can be had
Family = dict[str, Collection[str]]
#: whose kernels run -> what can be had with them
FAMILIES: dict[str, Family] = {
    "megatron-core": {
        "schedule": ("1f1b", "interleaved"),
        "sharding": (Sharding.NONE, Sharding.DDP, Sharding.ZERO1, Sharding.ZERO2),
    },
    "torch-compile": {"sharding": (Sharding.NONE, Sharding.DDP, Sharding.FSDP, Sharding.HSDP)},
}
#: precisions that may change the result of training; left out unless they are allowed
LOSSY = (Precision.FP8,)
#: fields that may be forbidden altogether, which leaves their usual values
WHOLE = (*SPREAD, *SHARED, "vpp", "sp", "recompute", "offload", "context")


@dataclass(frozen=True)
class Batch:
    """Samples of a micro-batch and of a step, and tokens of a sample."""

    mbs: int
    gbs: int
    seq: int


@dataclass(frozen=True)
class Kernels:
    """Whose kernels run, in which precision, and whether only adapters are trained."""

    precision: Precision
    framework: str
    adapters: bool


@dataclass(frozen=True)
class LayerOptions:
    """How a layer computes."""

    sp: bool
    recompute: Recompute
    context: ContextExchange


@dataclass(frozen=True)
class PassOrder:
    """How the passes of a pipeline are ordered."""

    schedule: str
    vpp: int


@dataclass(frozen=True)
class StateOptions:
    """What data-parallel ranks share, in what pieces, and what is kept in the host's memory."""

    sharding: Sharding
    shard: int = Plan.shard
    bucket_bytes: float = Plan.bucket_bytes
    reshard: bool = Plan.reshard
    prefetch: int = Plan.prefetch
    offload: Offload = Plan.offload


#: sharding -> fields of a state that have no effect under it
UNUSED: dict[Sharding, tuple[str, ...]] = {
    **dict.fromkeys(Sharding, ("shard", "reshard", "prefetch")),
    Sharding.NONE: ("shard", "bucket_bytes", "reshard", "prefetch"),
    Sharding.FSDP: ("shard", "bucket_bytes"),
    Sharding.HSDP: ("bucket_bytes",),
}
#: usual values of the fields of a state
_USUAL: dict[str, Any] = {f.name: f.default for f in fields(StateOptions)[1:]}
PARTS = (Degrees, Batch, Kernels, LayerOptions, PassOrder, StateOptions)
#: fields of a plan that are in none of these -> what to do instead
REFUSED = {
    "relax": (
        "plans of transformers are searched with gradients averaged in full, every step; `paceline compare"
        " MODEL --cluster C` ranks the other ways, `paceline predict MODEL --cluster C --plan ...`"
        " predicts one"
    )
}


def plan_of(*parts: Any, **more: Any) -> Plan:
    """The plan that has the fields of some parts: without a batch one micro-batch, and otherwise usual."""
    for part in parts:
        more |= vars(part)
    dp, mbs = more.setdefault("dp", 1), more.setdefault("mbs", 1)
    return Plan(**{"gbs": dp * mbs, **more})


@dataclass(frozen=True)
class Block:
    """Plans that differ in a shape, an order and a state only."""

    cluster: Cluster
    mesh: Degrees
    batch: Batch
    kernels: Kernels
    shapes: tuple[LayerOptions, ...]
    orders: tuple[PassOrder, ...]
    states: tuple[StateOptions, ...]

    @property
    def choices(self) -> tuple[Sequence[Any], ...]:
        """Of what a plan has one each."""
        return self.shapes, self.orders, self.states

    def __len__(self) -> int:
        return math.prod(map(len, self.choices))

    def plan(self, index: int) -> Plan:
        """The plan at a place of the block's array (shapes x orders x states, the last one fastest)."""
        places = map(int, np.unravel_index(index, [*map(len, self.choices)]))
        chosen = [choice[place] for choice, place in zip(self.choices, places, strict=True)]
        return plan_of(self.mesh, self.batch, self.kernels, *chosen)

    @property
    def measured(self) -> NDArray[np.bool_]:
        """Of each plan, whether it has only features that were ever measured: (shapes, orders, states)."""
        each = (np.array([not unmeasured(vars(part)) for part in parts]) for parts in self.choices)
        return reduce(np.logical_and.outer, each)

    @property
    def micro_batches(self) -> int:
        return self.batch.gbs // (self.mesh.dp * self.batch.mbs)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the user fixes, forbids and allows."""

    #: field of a plan -> its only value
    fixed: Mapping[str, Any] = field(default_factory=dict)
    #: (field, value) that no plan may have
    forbidden: frozenset[tuple[str, Any]] = frozenset()
    allowed: frozenset[str] = frozenset()

    @staticmethod
    def of(
        fix: Sequence[str] = (),
        forbid: Sequence[str] = (),
        allow: Sequence[str] = (),
        *,
        refused: Mapping[str, str] = REFUSED,
        lossy: Collection[str] = LOSSY,
    ) -> Limits:
        """From words as a plan has them: fix ("tp=8", "fsdp"), forbid ("offload", "zb-v", "recompute=full"),
        allow (one of `lossy`, such as "fp8").

        A fixed field that is `refused` raises PlanError, with what to do instead.
        """
        for word in allow:
            if word not in lossy:
                raise PlanError(f"--allow {word}: {meant(word, lossy)}")
        usual = {word: getattr(Plan, word) for word in forbid if word in WHOLE}
        words = [item for word in forbid if word not in usual for item in Plan.said(word).items()]
        limits = Limits(fixed=usual, forbidden=frozenset(words), allowed=frozenset(allow))
        return limits.fixing(Plan.said(" ".join(fix)), refused)

    def fixing(self, fixed: Mapping[str, Any], refused: Mapping[str, str]) -> Limits:
        """The same with more that is fixed."""
        for name, value in fixed.items():
            if name in refused and value != getattr(Plan, name):
                raise PlanError(f"--fix {spell(name, value)}: {refused[name]}")
            if not self.keep({name: value}):
                raise PlanError(f"{name} is both fixed and forbidden")
        return replace(self, fixed={**self.fixed, **fixed})

    def keep(self, choice: Mapping[str, Any], unused: Collection[str] = ()) -> bool:
        """Whether the fields of a choice are what the user wants.

        `unused` are those that have no effect beside the others: one that is fixed to an unusual value wants
        another choice.
        """
        used = ((name, value) for name, value in choice.items() if name not in unused)
        wanted = all(self.fixed.get(name, value) == value for name, value in choice.items())
        return wanted and self.forbidden.isdisjoint(used)

    def tried(self, name: str, values: Iterable[Any]) -> list[Any]:
        """The values to try of a field: the usual ones that are not forbidden, or what the user fixed
        though it is none of them.
        """
        if name in self.fixed:
            return [self.fixed[name]]
        return [value for value in values if (name, value) not in self.forbidden]

    def settled(self, name: str, given: int | None, flag: str) -> int:
        """The batch or the sequence: as its own argument says, or as a fixed word does; 0 where neither
        does.
        """
        word = int(self.fixed.get(name, 0))
        if given and word and given != word:
            raise PlanError(
                f"{name} is given twice: {flag} {given} and --fix {name}={word}; leave one of them out"
            )
        return given or word

    @property
    def words(self) -> str:
        """What is fixed, as words of a plan, in brackets; nothing where nothing is."""
        said = " ".join(spell(name, value) for name, value in self.fixed.items())
        return f" ({said})" if said else ""


def spell(name: str, value: Any) -> str:
    """A field with its value, as a plan is written."""
    if name == "relax":
        return str(value) or "allreduce"
    if isinstance(value, bool):
        return name if value else f"no-{name}"
    return f"bucket={value / 1e6:g}MB" if name == "bucket_bytes" else f"{name}={value}"


def states(limits: Limits, shardings: Iterable[Sharding], **tried: list[Any]) -> Iterator[StateOptions]:
    """What ranks may share: of each sharding, all values that are tried of the fields that have an effect
    under it; of the others the usual one, or the one that is fixed.
    """
    for sharding in shardings:
        unused = UNUSED[sharding]
        free = {name: limits.tried(name, [usual]) for name, usual in _USUAL.items()} | tried
        values = [[usual] if name in unused else free[name] for name, usual in _USUAL.items()]
        found = (StateOptions(sharding, *words) for words in product(*values))
        yield from (state for state in found if limits.keep(vars(state), unused))


def usual_precision(device: Device) -> Precision:
    """Half the bits of fp32 where the matrix units of a device take them."""
    return next((p for p in (Precision.BF16, Precision.FP16) if p in device.peak_flops), Precision.FP32)


@dataclass(frozen=True)
class Space:
    """All plans for a model and a batch on one or several clusters."""

    model: Transformer
    clusters: tuple[Cluster, ...]
    gbs: int
    seq: int
    limits: Limits

    def __len__(self) -> int:
        return sum(map(len, self.blocks))

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        if not self.limits.keep({"gbs": self.gbs, "seq": self.seq}):
            return ()
        return tuple(block for cluster in self.clusters for block in self._of(cluster) if len(block))

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum([*map(len, self.blocks)])

    def at(self, place: int) -> tuple[Cluster, Plan]:
        """The plan at a place of all blocks one after another, and its cluster."""
        i = int(np.searchsorted(self._ends, place, side="right"))
        block = self.blocks[i]
        return block.cluster, block.plan(place - int(self._ends[i]) + len(block))

    @property
    def measured(self) -> NDArray[np.bool_]:
        """Of each plan, whether it has only features that were ever measured."""
        return np.concatenate([block.measured.ravel() for block in self.blocks])

    def why_empty(self) -> str:
        """What keeps every plan out, in one line."""
        devices = self.clusters[0].device_count
        try:
            resolve(Plan(**{"gbs": self.gbs, "seq": self.seq, **self.limits.fixed}), devices, self.model)
        except PlanError as error:
            return str(error)
        return (
            f"no plan for gbs {self.gbs} on {devices} devices is left by what is fixed{self.limits.words} and"
            " forbidden"
        )

    def _of(self, cluster: Cluster) -> Iterator[Block]:
        precisions, families = self._precisions(cluster), self._families()
        adapters = bool(self.limits.fixed.get("adapters", False))
        for mesh in self._meshes(cluster.device_count):
            states = self._states(mesh, cluster)
            sizes = self.limits.tried("mbs", divisors(self.gbs // mesh.dp))
            for mbs, precision, (framework, has) in product(sizes, precisions, families.items()):
                batch = Batch(mbs, self.gbs, self.seq)
                yield Block(
                    cluster,
                    mesh,
                    batch,
                    Kernels(precision, framework, adapters),
                    self._shapes(mesh, batch),
                    self._orders(mesh, batch, framework),
                    tuple(state for state in states if state.sharding in has.get("sharding", Sharding)),
                )

    def _families(self) -> dict[str, Family]:
        """Frameworks to choose from: those above, or the one that is fixed, which takes everything."""
        names = (frameworks.get(name).name for name in self.limits.tried("framework", FAMILIES))
        return {name: FAMILIES.get(name, {}) for name in names}

    def _precisions(self, cluster: Cluster) -> list[Precision]:
        """The usual one of a device, and those that are allowed; or the fixed one."""
        lossy = [precision for precision in LOSSY if precision in self.limits.allowed]
        return self.limits.tried("precision", [usual_precision(cluster.device), *lossy])

    def _running(self, parts: Iterable[T], *beside: Any, **words: Any) -> tuple[T, ...]:
        """Those of some parts of plans that the limits leave, and that nothing keeps from running beside
        others.
        """
        plans = ((part, plan_of(*beside, part, **words)) for part in parts if self.limits.keep(vars(part)))
        return tuple(part for part, plan in plans if not any(problems(plan, plan.ranks, self.model)))

    def _meshes(self, devices: int) -> tuple[Degrees, ...]:
        """Degrees whose ranks are all devices."""
        found = (mesh for mesh in meshes(devices) if self._worth(mesh.cp))
        return self._running(found, gbs=self.gbs, seq=self.seq)

    def _worth(self, cp: int) -> bool:
        """Whether a context-parallel degree leaves work to hide the exchange behind, or was asked for."""
        return cp == 1 or self.seq // cp >= FEWEST_TOKENS or "cp" in self.limits.fixed

    def _shapes(self, mesh: Degrees, batch: Batch) -> tuple[LayerOptions, ...]:
        """Sequence parallel or not, what is recomputed, and how context is exchanged."""
        sequence = (False, True) if mesh.tp > 1 else (False,)
        contexts = ContextExchange if mesh.cp > 1 else (Plan.context,)
        shapes = (LayerOptions(*words) for words in product(sequence, Recompute, contexts))
        return self._running(shapes, mesh, batch)

    def _orders(self, mesh: Degrees, batch: Batch, framework: str) -> tuple[PassOrder, ...]:
        """Pipeline schedules with their chunks."""
        has = FAMILIES.get(framework, {}).get("schedule", SCHEDULES)
        each = self.model.layers // mesh.pp  # layers of a stage: at least one in each chunk
        orders = (
            PassOrder(name, vpp)
            for name, schedule in SCHEDULES.items()
            if name in has
            for vpp in (divisors(each)[1:] if schedule.chunked else [1])
            if schedule.chunks_per_rank(vpp) <= each
        )
        return self._running(orders if mesh.pp > 1 else [PassOrder("", 1)], mesh, batch, framework=framework)

    def _states(self, mesh: Degrees, cluster: Cluster) -> list[StateOptions]:
        """What data-parallel ranks share, in what pieces, and what is kept in the host's memory."""
        several = plan_of(mesh).replicas > 1
        # devices that share one copy under hsdp: those of the innermost domain, twice and four times as many
        inside = cluster.domain(0) // (mesh.tp * mesh.cp) if cluster.tiers else 1
        wanted = self.limits.tried("shard", (inside, 2 * inside, 4 * inside))
        found = states(
            self.limits,
            [sharding for sharding in Sharding if several != (sharding is Sharding.NONE)],
            shard=[d for d in divisors(mesh.dp) if 1 < d < mesh.dp and d in wanted],
            bucket_bytes=self.limits.tried("bucket_bytes", BUCKETS),
            reshard=[True, False],
            prefetch=self.limits.tried("prefetch", PREFETCH),
            offload=[*Offload],
        )
        return list(found)
