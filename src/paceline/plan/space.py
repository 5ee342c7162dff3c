"""The space of plans: every combination of degrees, batch, schedule, sharding and options that a model can
run in on a cluster.

The space is a list of blocks. A block fixes the mesh, the micro-batch and whose kernels run; its plans are
the product of three short lists: how a layer computes (`shapes`), how passes are ordered (`orders`), how
state is shared (`states`). What a plan costs factors the same way, so that a block of hundreds of plans is a
few small arrays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.catalog import frameworks
from paceline.errors import PlanError, nearest
from paceline.plan import evidence
from paceline.spec import schedules as orders
from paceline.spec.cluster import Cluster
from paceline.spec.plan import Plan, divisors, problems, resolve
from paceline.spec.schedules import SCHEDULES
from paceline.spec.transformer import Transformer
from paceline.spec.vocabulary import Offload, Recompute, Sharding

#: tokens of a sample that a context-parallel rank has at least: less leaves no work to hide the exchange
#: behind
FEWEST_TOKENS = 1024
#: bytes of gradients that are reduced at once: the framework's own rule, and two larger sizes
BUCKETS = (Plan.bucket_bytes, 100e6, 400e6)
#: layers whose parameters are gathered ahead
PREFETCH = (1, 2)
#: whose kernels run, with the pipeline schedules and the shardings that they can be had with
FAMILIES: dict[str, tuple[Collection[str], tuple[str, ...]]] = {
    "megatron-core": (("1f1b", "interleaved"), ("none", "ddp", "zero1", "zero2")),
    "torch-compile": (SCHEDULES, ("none", "ddp", "fsdp", "hsdp")),
}
#: what may change the result of training; left out unless it is allowed
LOSSY = {"fp8": {"precision": "fp8"}}
#: fields of a plan whose values the search chooses, or takes as fixed: a plan of the space has what was fixed
#: of them
SEARCHED = frozenset(
    {
        "dp",
        "tp",
        "pp",
        "cp",
        "ep",
        "mbs",
        "gbs",
        "seq",
        "precision",
        "adapters",
        "framework",
        "sp",
        "recompute",
        "context",
        "schedule",
        "vpp",
        "sharding",
        "shard",
        "reshard",
        "prefetch",
        "bucket_bytes",
        "offload",
    }
)
#: fields that the search does not know -> what to do instead
REFUSED = {
    "relax": (
        "plans of transformers are searched with gradients averaged in full, every step; `paceline compare"
        " MODEL --cluster C` ranks the other ways, `paceline predict MODEL --cluster C --plan ...`"
        " predicts one"
    )
}
#: field -> its value when a word such as "offload" or "pp" is forbidden altogether
_PLAIN = {
    "tp": 1,
    "pp": 1,
    "cp": 1,
    "ep": 1,
    "vpp": 1,
    "sp": False,
    "recompute": "none",
    "offload": "none",
    "context": "ring",
}
Choice = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Mesh:
    """Degrees of a plan."""

    tp: int
    cp: int
    ep: int
    pp: int
    dp: int


@dataclass(frozen=True)
class Block:
    """Plans that differ in a shape, an order and a state only."""

    cluster: Cluster
    mesh: Mesh
    common: Choice
    shapes: tuple[Choice, ...]
    orders: tuple[Choice, ...]
    states: tuple[Choice, ...]

    def __len__(self) -> int:
        return len(self.shapes) * len(self.orders) * len(self.states)

    def plan(self, index: int) -> Plan:
        """The plan at a place of the block's array (shapes x orders x states, the last one fastest)."""
        rest, state = divmod(index, len(self.states))
        shape, order = divmod(rest, len(self.orders))
        return self.of(self.shapes[shape], self.orders[order], self.states[state])

    def of(self, *choices: Choice) -> Plan:
        m = self.mesh
        merged: dict[str, Any] = {"tp": m.tp, "cp": m.cp, "ep": m.ep, "pp": m.pp, "dp": m.dp, **self.common}
        for choice in choices:
            merged |= choice
        return Plan(**merged)

    @property
    def alike(self) -> tuple[Any, ...]:
        """What blocks have in common whose layers are the same."""
        m, shapes = self.mesh, tuple(tuple(shape.values()) for shape in self.shapes)
        return self.cluster.name, m.tp, m.cp, m.ep, *self.common.values(), self.micro_batches > 1, shapes

    @property
    def measured(self) -> NDArray[np.bool_]:
        """Of each plan, whether it has only features that were ever measured: (shapes, orders, states)."""
        shapes, orders, states = (
            np.array([not evidence.unmeasured(choice) for choice in choices])
            for choices in (self.shapes, self.orders, self.states)
        )
        return np.asarray(shapes[:, None, None] & orders[None, :, None] & states[None, None, :])

    @property
    def micro_batches(self) -> int:
        return int(self.common["gbs"] // (self.mesh.dp * self.common["mbs"]))


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the user fixes, forbids and allows."""

    #: field of a plan -> its only value
    fixed: Choice = field(default_factory=dict)
    #: (field, value) that no plan may have
    forbidden: frozenset[tuple[str, Any]] = frozenset()
    #: field -> its only value because everything else was forbidden
    plain: Choice = field(default_factory=dict)
    allowed: frozenset[str] = frozenset()

    @staticmethod
    def of(
        fix: Sequence[str] = (),
        forbid: Sequence[str] = (),
        allow: Sequence[str] = (),
        *,
        searched: frozenset[str] = SEARCHED,
        refused: Mapping[str, str] = REFUSED,
    ) -> Limits:
        """From words as a plan has them: fix ("tp=8", "fsdp"), forbid ("offload", "zb-v", "recompute=full"),
        allow ("fp8").

        A fixed field that is not `searched` raises PlanError, with what `refused` says to do instead.
        """
        fixed = Plan.said(" ".join(fix))
        for name, value in fixed.items():
            if name not in searched and value != getattr(Plan, name):
                raise PlanError(
                    f"--fix {spell(name, value)}: {refused.get(name, 'no plan of this search has it')}"
                )
        plain: dict[str, Any] = {}
        forbidden: set[tuple[str, Any]] = set()
        for word in forbid:
            if word in _PLAIN:
                plain[word] = _PLAIN[word]
            else:
                forbidden |= {*Plan.said(word).items()}
        for word in allow:
            if word not in LOSSY:
                near = nearest(word, list(LOSSY))
                raise PlanError(
                    f"--allow {word}: "
                    + (f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(LOSSY)}")
                )
        both = {
            name
            for name in fixed
            if (name, fixed[name]) in forbidden or plain.get(name, fixed[name]) != fixed[name]
        }
        if both:
            raise PlanError(f"{both.pop()} is both fixed and forbidden")
        return Limits(fixed=fixed, forbidden=frozenset(forbidden), plain=plain, allowed=frozenset(allow))

    def keep(self, choice: Choice, unused: Iterable[str] = ()) -> bool:
        """Whether the fields of a choice are what the user wants.

        `unused` are fields that have no effect beside this choice: one that is fixed to an unusual value
        wants another choice.
        """
        usual = {name: getattr(Plan, name) for name in unused if name not in choice}
        if any(self.fixed.get(name, value) != value for name, value in {**usual, **choice}.items()):
            return False
        if any(self.plain.get(name, value) != value for name, value in choice.items()):
            return False
        return not any(item in self.forbidden for item in choice.items())

    def among(self, name: str, values: Iterable[Any]) -> list[Any]:
        """The values of one field that remain."""
        return [value for value in values if self.keep({name: value})]

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
        """What is fixed, as words of a plan."""
        return " ".join(spell(name, value) for name, value in self.fixed.items())


def spell(name: str, value: Any) -> str:
    """A field with its value, as a plan is written."""
    if name == "relax":
        return str(value) or "allreduce"
    if isinstance(value, bool):
        return name if value else f"no-{name}"
    return f"bucket={value / 1e6:g}MB" if name == "bucket_bytes" else f"{name}={value}"


@dataclass(frozen=True)
class Space:
    """All plans for a model and a batch on one or several clusters."""

    model: Transformer
    clusters: tuple[Cluster, ...]
    gbs: int
    seq: int
    limits: Limits

    def __len__(self) -> int:
        return sum(len(block) for block in self.blocks)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(block for cluster in self.clusters for block in self._of(cluster))

    def why_empty(self) -> str:
        """What keeps every plan out, in one line."""
        cluster = self.clusters[0]
        try:
            resolve(
                Plan(**{"gbs": self.gbs, "seq": self.seq, **self.limits.fixed}),
                cluster.device_count,
                self.model,
            )
        except PlanError as error:
            return str(error)
        said = f" ({self.limits.words})" if self.limits.fixed else ""
        return (
            f"no plan for gbs {self.gbs} on {cluster.device_count} devices is left by what is fixed{said} and"
            " forbidden"
        )

    def _of(self, cluster: Cluster) -> Iterator[Block]:
        precisions = self.limits.among(
            "precision", [*self._precision(cluster), *(["fp8"] if "fp8" in self.limits.allowed else [])]
        )
        asked = {"gbs": self.gbs, "seq": self.seq, "adapters": bool(self.limits.fixed.get("adapters", False))}
        if not self.limits.keep(asked):
            return
        for mesh in self._meshes(cluster.device_count):
            states = self._states(mesh, cluster)
            for mbs in self.limits.among("mbs", divisors(self.gbs // mesh.dp)):
                for precision in precisions:
                    common = {**asked, "mbs": mbs, "precision": precision}
                    for framework, (schedules, shardings) in self._families():
                        block = Block(
                            cluster,
                            mesh,
                            {**common, "framework": framework},
                            tuple(self._shapes(mesh, mbs)),
                            tuple(
                                order
                                for order in self._orders(mesh, mbs, framework)
                                if order["schedule"] in ("", *schedules)
                            ),
                            tuple(state for state in states if state["sharding"] in shardings),
                        )
                        if len(block):
                            yield block

    def _families(self) -> Iterable[tuple[str, tuple[Collection[str], tuple[str, ...]]]]:
        """Frameworks to choose from: those above, or the one that is given, which takes everything."""
        if "framework" not in self.limits.fixed:
            return [(name, FAMILIES[name]) for name in self.limits.among("framework", FAMILIES)]
        given = frameworks.get(self.limits.fixed["framework"]).name
        return [(given, FAMILIES.get(given, (SCHEDULES, tuple(Sharding))))]

    def _precision(self, cluster: Cluster) -> list[str]:
        """The usual one of a device: half the bits where its matrix units take them."""
        if "precision" in self.limits.fixed:
            return [self.limits.fixed["precision"]]
        return [next((p for p in ("bf16", "fp16") if p in cluster.device.peak_flops), "fp32")]

    def _meshes(self, devices: int) -> Iterator[Mesh]:
        m, among = self.model, self.limits.among
        for tp in among("tp", [d for d in divisors(devices) if m.heads % d == 0 and m.ffn % d == 0]):
            for cp in among(
                "cp", [d for d in divisors(devices // tp) if self.seq % d == 0 and self._worth(d)]
            ):
                for pp in among("pp", [d for d in divisors(devices // tp // cp) if d <= m.layers]):
                    dp = devices // (tp * cp * pp)
                    if self.gbs % dp or not among("dp", [dp]):
                        continue
                    for ep in among(
                        "ep", [d for d in divisors(dp * cp * tp) if m.experts and m.experts % d == 0] or [1]
                    ):
                        yield Mesh(tp, cp, ep, pp, dp)

    def _worth(self, cp: int) -> bool:
        """Whether a context-parallel degree leaves work to hide the exchange behind, or was asked for."""
        return cp == 1 or self.seq // cp >= FEWEST_TOKENS or "cp" in self.limits.fixed

    def _shapes(self, mesh: Mesh, mbs: int) -> Iterator[Choice]:
        """Sequence parallel or not, what is recomputed, and how context is exchanged."""
        even = (self.seq // mesh.cp * mbs) % mesh.tp == 0
        for sp in (False, True) if mesh.tp > 1 and even else (False,):
            for recompute in Recompute:
                for context in (
                    ("ring", "all-to-all")
                    if mesh.cp > 1 and self.model.heads % (mesh.cp * mesh.tp) == 0
                    else ("ring",)
                ):
                    choice = {"sp": sp, "recompute": recompute, "context": context}
                    if self.limits.keep(choice):
                        yield choice

    def _orders(self, mesh: Mesh, mbs: int, framework: str) -> Iterator[Choice]:
        """Pipeline schedules with their chunks."""
        plan = Plan(
            tp=mesh.tp,
            cp=mesh.cp,
            pp=mesh.pp,
            dp=mesh.dp,
            mbs=mbs,
            gbs=self.gbs,
            seq=self.seq,
            framework=framework,
        )
        for schedule in SCHEDULES if mesh.pp > 1 else ("",):
            per_stage = self.model.layers // mesh.pp
            chunks = [v for v in divisors(per_stage) if v > 1] if orders.get(schedule).chunked else [1]
            for vpp in chunks:
                choice = {"schedule": schedule, "vpp": vpp}
                whole = mesh.pp * orders.get(schedule).chunks_per_rank(vpp) <= self.model.layers
                if (
                    whole
                    and self.limits.keep(choice)
                    and not any(problems(_with(plan, choice), plan.ranks, self.model))
                ):
                    yield choice

    def _states(self, mesh: Mesh, cluster: Cluster) -> list[Choice]:
        """What data-parallel ranks share, in what pieces, and what is kept in the host's memory."""
        found: list[dict[str, Any]] = [{"sharding": "none"}]
        if mesh.dp * mesh.cp > 1:
            buckets = self._fixed_or("bucket_bytes", BUCKETS)
            found = [
                {"sharding": kind, "bucket_bytes": bucket}
                for kind in ("ddp", "zero1", "zero2")
                for bucket in buckets
            ]
            gathers = [
                {"reshard": reshard, "prefetch": prefetch}
                for reshard in (True, False)
                for prefetch in self._fixed_or("prefetch", PREFETCH)
            ]
            found += [{"sharding": "fsdp", **way} for way in gathers]
            found += [
                {"sharding": "hsdp", "shard": shard, **way}
                for shard in self._shards(mesh, cluster)
                for way in gathers
            ]
        choices = [{**state, "offload": offload} for state in found for offload in Offload]
        return [choice for choice in choices if self.limits.keep(choice, _STATE)]

    def _shards(self, mesh: Mesh, cluster: Cluster) -> list[int]:
        """Devices that share one copy under HSDP: those of the innermost domain, twice and four times as
        many, or what is fixed.
        """
        inside = cluster.domain(0) // (mesh.tp * mesh.cp) if cluster.tiers else 1
        wanted = self._fixed_or("shard", (inside, 2 * inside, 4 * inside))
        return sorted({d for d in divisors(mesh.dp) if 1 < d < mesh.dp and d in wanted})

    def _fixed_or(self, name: str, values: Sequence[Any]) -> Sequence[Any]:
        """The values to try of a field: what the user fixed, though it is none of the usual ones."""
        return (self.limits.fixed[name],) if name in self.limits.fixed else values


#: fields of a state; those that a state does not name have no effect under its sharding
_STATE = ("shard", "bucket_bytes", "reshard", "prefetch")


def _with(plan: Plan, choice: Choice) -> Plan:
    return Plan(**{**{f.name: getattr(plan, f.name) for f in fields(Plan)}, **choice})


def distinct(states: Sequence[Choice], names: Sequence[str]) -> tuple[NDArray[np.int64], list[Choice]]:
    """States that differ in some fields, and which of them each state is."""
    seen: dict[tuple[object, ...], int] = {}
    kinds: list[Choice] = []
    where = []
    for state in states:
        key = tuple([state.get(name) for name in names])
        if key not in seen:
            seen[key] = len(kinds)
            kinds.append(state)
        where.append(seen[key])
    return np.array(where), kinds
