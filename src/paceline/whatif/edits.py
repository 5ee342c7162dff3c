"""Edits: one field of the cluster, the plan or the model set to something else.

network.inter.bandwidth=800Gb/s   the outermost network's rate of one device (what a node shares grows with
it); `intra`: the innermost network.rails.latency=2us         any tier by its name nodes=256, node.devices=4
more, fewer or larger nodes; a data-parallel degree that the plan gives is filled in again device=h200
another device device.memory.bandwidth=x1.5      any fact of it, here as a factor; `inf`: no limit
device.arithmetic=x2              peaks of all types, clock, and the power to keep them up tp=4, gbs=2048,
compress=dgc      any word of a plan, also as plan.tp=4 model.layers=48                   any size of a
transformer batch=64, precision=amp_bf16      how a module is captured, also as workload.batch=64 host.speed=2
how fast operators are issued, over the usual host sparsity.weights=2:4              zeros that hardware skips
in products, declared: so many of so many kept, or a share of zeros (60%) sparsity.activations=60%
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from paceline import units
from paceline.catalog import devices
from paceline.errors import SpecError, UnitError, UnknownName
from paceline.spec.cluster import TIER_FIELDS, Cluster, Tier
from paceline.spec.device import DTYPES, FIELDS, Device
from paceline.spec.facts import Fact
from paceline.spec.plan import Plan
from paceline.spec.synchronisation import RELAXED_KEYS
from paceline.spec.transformer import Transformer
from paceline.spec.workload import Workload
from paceline.whatif.subject import Subject

#: stands for no limit: a finite number, so that formulas stay numbers
BOUNDLESS = 1e9
SPARSITIES = {"sparsity.weights": "weight_density", "sparsity.activations": "activation_density"}
_CAPTURE = {
    "batch": int,
    "seq": int,
    "image": int,
    "precision": str,
    "optimizer": str,
    "checkpointing": bool,
    "compile": bool,
    "channels_last": bool,
}
_PLAN_WORDS = ("bucket", "zero")
_PLAN = (
    *(f.name for f in fields(Plan) if f.name not in ("relax", "bucket_bytes")),
    *RELAXED_KEYS,
    *_PLAN_WORDS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """`path` set to `value`, both as the user writes them."""

    path: str
    value: str

    @staticmethod
    def parse(text: str) -> Edit:
        """The edit written `path=value`."""
        path, equals, value = text.partition("=")
        if not equals or not path.strip() or not value.strip():
            raise SpecError(
                "an edit is written path=value, such as nodes=256 or network.inter.bandwidth=800Gb/s; got"
                f" {text!r}"
            )
        return Edit(path=path.strip(), value=value.strip())

    def __str__(self) -> str:
        return f"{self.path}={self.value}"


def apply(subject: Subject, edits: Iterable[Edit | str]) -> Subject:
    """The subject with every edit made, in order."""
    for edit in edits:
        subject = _apply(subject, edit if isinstance(edit, Edit) else Edit.parse(edit))
    return subject


def paths(subject: Subject) -> list[str]:
    """Every path that can be edited."""
    tiers = [
        f"network.{name}.{key}"
        for name in (*_named(subject.cluster), *(t.name for t in subject.cluster.tiers))
        for key in TIER_FIELDS
    ]
    device = [f"device.{path}" for path in FIELDS] + [f"device.peak.{dtype}" for dtype in DTYPES]
    model = (
        [f"model.{f.name}" for f in fields(Transformer)]
        if isinstance(subject.model, Transformer)
        else [f"workload.{key}" for key in _CAPTURE]
    )
    first = [
        "nodes",
        "node.devices",
        "stragglers.cv",
        "host.speed",
        *SPARSITIES,
        "device",
        "device.arithmetic",
    ]
    return [*first, *tiers, *device, *model, *(f"plan.{key}" for key in _PLAN)]


def _apply(subject: Subject, edit: Edit) -> Subject:
    head, _, rest = edit.path.partition(".")
    if edit.path in ("nodes", "node.devices"):
        return _resized(subject, edit)
    if edit.path in ("stragglers.cv", "host.speed"):
        value = _quantity(
            edit, "fraction", subject.cluster.straggler_cv if head == "stragglers" else subject.host_speed
        )
        return (
            replace(subject, cluster=replace(subject.cluster, straggler_cv=value))
            if head == "stragglers"
            else replace(subject, host_speed=value)
        )
    if edit.path in SPARSITIES:
        changed: dict[str, Any] = {SPARSITIES[edit.path]: _density(edit)}
        return replace(subject, **changed)
    if edit.path == "device":
        return replace(subject, cluster=replace(subject.cluster, device=devices.get(edit.value)))
    if head == "network":
        return replace(subject, cluster=_network(subject.cluster, edit, rest))
    if head == "device":
        return replace(
            subject, cluster=replace(subject.cluster, device=_device(subject.cluster.device, edit, rest))
        )
    if (
        head == "model"
        and isinstance(subject.model, Transformer)
        and rest in {f.name for f in fields(Transformer)}
    ):
        return replace(subject, model=_sized(subject.model, edit, rest))
    key = rest if head in ("plan", "workload") else edit.path
    if isinstance(subject.model, Workload) and key in _CAPTURE and head != "plan":
        return subject.captured(**{key: _setting(edit, key)})
    if key in _PLAN and head != "workload":
        return _planned(subject, edit, key)
    raise UnknownName(
        "field",
        edit.path,
        [*paths(subject), *_PLAN, *(_CAPTURE if isinstance(subject.model, Workload) else ())],
    )


def _density(edit: Edit) -> float:
    """The share that is not zero: `2:4` keeps two of four, `60%` are zeros."""
    kept, colon, of = edit.value.partition(":")
    try:
        density = float(kept) / float(of) if colon else 1 - units.parse(edit.value, "fraction")
    except (ValueError, ZeroDivisionError, UnitError):
        density = math.nan
    if not 0 < density <= 1:
        raise SpecError(
            f"{edit.path} is so many of so many, as 2:4, or a share of zeros, as 60%; got {edit.value!r}"
        )
    return density


# -- cluster ---------------------------------------------------------------------------------------


def _resized(subject: Subject, edit: Edit) -> Subject:
    """More or fewer nodes, or devices in each."""
    cluster = subject.cluster
    before = cluster.nodes if edit.path == "nodes" else cluster.node_devices
    value = _quantity(edit, "count", before)
    if value != int(value) or value < 1:
        raise SpecError(f"{edit.path} must be a whole number of 1 or more, got {edit.value!r}")
    count = int(value)
    if edit.path == "node.devices":
        inner = [replace(t, domain=t.domain * count // before if t.domain else None) for t in cluster.tiers]
        made = replace(
            cluster,
            node_devices=count,
            tiers=tuple(inner),
            name=f"{cluster.name} with {count} devices per node",
        )
    else:
        name = cluster.name.removeprefix(f"{before}x")
        one = replace(cluster, nodes=1, name=name, mix=())
        made = replace(one.scaled(count), mix=cluster.mix)
        if sum(nodes for _, nodes in made.mix) > count:
            raise SpecError(
                f"nodes={count}, but {cluster.name} names {sum(nodes for _, nodes in cluster.mix)} nodes of"
                " other devices"
            )
    return replace(subject, cluster=made, plan=replace(subject.plan, dp=0))


def _named(cluster: Cluster) -> dict[str, int]:
    """Tiers by what they are: the outermost (network), and the innermost."""
    if not cluster.tiers:
        return {}
    outer = next(
        (i for i in reversed(range(len(cluster.tiers))) if cluster.tiers[i].network), len(cluster.tiers) - 1
    )
    return {"inter": outer, "intra": 0}


def _network(cluster: Cluster, edit: Edit, rest: str) -> Cluster:
    name, _, key = rest.partition(".")
    known = {**_named(cluster), **{tier.name: i for i, tier in enumerate(cluster.tiers)}}
    if name not in known or key not in TIER_FIELDS:
        raise UnknownName(
            "field", edit.path, [f"network.{tier}.{leaf}" for tier in known for leaf in TIER_FIELDS]
        )
    place = known[name]
    tier, (attribute, dimension) = cluster.tiers[place], TIER_FIELDS[key]
    before = getattr(tier, attribute)
    value = _quantity(edit, dimension, before)
    changed: dict[str, Any] = {attribute: int(value) if key == "domain" else value}
    if key == "bandwidth" and tier.node_bandwidth_Bps is not None:  # what a node shares grows with it
        changed["node_bandwidth_Bps"] = tier.node_bandwidth_Bps * value / tier.bandwidth_Bps
    return _told(cluster, place, replace(tier, **changed), {f"tier.{tier.name}.{key}": value}, edit)


def _told(cluster: Cluster, place: int, tier: Tier, said: Mapping[str, float], edit: Edit) -> Cluster:
    """The cluster with a tier changed, and where the change comes from."""
    tiers = (*cluster.tiers[:place], tier, *cluster.tiers[place + 1 :])
    facts = {path: Fact(value=value, kind="declared", source=f"--set {edit}") for path, value in said.items()}
    return replace(cluster, tiers=tiers, facts={**cluster.facts, **facts})


def _device(device: Device, edit: Edit, rest: str) -> Device:
    if rest == "arithmetic":
        factor = _quantity(edit, "fraction", 1.0)
        return replace(
            device,
            peak_flops={dtype: peak * factor for dtype, peak in device.peak_flops.items()},
            clock_hz=device.clock_hz * factor if device.clock_hz else None,
            tdp_w=device.tdp_w * factor if device.tdp_w else None,
        )
    if rest.removeprefix("peak.") in DTYPES:
        peak = _quantity(edit, "flops", device.peak(rest[5:]))
        stated = Fact(value=peak, kind="declared", source=f"--set {edit}")
        return replace(
            device, peak_flops={**device.peak_flops, rest[5:]: peak}, facts={**device.facts, rest: stated}
        )
    if rest not in FIELDS:
        raise UnknownName(
            "field",
            edit.path,
            ["device.arithmetic", *(f"device.{path}" for path in (*FIELDS, *(f"peak.{d}" for d in DTYPES)))],
        )
    attribute, dimension = FIELDS[rest]
    value = _quantity(edit, dimension, getattr(device, attribute))
    fact = Fact(value=value, kind="declared", source=f"--set {edit}")
    changed: dict[str, Any] = {
        attribute: round(value) if attribute == "sm_count" else value,
        "facts": {**device.facts, rest: fact},
    }
    return replace(device, **changed)


def _quantity(edit: Edit, dimension: str, before: float | None) -> float:
    """The value of an edit in SI units: as written, a factor (`x2`), or without limit (`inf`)."""
    text = edit.value.lower()
    factor = text == "inf" or (text[0] in "x*" and len(text) > 1)
    if factor and before is None:
        raise SpecError(
            f"{edit}: there is no figure to multiply; give one, such as {units.example(dimension)!r}"
        )
    try:
        if text == "inf":
            value = (before or 0.0) * BOUNDLESS
        elif factor:
            value = (before or 0.0) * units.parse(text[1:], "fraction")
        else:
            value = units.parse(edit.value, dimension)
    except UnitError as error:
        raise SpecError(f"{edit.path}: {error}") from None
    if value < 0 or (value == 0 and edit.path != "stragglers.cv"):
        raise SpecError(f"{edit.path} must be above zero, got {edit.value!r}")
    return value


# -- plan and model --------------------------------------------------------------------------------


def _planned(subject: Subject, edit: Edit, key: str) -> Subject:
    said = Plan.parse(f"{key}={edit.value}")
    plan = subject.plan
    if key in RELAXED_KEYS:
        changed = getattr(said.relax, key)
        return replace(subject, plan=replace(plan, relax=replace(plan.relax, **{key: changed})))
    name = {"bucket": "bucket_bytes", "zero": "sharding"}.get(key, key)
    if name == "dp" and said.sharding != Plan.sharding:
        name = "sharding"
    return replace(subject, plan=replace(plan, **{name: getattr(said, name)}))


def _sized(model: Transformer, edit: Edit, key: str) -> Transformer:
    """A transformer with another size; widths that follow from it are derived again."""
    before = getattr(model, key)
    if isinstance(before, bool):
        if edit.value.lower() not in ("true", "false", "yes", "no"):
            raise SpecError(f"{edit.path} is true or false, got {edit.value!r}")
        changed: dict[str, Any] = {key: edit.value.lower() in ("true", "yes")}
        return replace(model, **changed)
    if isinstance(before, str):
        changed = {key: edit.value}
        return replace(model, **changed)
    value = _quantity(edit, "count", before or 1)
    if value != math.floor(value):
        raise SpecError(f"{edit.path} must be a whole number, got {edit.value!r}")
    derived: dict[str, Any] = (
        {"head_dim": 0} if key in ("hidden", "heads") and model.head_dim * model.heads == model.hidden else {}
    )
    return replace(model, **{**derived, key: int(value)})


def _setting(edit: Edit, key: str) -> Any:
    kind = _CAPTURE[key]
    if kind is bool:
        return edit.value.lower() in ("true", "yes", "1")
    if kind is int:
        if not edit.value.isdigit() or int(edit.value) < 1:
            raise SpecError(f"{edit.path} must be a whole number of 1 or more, got {edit.value!r}")
        return int(edit.value)
    return edit.value
