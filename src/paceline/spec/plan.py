"""A plan: how a training step is spread over devices.

    Plan.parse("dp=fsdp tp=8 mbs=1 gbs=1024 seq=8192")
    Plan.parse("tp=8 pp=8 vpp=3 mbs=1 gbs=64 recompute=selective sp")

Degrees that are left out are filled in by `resolve`, which knows the cluster and the model, and refuses what
cannot run: every factor shown, and the nearest plan that would.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from paceline import units
from paceline.errors import PlanError, UnitError, nearest
from paceline.spec import checks, defaults, schedules
from paceline.spec.cluster import Cluster
from paceline.spec.facts import read_text
from paceline.spec.schedules import SCHEDULES
from paceline.spec.synchronisation import PLAIN, RELAXED_KEYS, Relaxation, read_relaxation, relaxed_words
from paceline.spec.transformer import Transformer
from paceline.spec.vocabulary import (
    ALIASES,
    PLAN_PRECISIONS,
    ContextExchange,
    Offload,
    Precision,
    Recompute,
    Sharding,
    Word,
    member,
)

_ENUMS: dict[str, type[Word]] = {
    "sharding": Sharding,
    "recompute": Recompute,
    "precision": Precision,
    "offload": Offload,
    "context": ContextExchange,
}
_WORDS: dict[str, Collection[str]] = {
    "sharding": tuple(Sharding),
    "schedule": SCHEDULES,
    "recompute": tuple(Recompute),
    "precision": PLAN_PRECISIONS,
    "offload": tuple(Offload),
    "context": tuple(ContextExchange),
}
#: degrees whose product, times that of data parallelism, is the ranks of a plan; and degrees whose ranks are
#: among those of the others: in the order in which the search tries them
SPREAD, SHARED = ("tp", "cp", "pp"), ("ep",)
_SIZES = ("dp", "tp", "pp", "cp", "ep", "vpp", "mbs", "gbs", "seq", "shard", "prefetch")
_FLAGS = ("sp", "reshard", "adapters")
#: sizes that may be 0: `resolve` fills them in
_FILLED = ("dp", "mbs", "gbs", "seq", "shard", "prefetch")


@dataclass(frozen=True)
class Degrees:
    """The degrees of a plan: its fields of these names."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def inner(self) -> Degrees:
        """Those that a layer depends on."""
        return replace(self, dp=1, pp=1)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Degrees, batch and options; 0 or empty: to be filled in by `resolve`."""

    dp: int = 0
    tp: int = 1
    pp: int = 1
    cp: int = 1
    #: experts are spread over this many of the ranks of a pipeline stage, each expert whole on one of them
    ep: int = 1
    #: chunks of layers per pipeline stage
    vpp: int = 1
    #: samples of one micro-batch on one data-parallel rank, and of the whole step
    mbs: int = 0
    gbs: int = 0
    seq: int = 0
    sharding: Sharding = Sharding.DDP
    #: devices that share one copy of the parameters under hsdp
    shard: int = 0
    #: sequence parallel: norms and dropouts on 1/tp of the tokens
    sp: bool = False
    schedule: str = ""
    recompute: Recompute = Recompute.NONE
    precision: Precision = Precision.BF16
    context: ContextExchange = ContextExchange.RING
    #: of gradients that are sent together; at this value, the default of the way that sends them
    bucket_bytes: float = defaults.PLAIN.bucket_bytes
    #: layers whose parameters are gathered ahead, and whether they are dropped again after the forward pass
    prefetch: int = 1
    reshard: bool = True
    offload: Offload = Offload.NONE
    #: only low-rank adapters are trained: no gradients, state or reduction of the weights themselves
    adapters: bool = False
    #: whose kernels and overlap: a name of `spec.framework`
    framework: str = ""
    #: gradients sent less, later, or not waited for
    relax: Relaxation = PLAIN

    def __post_init__(self) -> None:
        for size in _SIZES:
            value = getattr(self, size)
            if type(value) is not int or not 1 <= value <= checks.LARGEST:
                least = int(size not in _FILLED)
                object.__setattr__(self, size, checks.whole(f"plan: {size}", value, least, PlanError))
        for field, kind in _ENUMS.items():
            if type(value := getattr(self, field)) is not kind:
                object.__setattr__(self, field, member(kind, f"plan: {field}", value))
        if self.schedule:
            _choice("plan: schedule", self.schedule, SCHEDULES)
        checks.name("plan: framework", self.framework, PlanError)

    @staticmethod
    def parse(text: str) -> Plan:
        """The plan written as words and `key=value`s, or in a `.toml` file of such keys."""
        return Plan(**Plan.said(text))

    @staticmethod
    def said(text: str) -> dict[str, Any]:
        """The fields that words of a plan set, those set to their usual values too; as `parse` reads them."""
        text = checks.text("plan", text, PlanError)
        if text.strip().endswith(".toml") and "=" not in text:
            text = _from_file(Path(text.strip()))
        given: dict[str, Any] = {}
        relaxed: dict[str, Any] = {}
        for word in text.replace(",", " ").split():
            key, equals, value = word.partition("=")
            key, value = (key, ALIASES.get(value, value)) if equals else (ALIASES.get(key, key), value)
            wanted = value if equals else None
            found = list(read_relaxation(key, wanted))
            own = () if found else _read(key, wanted, word)
            for into, pairs in ((relaxed, found), (given, own)):
                for name, said in pairs:
                    if name in into and into[name] != said:
                        raise PlanError(f"plan {text!r} gives {name} twice: {into[name]} and {said}")
                    into[name] = said
        return {**given, "relax": Relaxation(**relaxed)} if relaxed else given

    @property
    def ranks(self) -> int:
        """Devices of the plan, as far as its degrees are known."""
        return (self.dp or 1) * self.replica_ranks

    @property
    def replica_ranks(self) -> int:
        """Devices of one data-parallel rank."""
        ranks: int = math.prod(getattr(self, name) for name in SPREAD)
        return ranks

    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters, as far as degrees are known."""
        return (self.dp or 1) * self.cp

    @property
    def degrees(self) -> Degrees:
        """Of a resolved plan."""
        return Degrees(**{f.name: getattr(self, f.name) for f in fields(Degrees)})

    @property
    def micro_batches(self) -> int:
        """Micro-batches that one data-parallel rank runs per step; of a resolved plan."""
        return self.gbs // (self.dp * self.mbs)

    def __str__(self) -> str:
        """The plan in the words that `parse` reads, without what is usual."""
        parts = [f"{name}={value}" for name in _SIZES if (value := getattr(self, name)) not in (0, 1)]
        flags = [
            name if getattr(self, name) else f"no-{name}"
            for name in _FLAGS
            if getattr(self, name) != getattr(Plan, name)
        ]
        words = [
            f"{name}={value}"
            for name in ("recompute", "context", "offload")
            if (value := getattr(self, name)) != getattr(Plan, name)
        ]
        bucket = [f"bucket={self.bucket_bytes / 1e6:g}MB"] if self.bucket_bytes != Plan.bucket_bytes else []
        framework = [f"framework={self.framework}"] if self.framework else []
        kind = [self.sharding] if self.sharding is not Sharding.NONE else []
        relaxed = [str(self.relax)] if not self.relax.plain else []
        return " ".join(
            [
                *kind,
                *relaxed,
                *parts,
                *flags,
                *words,
                *filter(None, (self.schedule, self.precision)),
                *bucket,
                *framework,
            ]
        )


