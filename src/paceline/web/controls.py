"""The sliders and choices of a scenario: what each can be set to, and where it stands.

A control is a list of values and a place in it. A value is a text that an edit or a word of the plan takes,
so that a slider on the page and `--set` on the command line do the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from paceline import units
from paceline.spec.cluster import Cluster, Tier
from paceline.spec.plan import Plan, divisors
from paceline.spec.schedules import SCHEDULES
from paceline.spec.synchronisation import relaxed_words
from paceline.spec.transformer import Transformer
from paceline.spec.vocabulary import PLAN_PRECISIONS, Offload, Recompute, Sharding
from paceline.web.scenario import Scenario
from paceline.whatif.subject import Subject

#: places of a slider over a quantity, and how far it goes each way from the catalog's figure
PLACES, FAR = 48, 16.0
#: places of a slider over latency
LATENCIES = tuple(f"{n}{unit}" for unit in ("us", "ms") for n in (1, 2, 5, 10, 20, 50, 100, 200, 500))[:15]


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """One control: `values` it can be set to, and the place of the present one."""

    path: str
    label: str
    group: str
    values: tuple[str, ...]
    at: int
    #: the present value as it is written; between two of `values` where it was typed in
    value: str
    #: what a list shows for each value, where it is no slider
    shown: tuple[str, ...] = ()
    edited: bool = False


def controls(scenario: Scenario, subject: Subject, base: Subject) -> list[Control]:
    """Every control; `base` is the subject without edits, which sliders are centered on."""
    edited = {edit.partition("=")[0] for edit in scenario.edits}
    return [*_plan_controls(scenario, subject), *_cluster_controls(subject, base, edited)]


# -- cluster and device ----------------------------------------------------------------------------


def _cluster_controls(subject: Subject, base: Subject, edited: set[str]) -> Iterator[Control]:
    here, there = subject.cluster, base.cluster
    yield _count("nodes", "nodes", here.nodes, _doublings(_most_nodes(there)), edited)
    yield _count("node.devices", "devices per node", here.node_devices, _doublings(16), edited)
    for name, label, now, usual in _tiers(here, there):
        path = f"network.{name}"
        rates = (now.bandwidth_Bps, usual.bandwidth_Bps)
        yield _quantity(f"{path}.bandwidth", f"{label} bandwidth of a device", "bandwidth", *rates, edited)
        yield _latency(f"{path}.latency", f"{label} latency added to each hop", now, edited)
    precision = subject.plan.precision
    for path, label, dimension in (
        (f"device.peak.{precision}", f"peak {precision} of a device", "flops"),
        ("device.memory.size", "memory of a device", "bytes"),
        ("device.memory.bandwidth", "memory bandwidth", "bandwidth"),
        ("device.price.hour", "price of a device", "price_rate"),
    ):
        fact, first = (_device_fact(one, path) for one in (here, there))
        if fact is not None and first is not None:
            yield _quantity(path, label, dimension, fact, first, edited)


def _most_nodes(cluster: Cluster) -> int:
    """Nodes that a slider goes to: 2,048 of them, or what the outermost network joins."""
    joined = cluster.tiers[-1].domain if cluster.tiers else cluster.node_devices
    return min(2048, joined // cluster.node_devices) if joined is not None else 2048


def _tiers(here: Cluster, there: Cluster) -> Iterator[tuple[str, str, Tier, Tier]]:
    """The outermost and the innermost network: (name of the edit, label, now, without edits)."""
    if not here.tiers or len(here.tiers) != len(there.tiers):
        return
    outer = next((i for i in reversed(range(len(here.tiers))) if here.tiers[i].network), len(here.tiers) - 1)
    yield "inter", "between nodes:", here.tiers[outer], there.tiers[outer]
    if outer:
        yield "intra", "inside a node:", here.tiers[0], there.tiers[0]


def _latency(path: str, label: str, tier: Tier, edited: set[str]) -> Control:
    """A slider over the latency that a network adds to that of its kind of link; at its start, none."""
    numbers = [0.0, *(units.parse(value, "time") for value in LATENCIES)]
    now = tier.latency_s or 0.0
    at = min(range(len(numbers)), key=lambda i: abs(numbers[i] - now))
    value = _written(now, "time") if now else "0s"
    return Control(
        path=path,
        label=label,
        group="cluster",
        values=("", *LATENCIES),
        at=at,
        value=value,
        edited=path in edited,
    )


def _device_fact(cluster: Cluster, path: str) -> float | None:
    device = cluster.device
    if path.startswith("device.peak."):
        return device.peak_flops.get(path.removeprefix("device.peak."))
    facts = {
        "device.memory.size": device.memory_bytes,
        "device.memory.bandwidth": device.memory_bandwidth_Bps,
        "device.price.hour": device.price_per_s,
    }
    return facts[path]


def _quantity(path: str, label: str, dimension: str, now: float, usual: float, edited: set[str]) -> Control:
    """A slider over a quantity, by equal factors."""
    values = _places(usual, dimension)
    numbers = [units.parse(value, dimension) for value in values]
    nearest = min(range(len(numbers)), key=lambda i: abs(numbers[i] / now - 1) if now else i)
    return Control(
        path=path,
        label=label,
        group="device" if path.startswith("device") else "cluster",
        values=values,
        at=nearest,
        value=_written(now, dimension),
        edited=path in edited,
    )


@lru_cache(maxsize=256)
def _places(usual: float, dimension: str) -> tuple[str, ...]:
    """Values round the usual one, from a sixteenth of it to sixteen times as much."""
    half = PLACES // 2
    factors = [FAR ** ((i - half) / half) for i in range(PLACES + 1)]
    return tuple(dict.fromkeys(_written(usual * factor, dimension) for factor in factors))


def _written(value: float, dimension: str) -> str:
    return units.show(value, dimension).replace(" ", "")


def _count(path: str, label: str, now: int, values: Sequence[int], edited: set[str]) -> Control:
    at = min(range(len(values)), key=lambda i: abs(values[i] - now))
    return Control(
        path=path,
        label=label,
        group="cluster",
        values=tuple(map(str, values)),
        at=at,
        value=str(now),
        edited=path in edited,
    )


def _doublings(most: int) -> list[int]:
    return [2**i for i in range(max(1, most).bit_length())]


# -- plan ------------------------------------------------------------------------------------------


def _plan_controls(scenario: Scenario, subject: Subject) -> Iterator[Control]:
    plan = subject.plan
    sized = subject.model if isinstance(subject.model, Transformer) else None
    for name, label, values in _sizes(subject, sized):
        yield _size(name, label, getattr(plan, name), values)
    yield _choice("sharding", "data-parallel ranks share", _words(tuple(Sharding)[1:]), plan.sharding)
    relaxed = "" if plan.relax.plain else str(plan.relax).split()[0]
    yield _choice("sync", "gradient exchange", {"": "all-reduce", **_words(relaxed_words())}, relaxed)
    yield _choice("recompute", "recompute activations", _keyed("recompute", tuple(Recompute)), plan.recompute)
    said = {key for word in scenario.plan.split() for key in Plan.said(word)}
    if sized is not None:
        yield _choice("precision", "precision", _words(PLAN_PRECISIONS), plan.precision)
        yield _choice("offload", "offload to the host", _keyed("offload", tuple(Offload)), plan.offload)
        yield _choice("sp", "sequence parallel", {"": "no", "sp": "yes"}, "sp" if plan.sp else "")
    else:
        precisions = {"": "as captured", **_words(("fp32", "tf32", "bf16", "fp16", "amp_bf16", "amp_fp16"))}
        yield _choice("precision", "precision", precisions, plan.precision if "precision" in said else "")
    if plan.pp > 1:
        yield _choice("schedule", "pipeline schedule", {"": "usual", **_words(SCHEDULES)}, plan.schedule)


def _sizes(subject: Subject, sized: Transformer | None) -> Iterator[tuple[str, str, list[int]]]:
    """Sizes of a plan that a slider sets: (field, label, values)."""
    devices = subject.cluster.device_count
    yield "gbs", "batch: samples of a step", _doublings(65_536)
    yield "mbs", "micro-batch of a device", _doublings(1024 if sized is None else 64)
    if sized is None:
        yield "pp", "pipeline stages", [n for n in (1, 2, 4, 8, 16) if n <= devices]
        return
    yield "seq", "sequence: tokens of a sample", [2**i for i in range(8, 20)]
    yield "tp", "tensor parallel", [n for n in divisors(sized.heads) if n <= min(64, devices)]
    yield "pp", "pipeline stages", [n for n in divisors(sized.layers) if n <= min(128, devices)]
    if subject.plan.pp > 1:
        yield (
            "vpp",
            "chunks of a stage",
            [n for n in divisors(sized.layers // subject.plan.pp or 1) if n <= 16],
        )
    yield "cp", "context parallel", [n for n in _doublings(64) if n <= devices]
    if sized.experts:
        yield "ep", "expert parallel", [n for n in divisors(sized.experts) if n <= devices]


def _size(name: str, label: str, now: int, values: Sequence[int]) -> Control:
    """A slider over a size; the place is the nearest where the plan leaves the size open (0)."""
    listed = values or [1]
    at = min(range(len(listed)), key=lambda i: abs(listed[i] - max(1, now)))
    return Control(
        path=f"plan.{name}",
        label=label,
        group="plan",
        values=tuple(f"{name}={n}" for n in listed),
        at=at,
        value=str(now) if now else "auto",
    )


def _choice(name: str, label: str, words: dict[str, str], now: str) -> Control:
    """A list of words; `words`: what is written into the plan -> what is shown."""
    values = [word for word, shown in words.items() if now in (word, shown)]
    return Control(
        path=f"plan.{name}",
        label=label,
        group="plan",
        values=tuple(words),
        shown=tuple(words.values()),
        at=list(words).index(values[0]) if values else 0,
        value=now,
    )


def _words(words: Iterable[str]) -> dict[str, str]:
    return {str(word): str(word) for word in words}


def _keyed(key: str, words: Sequence[str]) -> dict[str, str]:
    return {f"{key}={word}": str(word) for word in words}
