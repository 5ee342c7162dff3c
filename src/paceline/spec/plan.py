"""A plan: how a training step is spread over devices.

    Plan.parse("dp=fsdp tp=8 mbs=1 gbs=1024 seq=8192")
    Plan.parse("tp=8 pp=8 vpp=3 mbs=1 gbs=64 recompute=selective sp")

Degrees that are left out are filled in by `resolve`, which knows the cluster and the model, and refuses what
cannot run: every factor shown, and the nearest plan that would.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from paceline import units
from paceline.errors import PlanError, UnitError, nearest
from paceline.spec.transformer import Transformer

#: what the data-parallel ranks share: nothing; gradients (ddp); and optimizer state, gradients, parameters in turn;
#: hsdp shards within groups and replicates across them
SHARDINGS = ("none", "ddp", "zero1", "zero2", "fsdp", "hsdp")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-v", "dualpipev")
RECOMPUTE = ("none", "selective", "full")
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8")
OFFLOADS = ("none", "optimizer", "activations")
CONTEXTS = ("ring", "all-to-all")

_SYNONYMS = {"zero3": "fsdp", "zero-1": "zero1", "zero-2": "zero2", "zero-3": "fsdp", "fsdp2": "fsdp", "1F1B": "1f1b", "zbv": "zb-v", "zbh1": "zb-h1"}
_WORDS: dict[str, tuple[str, ...]] = {
    "sharding": SHARDINGS, "schedule": SCHEDULES, "recompute": RECOMPUTE, "precision": PRECISIONS, "offload": OFFLOADS, "context": CONTEXTS,
}
_SIZES = ("dp", "tp", "pp", "cp", "ep", "vpp", "mbs", "gbs", "seq", "shard", "prefetch")
_FLAGS = ("sp", "reshard", "adapters")


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
    sharding: str = "ddp"
    #: devices that share one copy of the parameters under hsdp
    shard: int = 0
    #: sequence parallel: norms and dropouts on 1/tp of the tokens
    sp: bool = False
    schedule: str = ""
    recompute: str = "none"
    precision: str = "bf16"
    context: str = "ring"
    bucket_bytes: float = 25e6
    #: layers whose parameters are gathered ahead, and whether they are dropped again after the forward pass
    prefetch: int = 1
    reshard: bool = True
    offload: str = "none"
    #: only low-rank adapters are trained: no gradients, state or reduction of the weights themselves
    adapters: bool = False
    #: whose kernels and overlap: a name of `spec.framework`
    framework: str = ""

    @staticmethod
    def parse(text: str) -> Plan:
        """The plan written as words and `key=value`s."""
        given: dict[str, Any] = {}
        for word in text.replace(",", " ").split():
            key, equals, value = word.partition("=")
            for name, found in _read(key, value if equals else None, word):
                if name in given and given[name] != found:
                    raise PlanError(f"plan {text!r} gives {name} twice: {given[name]} and {found}")
                given[name] = found
        return Plan(**given)

    @property
    def ranks(self) -> int:
        """Devices of the plan, as far as its degrees are known."""
        return (self.dp or 1) * self.tp * self.pp * self.cp

    @property
    def micro_batches(self) -> int:
        """Micro-batches that one data-parallel rank runs per step; of a resolved plan."""
        return self.gbs // (self.dp * self.mbs)

    def __str__(self) -> str:
        """The plan in the words that `parse` reads, without what is usual."""
        parts = [f"{name}={value}" for name in _SIZES if (value := getattr(self, name)) not in (0, 1)]
        flags = [name if getattr(self, name) else f"no-{name}" for name in _FLAGS if getattr(self, name) != getattr(Plan, name)]
        words = [f"{name}={value}" for name in ("recompute", "context", "offload") if (value := getattr(self, name)) != getattr(Plan, name)]
        bucket = [f"bucket={self.bucket_bytes:g}B"] if self.bucket_bytes != Plan.bucket_bytes else []
        framework = [f"framework={self.framework}"] if self.framework else []
        kind = [self.sharding] if self.sharding != "none" else []
        return " ".join([*kind, *parts, *flags, *words, *filter(None, (self.schedule, self.precision)), *bucket, *framework])


def _read(key: str, value: str | None, word: str) -> Iterator[tuple[str, Any]]:
    """What one word of a plan says."""
    if value is None:
        plain = _SYNONYMS.get(key, key)
        if plain in _FLAGS or plain.removeprefix("no-") in _FLAGS:
            yield plain.removeprefix("no-"), not plain.startswith("no-")
            return
        for field, words in _WORDS.items():
            if plain in words and plain != "none":
                yield field, plain
                return
        raise PlanError(_unknown(word, [*_FLAGS, *(w for words in _WORDS.values() for w in words), *_SIZES]))
    value = _SYNONYMS.get(value, value)
    if key == "dp" and not value.isdigit():  # dp=fsdp, dp=8:zero1
        degree, colon, kind = value.partition(":")
        if colon:
            yield "dp", _whole("dp", degree)
        yield "sharding", _choice("dp", _SYNONYMS.get(kind, kind) if colon else degree, SHARDINGS)
    elif key == "zero":
        yield "sharding", _choice("zero", {"0": "ddp", "1": "zero1", "2": "zero2", "3": "fsdp"}.get(value, value), SHARDINGS)
    elif key in _SIZES:
        yield key, _whole(key, value)
    elif key in _FLAGS:
        yield key, _choice(key, value.lower(), ("true", "false", "1", "0", "yes", "no")) in ("true", "1", "yes")
    elif key in _WORDS:
        yield key, _choice(key, value, _WORDS[key])
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
        raise PlanError(_unknown(key, [*_SIZES, *_FLAGS, *_WORDS, "bucket", "framework", "zero"]))


def _unknown(word: str, allowed: list[str]) -> str:
    near = nearest(word, allowed)
    return f"plan: unknown {word!r}; " + (f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(dict.fromkeys(allowed))}")


def _whole(key: str, value: str) -> int:
    if not value.isdigit() or int(value) < 1:
        raise PlanError(f"plan: {key} must be a whole number of 1 or more, got {value!r}")
    return int(value)


def _choice(key: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise PlanError(f"plan: {key}={value}: expected one of {', '.join(allowed)}")
    return value


def resolve(plan: Plan, devices: int, model: Transformer | None = None) -> Plan:
    """The plan with every degree and size filled in for `devices` devices and a model; PlanError where that cannot be."""
    filled = _fill(plan, devices, model)
    problems = list(_problems(filled, devices, model))
    if problems:
        suggestion = _nearest_plan(plan, filled, devices, model)
        hint = f"; nearest feasible plan: {suggestion}" if suggestion else ""
        raise PlanError("plan cannot run: " + "; ".join(problems) + hint)
    return filled


def _fill(plan: Plan, devices: int, model: Transformer | None) -> Plan:
    used = plan.tp * plan.pp * plan.cp
    dp = plan.dp or max(1, devices // used)
    mbs = plan.mbs or (max(1, plan.gbs // dp) if plan.gbs and plan.gbs < dp * 2 else 1)
    schedule = plan.schedule or ("interleaved" if plan.vpp > 1 else "1f1b")
    shard = (plan.shard or min(dp, 8)) if plan.sharding == "hsdp" else 0
    sharding = "none" if plan.sharding == "ddp" and dp * plan.cp == 1 else plan.sharding
    seq = plan.seq or (model.seq if model else 1)
    return replace(plan, dp=dp, mbs=mbs, gbs=plan.gbs or dp * mbs, seq=seq, schedule=schedule, shard=shard, sharding=sharding)


def _problems(plan: Plan, devices: int, model: Transformer | None) -> Iterator[str]:
    """Everything that keeps a filled plan from running, with its factors."""
    if plan.ranks != devices:
        yield f"dp {plan.dp} x tp {plan.tp} x pp {plan.pp} x cp {plan.cp} = {plan.ranks} ranks, but the cluster has {devices} devices"
    if plan.gbs % (plan.dp * plan.mbs):
        yield f"gbs {plan.gbs} is not a multiple of dp {plan.dp} x mbs {plan.mbs} = {plan.dp * plan.mbs}"
    else:
        count = f"gbs {plan.gbs} / (dp {plan.dp} x mbs {plan.mbs}) = {plan.micro_batches}"
        if plan.vpp > 1 and plan.micro_batches < plan.pp:
            yield f"{plan.schedule} with vpp {plan.vpp} needs at least pp {plan.pp} micro-batches, but {count}"
    if plan.vpp > 1 and plan.pp == 1:
        yield f"vpp {plan.vpp} without a pipeline (pp 1)"
    if plan.vpp > 1 and plan.schedule in ("gpipe", "1f1b", "zb-h1"):
        yield f"schedule {plan.schedule} has one chunk per stage, but vpp is {plan.vpp}"
    if (plan.dp * plan.cp * plan.tp) % plan.ep:
        yield f"ep {plan.ep} does not divide dp {plan.dp} x cp {plan.cp} x tp {plan.tp} = {plan.dp * plan.cp * plan.tp}"
    if plan.shard and plan.dp % plan.shard:
        yield f"hsdp shard {plan.shard} does not divide dp {plan.dp}"
    if plan.seq % plan.cp:
        yield f"cp {plan.cp} does not divide seq {plan.seq}"
    elif plan.sp and (plan.seq // plan.cp * plan.mbs) % plan.tp:
        yield f"sp: tp {plan.tp} does not divide the {plan.seq // plan.cp * plan.mbs} tokens of a micro-batch"
    if model is None:
        return
    if plan.pp * plan.vpp > model.layers + 2:  # embedding and head may have a chunk to themselves
        yield f"pp {plan.pp} x vpp {plan.vpp} = {plan.pp * plan.vpp} chunks for {model.layers} layers"
    if model.heads % plan.tp:
        yield f"tp {plan.tp} does not divide {model.heads} heads"
    if model.ffn % plan.tp:
        yield f"tp {plan.tp} does not divide the feed-forward width {model.ffn}"
    if plan.ep > 1 and (not model.experts or model.experts % plan.ep):
        yield f"ep {plan.ep} does not divide {model.experts} experts" if model.experts else f"ep {plan.ep}, but {model.name} has no experts"


@cache
def _divisors(n: int) -> tuple[int, ...]:
    return tuple(i for i in range(1, n + 1) if n % i == 0)


def _nearest_plan(given: Plan, filled: Plan, devices: int, model: Transformer | None) -> Plan | None:
    """The feasible plan whose degrees differ least (by their ratios) from the one asked for."""
    best: tuple[float, Plan] | None = None

    def away(value: int, wanted: int, weight: float = 1.0) -> float:
        return weight * abs(math.log(value / wanted)) if wanted else 0.0

    for tp in _divisors(devices):
        for pp in _divisors(devices // tp):
            for cp in _divisors(devices // tp // pp) if filled.cp > 1 else (1,):
                dp = devices // (tp * pp * cp)
                distance = away(tp, given.tp) + away(pp, given.pp) + away(cp, given.cp) + away(dp, given.dp)
                if best is not None and distance >= best[0]:
                    continue
                kind = given.sharding if dp * cp > 1 else "none"
                for candidate in _batches(replace(filled, tp=tp, pp=pp, cp=cp, dp=dp, sharding=kind), given):
                    total = distance + away(candidate.mbs, given.mbs) + away(candidate.gbs, given.gbs, 2.0) + away(candidate.vpp, given.vpp)
                    if (best is None or total < best[0]) and not any(_problems(candidate, devices, model)):
                        best = total, candidate
    return best[1] if best else None


def _batches(plan: Plan, given: Plan) -> Iterator[Plan]:
    """Variants of a plan in micro-batch, batch, chunks and expert degree."""
    ep = max(d for d in _divisors(plan.dp * plan.cp * plan.tp) if d <= plan.ep)
    shard = max(d for d in _divisors(plan.dp) if d <= plan.shard) if plan.shard else 0
    plan = replace(plan, ep=ep, shard=shard)
    for vpp in {plan.vpp if plan.pp > 1 else 1, 1}:
        schedule = given.schedule if given.schedule and (vpp > 1) == (given.vpp > 1) else "interleaved" if vpp > 1 else "1f1b"
        for mbs in {plan.mbs, *(d for d in (1, 2, 4, 8) if d < plan.mbs)}:
            whole = plan.dp * mbs * (plan.pp if vpp > 1 else 1)
            for gbs in {plan.gbs, -(-plan.gbs // whole) * whole, max(whole, plan.gbs // whole * whole)} if given.gbs else (whole,):
                yield replace(plan, vpp=vpp, schedule=schedule, mbs=mbs, gbs=gbs)


def stage_layers(layers: int, pp: int, vpp: int = 1) -> tuple[int, ...]:
    """Layers of each pipeline stage.

    Where they do not divide, the ends give way first: one layer fewer beside the embedding and beside the head,
    as Megatron balances them; else the first stages take one more.
    """
    chunks = pp * vpp
    if layers % chunks and (layers + 2) % chunks == 0:
        each = (layers + 2) // pp
        return (each - 1, *[each] * (pp - 2), each - 1) if pp > 1 else (layers,)
    base, more = divmod(layers, pp)
    return tuple(base + (1 if i < more else 0) for i in range(pp))


assert {f.name for f in fields(Plan)} >= {*_SIZES, *_FLAGS, *_WORDS}