def _from_file(path: Path) -> str:
    """The words of a plan in a TOML file: `plan = "words"`, or a key for each (`tp = 8`, `sharding = "fsdp"`,
    `sp = true`), on their own or in a table `[plan]`.
    """
    try:
        data = tomllib.loads(read_text(path, "plan"))
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"{path}: not valid TOML: {error}") from None
    found = data.get("plan", data)
    if isinstance(found, str):
        return found
    if not isinstance(found, dict):
        raise PlanError(f"{path}: plan must be words or a table of keys, got {found!r}")
    return " ".join(_word(path, key, value) for key, value in found.items())


def _word(path: Path, key: str, value: Any) -> str:
    """One key of a plan's file as a word."""
    if isinstance(value, bool):
        return key if value else f"no-{key}"
    if isinstance(value, (str, int, float)):
        return f"{key}={value}".replace(" ", "")
    raise PlanError(f"{path}: {key} must be a number, a word, true or false, got {value!r}")


def _read(key: str, value: str | None, word: str) -> Iterator[tuple[str, Any]]:
    """What one word of a plan says."""
    if value is None:
        if key in _FLAGS or key.removeprefix("no-") in _FLAGS:
            yield key.removeprefix("no-"), not key.startswith("no-")
            return
        for field, words in _WORDS.items():
            if key in words and key != "none":
                yield field, key
                return
        if key == "none":
            fields_with = [f"{field}=none" for field, words in _WORDS.items() if "none" in words]
            raise PlanError(
                f"plan: 'none' does not say of what; write {', '.join(fields_with[:-1])} or {fields_with[-1]}"
            )
        alone = [w for words in _WORDS.values() for w in words if w != "none"]
        raise PlanError(_unknown(word, [*_FLAGS, *alone, *relaxed_words(), *_SIZES]))
    if key == "dp" and not value.isdigit():  # dp=fsdp, dp=8:zero1
        degree, colon, kind = value.partition(":")
        if colon:
            yield "dp", _whole("dp", degree)
        yield "sharding", _choice("plan: dp", ALIASES.get(kind, kind) if colon else degree, tuple(Sharding))
    elif key == "zero":
        yield (
            "sharding",
            _choice(
                "plan: zero",
                {"0": "ddp", "1": "zero1", "2": "zero2", "3": "fsdp"}.get(value, value),
                tuple(Sharding),
            ),
        )
    elif key in _SIZES:
        yield key, _whole(key, value)
    elif key in _FLAGS:
        truth = _choice(f"plan: {key}", value.lower(), ("true", "false", "1", "0", "yes", "no"))
        yield key, truth in ("true", "1", "yes")
    elif key in _WORDS:
        yield key, _choice(f"plan: {key}", value, _WORDS[key])
    elif key == "bucket":
        try:
            size = units.parse(value, "bytes")
        except UnitError as error:
            raise PlanError(f"plan: bucket: {error}") from None
        if size <= 0:
            raise PlanError(f"plan: bucket must be above zero, got {value!r}")
        yield "bucket_bytes", size
    elif key == "framework":
        yield "framework", value
    else:
        raise PlanError(
            _unknown(key, [*_SIZES, *_FLAGS, *_WORDS, *RELAXED_KEYS, "bucket", "framework", "zero"])
        )


