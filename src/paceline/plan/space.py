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
from paceline.plan import evidence
from paceline.spec import schedules
from paceline.spec.cluster import Cluster
from paceline.spec.device import Device
from paceline.spec.plan import Plan, divisors, problems, resolve
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
#: whose kernels run, with the pipeline schedules and the shardings that they can be had with
FAMILIES: dict[str, tuple[Collection[str], Collection[Sharding]]] = {
    "megatron-core": (("1f1b", "interleaved"), (Sharding.NONE, Sharding.DDP, Sharding.ZERO1, Sharding.ZERO2)),
    "torch-compile": (SCHEDULES, (Sharding.NONE, Sharding.DDP, Sharding.FSDP, Sharding.HSDP)),
}
#: what may change the result of training; left out unless it is allowed
LOSSY = {"fp8": {"precision": Precision.FP8}}
#: fields that may be forbidden altogether, which leaves their usual values
WHOLE = ("tp", "pp", "cp", "ep", "vpp", "sp", "recompute", "offload", "context")


@dataclass(frozen=True)
class Degrees:
    """Degrees of a plan."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    dp: int = 1


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
#: fields of a plan whose values the search chooses, or takes as fixed: a plan of the space has what was fixed
#: of them
SEARCHED = frozenset(f.name for part in PARTS for f in fields(part))
#: fields that the search does not know -> what to do instead
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
        each = (np.array([not evidence.unmeasured(vars(part)) for part in parts]) for parts in self.choices)
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
    #: fields that have their usual value because everything else was forbidden
    plain: frozenset[str] = frozenset()
    allowed: frozenset[str] = frozenset()

    @staticmethod
    def of(
        fix: Sequence[str] = (),
        forbid: Sequence[str] = (),
        allow: Sequence[str] = (),
        *,
        searched: frozenset[str] = SEARCHED,
        refused: Mapping[str, str] = REFUSED,
        lossy: Collection[str] = LOSSY.keys(),
    ) -> Limits:
        """From words as a plan has them: fix ("tp=8", "fsdp"), forbid ("offload", "zb-v", "recompute=full"),
        allow (one of `lossy`, such as "fp8").

        A fixed field that is not `searched` raises PlanError, with what `refused` says to do instead.
        """
        for word in allow:
            if word not in lossy:
                raise PlanError(f"--allow {word}: {meant(word, lossy)}")
        fixed = _fixed(fix, searched, refused)
        whole = frozenset(forbid) & {*WHOLE}
        forbidden = frozenset(
            item for word in forbid if word not in whole for item in Plan.said(word).items()
        )
        limits = Limits(forbidden=forbidden, plain=whole, allowed=frozenset(allow))
        both = next((name for name, value in fixed.items() if not limits.keep({name: value})), None)
        if both:
            raise PlanError(f"{both} is both fixed and forbidden")
        return replace(limits, fixed=fixed)

    def keep(self, choice: Mapping[str, Any], unused: Collection[str] = ()) -> bool:
        """Whether the fields of a choice are what the user wants.

        `unused` are those that have no effect beside the others: one that is fixed to an unusual value wants
        another choice.
        """
        if any(self.fixed.get(name, value) != value for name, value in choice.items()):
            return False
        used = [(name, value) for name, value in choice.items() if name not in unused]
        return self.forbidden.isdisjoint(used) and all(
            value == getattr(Plan, name) for name, value in used if name in self.plain
        )

    def parts(self, parts: Iterable[T]) -> tuple[T, ...]:
        """Those parts of plans that remain."""
        return tuple(part for part in parts if self.keep(vars(part)))

    def among(self, name: str, values: Iterable[Any]) -> list[Any]:
        """The values of one field that remain."""
        return [value for value in values if self.keep({name: value})]

    def tried(self, name: str, values: Iterable[Any]) -> list[Any]:
        """The values to try of a field: what the user fixed, though it is none of the usual ones."""
        return [self.fixed[name]] if name in self.fixed else list(values)

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


def _fixed(fix: Sequence[str], searched: Collection[str], refused: Mapping[str, str]) -> dict[str, Any]:
    """The fields that words fix."""
    fixed = Plan.said(" ".join(fix))
    for name, value in fixed.items():
        if name not in searched and value != getattr(Plan, name):
            why = refused.get(name, "no plan of this search has it")
            raise PlanError(f"--fix {spell(name, value)}: {why}")
    return fixed


def spell(name: str, value: Any) -> str:
    """A field with its value, as a plan is written."""
    if name == "relax":
        return str(value) or "allreduce"
    if isinstance(value, bool):
        return name if value else f"no-{name}"
    return f"bucket={value / 1e6:g}MB" if name == "bucket_bytes" else f"{name}={value}"


def states(limits: Limits, shardings: Iterable[Sharding], **tried: Collection[Any]) -> Iterator[StateOptions]:
    """What ranks may share: of each sharding, all values that are tried of the fields that have an effect
    under it; of the others the usual one, or the one that is fixed.
    """
    for sharding in shardings:
        unused = UNUSED[sharding]
        free: dict[str, Collection[Any]] = {
            name: limits.tried(name, [usual]) for name, usual in _USUAL.items()
        } | tried
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
        adapters = bool(self.limits.fixed.get("adapters", False))
        if not self.limits.keep({"gbs": self.gbs, "seq": self.seq, "adapters": adapters}):
            return ()
        return tuple(
            block for cluster in self.clusters for block in self._of(cluster, adapters) if len(block)
        )

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

    def _of(self, cluster: Cluster, adapters: bool) -> Iterator[Block]:
        precisions, families = self._precisions(cluster), self._families()
        for mesh in self._meshes(cluster.device_count):
            states = self._states(mesh, cluster)
            sizes = self.limits.among("mbs", divisors(self.gbs // mesh.dp))
            for mbs, precision, (framework, family) in product(sizes, precisions, families):
                batch = Batch(mbs, self.gbs, self.seq)
                yield Block(
                    cluster,
                    mesh,
                    batch,
                    Kernels(precision, framework, adapters),
                    self._shapes(mesh, mbs),
                    self._orders(mesh, batch, framework, family[0]),
                    tuple(state for state in states if state.sharding in family[1]),
                )

    def _families(self) -> Iterable[tuple[str, tuple[Collection[str], Collection[Sharding]]]]:
        """Frameworks to choose from: those above, or the one that is given, which takes everything."""
        if "framework" not in self.limits.fixed:
            return [(name, FAMILIES[name]) for name in self.limits.among("framework", FAMILIES)]
        given = frameworks.get(self.limits.fixed["framework"]).name
        return [(given, FAMILIES.get(given, (SCHEDULES, tuple(Sharding))))]

    def _precisions(self, cluster: Cluster) -> list[Precision]:
        """The usual one of a device, or the fixed one; and fp8 where it is allowed."""
        usual = usual_precision(cluster.device)
        lossy = [Precision.FP8] if "fp8" in self.limits.allowed else []
        return self.limits.among("precision", [*self.limits.tried("precision", [usual]), *lossy])

    def _meshes(self, devices: int) -> Iterator[Degrees]:
        m = self.model
        for tp, cp, pp in product(divisors(devices), repeat=3):
            dp, rest = divmod(devices, tp * cp * pp)
            divides = not rest and m.heads % tp == m.ffn % tp == self.gbs % dp == 0
            if divides and pp <= m.layers and self._worth(cp):
                spread = [d for d in divisors(dp * cp * tp) if m.experts and m.experts % d == 0]
                yield from self.limits.parts(Degrees(tp, cp, ep, pp, dp) for ep in spread or [1])

    def _worth(self, cp: int) -> bool:
        """Whether a context-parallel degree leaves work to hide the exchange behind, or was asked for."""
        enough = cp == 1 or self.seq // cp >= FEWEST_TOKENS or "cp" in self.limits.fixed
        return enough and self.seq % cp == 0

    def _shapes(self, mesh: Degrees, mbs: int) -> tuple[LayerOptions, ...]:
        """Sequence parallel or not, what is recomputed, and how context is exchanged."""
        even = mesh.tp > 1 and (self.seq // mesh.cp * mbs) % mesh.tp == 0
        exchanged = mesh.cp > 1 and self.model.heads % (mesh.cp * mesh.tp) == 0
        sequence, contexts = (False, True)[: 1 + even], tuple(ContextExchange)[: 1 + exchanged]
        return self.limits.parts(LayerOptions(*words) for words in product(sequence, Recompute, contexts))

    def _orders(
        self, mesh: Degrees, batch: Batch, framework: str, allowed: Collection[str]
    ) -> tuple[PassOrder, ...]:
        """Pipeline schedules with their chunks."""
        layers = self.model.layers

        def runs(order: PassOrder) -> bool:
            schedule, plan = schedules.get(order.schedule), plan_of(mesh, batch, order, framework=framework)
            chunks = mesh.pp * schedule.chunks_per_rank(order.vpp)
            return chunks <= layers and not any(problems(plan, plan.ranks, self.model))

        names = [name for name in SCHEDULES if name in allowed] if mesh.pp > 1 else [""]
        several = divisors(layers // mesh.pp)[1:]
        orders = (
            PassOrder(name, vpp)
            for name in names
            for vpp in (several if schedules.get(name).chunked else [1])
        )
        return tuple(order for order in self.limits.parts(orders) if runs(order))

    def _states(self, mesh: Degrees, cluster: Cluster) -> list[StateOptions]:
        """What data-parallel ranks share, in what pieces, and what is kept in the host's memory."""
        several = mesh.dp * mesh.cp > 1
        found = states(
            self.limits,
            [sharding for sharding in Sharding if several != (sharding is Sharding.NONE)],
            shard=self._shards(mesh, cluster),
            bucket_bytes=self.limits.tried("bucket_bytes", BUCKETS),
            reshard=(True, False),
            prefetch=self.limits.tried("prefetch", PREFETCH),
            offload=tuple(Offload),
        )
        return list(found)

    def _shards(self, mesh: Degrees, cluster: Cluster) -> list[int]:
        """Devices that share one copy under HSDP: those of the innermost domain, twice and four times as
        many, or what is fixed.
        """
        inside = cluster.domain(0) // (mesh.tp * mesh.cp) if cluster.tiers else 1
        wanted = self.limits.tried("shard", (inside, 2 * inside, 4 * inside))
        return sorted({d for d in divisors(mesh.dp) if 1 < d < mesh.dp and d in wanted})