def _unknown(word: str, allowed: list[str]) -> str:
    near = nearest(word, allowed)
    return f"plan: unknown {word!r}; " + (
        f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(dict.fromkeys(allowed))}"
    )


def _whole(key: str, value: str) -> int:
    if not value.isdigit() or int(value) < 1:
        raise PlanError(f"plan: {key} must be a whole number of 1 or more, got {value!r}")
    return int(value)


def _choice(what: str, value: str, allowed: Collection[str]) -> str:
    if value not in allowed:
        raise PlanError(f"{what}={value}: expected one of {', '.join(allowed)}")
    return value


def resolve(
    plan: Plan,
    where: int | Cluster,
    model: Transformer | None = None,
    *,
    node_devices: int = defaults.NODE_DEVICES,
) -> Plan:
    """The plan with every degree, size and setting filled in for a cluster (or so many devices, in nodes of
    `node_devices`) and a model; PlanError where that cannot be.
    """
    if isinstance(where, Cluster):
        devices, node_devices = where.device_count, where.node_devices
    else:
        devices = where
    filled = fill(plan, devices, node_devices, model)
    return checked(plan, filled, devices, lambda other: problems(other, devices, model), model)


def checked(
    given: Plan,
    filled: Plan,
    devices: int,
    wrong: Callable[[Plan], Iterable[str]],
    model: Transformer | None = None,
    *,
    contradictions: Iterable[str] = (),
) -> Plan:
    """A filled plan; PlanError where something is wrong with it or contradicts what is given, with the
    nearest plan that can run.
    """
    found = [*contradictions, *wrong(filled)]
    if found:
        suggestion = _nearest_plan(given, filled, devices, wrong, model)
        hint = f"; nearest feasible plan: {suggestion}" if suggestion else ""
        raise PlanError("plan cannot run: " + "; ".join(found) + hint)
    return filled


def fill(plan: Plan, devices: int, node_devices: int, model: Transformer | None) -> Plan:
    """The plan with what it leaves out."""
    dp = plan.dp or max(1, devices // plan.replica_ranks)
    mbs = plan.mbs or (max(1, plan.gbs // dp) if plan.gbs and plan.gbs < dp * 2 else 1)
    usual = "interleaved" if plan.vpp > 1 else "1f1b"
    schedule = (plan.schedule or usual) if plan.pp > 1 else ""
    plan = with_defaults(plan, dp, node_devices)
    sharding = plan.sharding
    if sharding.whole:
        sharding = Sharding.DDP if dp * plan.cp > 1 else Sharding.NONE
    # two chunks are what they have
    vpp = 1 if schedules.get(schedule).v_shaped and plan.vpp == 2 else plan.vpp
    seq = plan.seq or (model.seq if model else 1)
    return replace(
        plan, dp=dp, mbs=mbs, gbs=plan.gbs or dp * mbs, seq=seq, schedule=schedule, vpp=vpp, sharding=sharding
    )


def with_defaults(plan: Plan, replicas: int, node_devices: int) -> Plan:
    """The plan with the settings of its sharding and of its way of synchronising, where it does not say."""
    shard = plan.shard
    if plan.sharding is Sharding.HSDP and not shard:
        shard = defaults.shard(replicas, node_devices)
    said = plan.bucket_bytes != Plan.bucket_bytes
    bucket = plan.bucket_bytes if said else plan.relax.defaults.bucket_bytes
    return replace(plan, shard=shard, bucket_bytes=bucket, relax=plan.relax.filled(replicas))


def problems(plan: Plan, devices: int, model: Transformer | None) -> Iterator[str]:
    """Everything that keeps a filled plan from running, with its factors."""
    if plan.ranks != devices:
        yield (
            f"dp {plan.dp} x tp {plan.tp} x pp {plan.pp} x cp {plan.cp} = {plan.ranks} ranks, but the cluster"
            f" has {devices} devices"
        )
    if plan.gbs % (plan.dp * plan.mbs):
        yield f"gbs {plan.gbs} is not a multiple of dp {plan.dp} x mbs {plan.mbs} = {plan.dp * plan.mbs}"
    else:
        yield from _schedule_problems(plan)
    if plan.vpp > 1 and plan.pp == 1:
        yield f"vpp {plan.vpp} without a pipeline (pp 1)"
    schedule = schedules.get(plan.schedule)
    if plan.vpp > 1 and not schedule.chunked:
        has = "two chunks" if schedule.v_shaped else "one chunk"
        yield f"schedule {plan.schedule} has {has} per stage, but vpp is {plan.vpp}"
    if (plan.dp * plan.cp * plan.tp) % plan.ep:
        yield (
            f"ep {plan.ep} does not divide dp {plan.dp} x cp {plan.cp} x tp {plan.tp} ="
            f" {plan.dp * plan.cp * plan.tp}"
        )
    if plan.shard and plan.sharding is not Sharding.HSDP:
        yield f"shard {plan.shard} is of hsdp, but the sharding is {plan.sharding}"
    elif plan.shard and plan.dp % plan.shard:
        yield f"hsdp shard {plan.shard} does not divide dp {plan.dp}"
    if plan.seq % plan.cp:
        yield f"cp {plan.cp} does not divide seq {plan.seq}"
    elif plan.sp and (plan.seq // plan.cp * plan.mbs) % plan.tp:
        yield f"sp: tp {plan.tp} does not divide the {plan.seq // plan.cp * plan.mbs} tokens of a micro-batch"
    if model is None:
        return
    chunks = schedule.chunks_per_rank(plan.vpp)
    if plan.pp * chunks > model.layers + 2:  # embedding and head may have a chunk to themselves
        each = f"2 of {plan.schedule}" if schedule.v_shaped else f"vpp {plan.vpp}"
        yield f"pp {plan.pp} x {each} = {plan.pp * chunks} chunks for {model.layers} layers"
    if model.heads % plan.tp:
        yield f"tp {plan.tp} does not divide {model.heads} heads"
    elif plan.context is ContextExchange.ALL_TO_ALL and model.heads // plan.tp % plan.cp:
        yield (
            f"all-to-all: cp {plan.cp} does not divide the {model.heads} heads / tp {plan.tp} ="
            f" {model.heads // plan.tp} of a rank"
        )
    if model.ffn % plan.tp:
        yield f"tp {plan.tp} does not divide the feed-forward width {model.ffn}"
    if plan.ep > 1 and (not model.experts or model.experts % plan.ep):
        yield (
            f"ep {plan.ep} does not divide {model.experts} experts"
            if model.experts
            else f"ep {plan.ep}, but {model.name} has no experts"
        )


def _schedule_problems(plan: Plan) -> Iterator[str]:
    """Too few micro-batches for a schedule, or too odd a number of them, by the rules of torch's and
    Megatron's schedules.
    """
    m, schedule = plan.micro_batches, plan.schedule
    count = f"gbs {plan.gbs} / (dp {plan.dp} x mbs {plan.mbs}) = {m}"
    rounds = max(1, m // plan.pp)
    if m < (least := fewest_micro_batches(plan)):
        factors = f"{least // plan.pp} x pp {plan.pp} = {least}" if least > plan.pp else f"pp {plan.pp}"
        yield f"{schedule} needs at least {factors} micro-batches, but {count}"
    elif schedules.get(schedule).equal_rounds and m % rounds:
        yield f"{schedule} runs micro-batches in {m} // pp {plan.pp} = {rounds} equal rounds, but {count}"


def fewest_micro_batches(plan: Plan) -> int:
    """Micro-batches that a pipeline's schedule needs at least; Megatron's 1F1B takes any number, torch's one
    for each stage.
    """
    in_torch = plan.framework.startswith("torch")
    return schedules.get(plan.schedule).least_micro_batches(plan.pp, plan.vpp, in_torch)


@cache
def divisors(n: int) -> tuple[int, ...]:
    """Of a whole number, in order."""
    low = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    high = [n // i for i in reversed(low) if i * i != n]
    return (*low, *high)


def meshes(devices: int) -> list[Degrees]:
    """All degrees that so many devices can be spread over; data parallelism takes the ranks that are left."""
    found = [(dict[str, int](), devices)]
    for name in SPREAD:
        found = [({**mesh, name: size}, left // size) for mesh, left in found for size in divisors(left)]
    for name in SHARED:
        found = [({**mesh, name: size}, left) for mesh, left in found for size in divisors(devices)]
    return [Degrees(**mesh, dp=left) for mesh, left in found]


def _nearest_plan(
    given: Plan, filled: Plan, devices: int, wrong: Callable[[Plan], Iterable[str]], model: Transformer | None
) -> Plan | None:
    """The feasible plan that differs least from the one asked for: degrees and sizes by their ratios, words
    by whether they are the same.
    """
    best: tuple[float, Plan] | None = None
    for tp in divisors(devices):
        for pp in divisors(devices // tp):
            for cp in divisors(devices // tp // pp) if filled.cp > 1 else (1,):
                mesh = replace(filled, tp=tp, pp=pp, cp=cp, dp=devices // (tp * pp * cp))
                if best is not None and _away(mesh, given, ("tp", "pp", "cp", "dp")) >= best[0]:
                    continue
                for candidate in _variants(mesh, given, model):
                    distance = _away(candidate, given, _SIZES) + _other_words(candidate, filled)
                    if (best is None or distance < best[0]) and not any(wrong(candidate)):
                        best = distance, candidate
    return best[1] if best else None


def _away(plan: Plan, given: Plan, names: Iterable[str]) -> float:
    """Distance in the sizes that were given; the batch of a step is changed last."""
    pairs = [(name, getattr(plan, name), getattr(given, name)) for name in names]
    return sum(
        (2.0 if name == "gbs" else 1.0) * abs(math.log(value / wanted))
        for name, value, wanted in pairs
        if value and wanted
    )


def _other_words(plan: Plan, wanted: Plan) -> int:
    """How many words differ; without a pipeline there is no schedule to differ."""
    schedules = {plan.schedule, wanted.schedule} - {""}
    return (len(schedules) > 1) + (plan.sp != wanted.sp)


def _variants(plan: Plan, given: Plan, model: Transformer | None) -> Iterator[Plan]:
    """Plans on a mesh that differ in how experts and state are spread, in chunks and schedule, and in
    micro-batch and batch.
    """
    experts = model.experts if model is not None else plan.ep
    ep = max(
        d
        for d in divisors(plan.dp * plan.cp * plan.tp)
        if d <= plan.ep and (d == 1 or (experts and experts % d == 0))
    )
    shard = 0
    if plan.shard and plan.sharding is Sharding.HSDP:
        shard = max(d for d in divisors(plan.dp) if d <= plan.shard)
    kind = Sharding.NONE
    if plan.dp * plan.cp > 1:
        kind = given.sharding if given.sharding is not Sharding.NONE else Sharding.DDP
    orders = [("", 1)]
    if plan.pp > 1:
        chunked = plan.schedule if schedules.get(plan.schedule).chunked else "interleaved"
        orders = [("1f1b", 1), (plan.schedule or "1f1b", 1), *((chunked, v) for v in range(2, plan.vpp + 1))]
    for schedule, vpp in orders:
        for sp in {plan.sp, False}:
            for mbs in {plan.mbs, *(d for d in (1, 2, 4, 8) if d < plan.mbs)}:
                made = replace(
                    plan, ep=ep, shard=shard, sharding=kind, schedule=schedule, vpp=vpp, sp=sp, mbs=mbs
                )
                least, each = (
                    made.dp * mbs * fewest_micro_batches(made),
                    made.dp * mbs * (plan.pp if schedules.get(schedule).equal_rounds else 1),
                )
                near = (
                    {plan.gbs, -(-plan.gbs // each) * each, plan.gbs // each * each} if given.gbs else {each}
                )
                yield from (
                    replace(made, gbs=gbs)
                    for gbs in sorted({max(gbs, -(-least // each) * each) for gbs in near})
                )


def stage_layers(layers: int, pp: int, vpp: int = 1) -> tuple[int, ...]:
    """Layers of each pipeline stage.

    Where they do not divide, the ends give way first: one layer fewer beside the embedding and beside the
    head, as Megatron balances them; else the first stages take one more.
    """
    chunks = pp * vpp
    if layers % chunks and (layers + 2) % chunks == 0:
        each = (layers + 2) // pp
        return (each - 1, *[each] * (pp - 2), each - 1) if pp > 1 else (layers,)
    base, more = divmod(layers, pp)
    return tuple(base + (1 if i < more else 0) for i in range(pp))


assert {f.name for f in fields(Plan)} >= {*_SIZES, *_FLAGS, *_WORDS}
assert {*_SIZES} >= {f.name for f in fields(Degrees)} == {"dp", *SPREAD, *SHARED}
