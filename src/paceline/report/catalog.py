"""The catalogs as tables and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from paceline.catalog import models
from paceline.cost import money
from paceline.report.fitting import FittedTable
from paceline.spec.cluster import Cluster, Tier, fact_dimension
from paceline.spec.device import DTYPES, FIELDS, Device, Fact
from paceline.spec.framework import Framework
from paceline.units import show

_NONE = "-"
_TEXTS = ("name", "title", "vendor", "architecture", "kind", "year", "notes")


# -- devices -------------------------------------------------------------------------------------


def device_table(devices: Sequence[Device]) -> RenderableType:
    """One line per device: dense TFLOP/s by precision, memory, bandwidth, power."""
    columns = ("name", "title", "architecture", "fp32", "tf32", "16 bit", "fp8", "memory", "bandwidth", "TDP")
    caption = "fp32 to fp8: dense TFLOP/s; `paceline devices NAME` gives every fact and its source"
    return FittedTable(
        columns,
        [_device_row(device) for device in devices],
        ("architecture", "title", "TDP"),
        caption=caption,
    )


def _device_row(device: Device) -> list[str]:
    peaks = device.peak_flops
    half = peaks.get("bf16", peaks.get("fp16"))
    return [
        device.name,
        device.title,
        device.architecture,
        *(_tflops(p) for p in (peaks.get("fp32"), peaks.get("tf32"), half, peaks.get("fp8"))),
        show(device.memory_bytes, "bytes"),
        show(device.memory_bandwidth_Bps, "bandwidth"),
        show(device.tdp_w, "power") if device.tdp_w is not None else _NONE,
    ]


def _tflops(peak: float | None) -> str:
    return _NONE if peak is None else f"{peak / 1e12:.4g}"


def device_facts(device: Device) -> RenderableType:
    """Every fact of a device, in its unit, with how it is known and where from."""
    head = Text.assemble(
        (device.name, "bold"),
        f": {device.title}; {device.vendor}, {device.architecture}, {device.kind}"
        + (f", {device.year}" if device.year else ""),
    )
    lines: list[RenderableType] = [head]
    if device.aliases:
        lines.append(Text(f"also called: {', '.join(device.aliases)}"))
    if device.notes:
        lines.append(Text(device.notes, style="dim"))
    lines += _fact_lines([(path, fact, _dimension(path)) for path, fact in _ordered(device)])
    if device.calibration:
        lines.append(
            FittedTable(
                ("calibration", "factor"),
                [[key, f"{value:.4g}"] for key, value in device.calibration.items()],
            )
        )
    return Group(*lines, Text())


def _fact_lines(facts: Sequence[tuple[str, Fact, str]]) -> list[RenderableType]:
    """Facts (path, fact, dimension) as a table that numbers their sources, and the sources below it."""
    sources = {
        source: str(i) for i, source in enumerate(dict.fromkeys(fact.source for _, fact, _ in facts), 1)
    }
    rows = [
        [path, _fact_value(fact, dimension), fact.kind, sources[fact.source]]
        for path, fact, dimension in facts
    ]
    return [
        FittedTable(("fact", "value", "kind", "source"), rows),
        *(Text(f"{number}  {source}", style="dim") for source, number in sources.items()),
    ]


def _fact_value(fact: Fact, dimension: str) -> str:
    """A number in its unit, and its date and age where it has one."""
    return show(fact.value, dimension, 4) + money.as_of(fact.date)


def _dimension(path: str) -> str:
    return "flops" if path.startswith("peak.") else FIELDS[path][1]


def _ordered(device: Device) -> list[tuple[str, Fact]]:
    """Facts in the order in which the format lists them, whatever the order of the file."""
    order = [*(f"peak.{dtype}" for dtype in DTYPES), *FIELDS]
    return sorted(device.facts.items(), key=lambda item: order.index(item[0]))


def device_dict(device: Device) -> dict[str, Any]:
    """Plain data: what the device is, and each fact by its path with SI value, kind and source."""
    return {
        **{key: getattr(device, key) for key in _TEXTS},
        "aliases": list(device.aliases),
        "facts": {path: _fact_dict(fact) for path, fact in _ordered(device)},
        "calibration": dict(device.calibration),
    }


def _fact_dict(fact: Fact) -> dict[str, Any]:
    dated = {"date": fact.date} if fact.date else {}
    return {"value": fact.value, "kind": fact.kind, "source": fact.source, **dated}


# -- frameworks ----------------------------------------------------------------------------------


def framework_table(frameworks: Sequence[Framework]) -> RenderableType:
    """One line per framework: what it is, which models it runs, and how its facts are known."""
    rows = [[found.name, found.title, found.runs, found.kind] for found in frameworks]
    caption = (
        "runs: transformers by their sizes, captured modules, or both; `paceline frameworks NAME` gives every"
        " fact"
    )
    return FittedTable(("name", "title", "runs", "known by"), rows, ("title",), caption=caption)


def framework_facts(framework: Framework) -> RenderableType:
    """Every fact of a framework and where they come from."""
    head = Text.assemble((framework.name, "bold"), f": {framework.title}")
    rows = [
        [key, str(value)]
        for key, value in framework_dict(framework).items()
        if key not in ("name", "title", "source")
    ]
    return Group(head, FittedTable(("fact", "value"), rows), Text(framework.source, style="dim"), Text())


def framework_dict(framework: Framework) -> dict[str, Any]:
    """Plain data: every field of a framework, seconds and bytes."""
    return asdict(framework)


# -- clusters ------------------------------------------------------------------------------------


def cluster_table(clusters: Sequence[Cluster]) -> RenderableType:
    """One line per cluster: what a node holds, and each tier's kind, domain and bandwidth per device and
    direction.
    """
    rows = [
        [
            cluster.name,
            cluster.title,
            cluster.device.name,
            f"{cluster.nodes} x {cluster.node_devices}",
            ", then ".join(map(_tier, cluster.tiers)),
        ]
        for cluster in clusters
    ]
    caption = (
        "tiers from the innermost outwards, bandwidth of one device each way; `paceline clusters NAME` gives"
        " every fact and its source"
    )
    return FittedTable(
        ("name", "title", "device", "nodes", "tiers"), rows, ("title",), ("title", "tiers"), caption=caption
    )


def _tier(tier: Tier) -> str:
    joined = f" of {tier.domain}" if tier.domain else ""
    shared = f" ({show(tier.node_bandwidth_Bps, 'bandwidth')} a node)" if tier.node_bandwidth_Bps else ""
    return f"{tier.kind}{joined} at {show(tier.bandwidth_Bps, 'bandwidth')}{shared}"


def cluster_facts(cluster: Cluster) -> RenderableType:
    """Every fact of a cluster, in its unit, with how it is known and where from."""
    head = Text.assemble(
        (cluster.name, "bold"),
        f": {cluster.title}; {cluster.nodes} x {cluster.node_devices} {cluster.device.name}",
    )
    lines: list[RenderableType] = [head]
    if cluster.aliases:
        lines.append(Text(f"also called: {', '.join(cluster.aliases)}"))
    if cluster.notes:
        lines.append(Text(cluster.notes, style="dim"))
    lines += [
        Text(f"{tier.name}: {_tier(tier)}, {tier.topology}" + "".join(f", {f}" for f in tier.features))
        for tier in cluster.tiers
    ]
    return Group(
        *lines,
        *_fact_lines([(path, fact, fact_dimension(path)) for path, fact in cluster.facts.items()]),
        Text(),
    )


def cluster_dict(cluster: Cluster) -> dict[str, Any]:
    """Plain data: what the cluster is, its tiers in SI units, and each fact by its path."""
    return {
        "name": cluster.name,
        "title": cluster.title,
        "device": cluster.device.name,
        "nodes": cluster.nodes,
        "node_devices": cluster.node_devices,
        "devices": cluster.device_count,
        "straggler_cv": cluster.straggler_cv,
        "mix": {device.name: count for device, count in cluster.mix},
        "aliases": list(cluster.aliases),
        "notes": cluster.notes,
        "tiers": [asdict(tier) for tier in cluster.tiers],
        "facts": {path: _fact_dict(fact) for path, fact in cluster.facts.items()},
    }


# -- models --------------------------------------------------------------------------------------


def model_table() -> RenderableType:
    """One line per model of the catalog."""
    rows = [
        [entry.name, entry.title, f"{entry.parameters:,}", _size(entry), entry.source]
        for entry in map(models.get, models.names())
    ]
    return FittedTable(
        ("name", "title", "parameters", "input", "source"), rows, ("source",), ("title", "source")
    )


def _size(entry: models.ModelEntry) -> str:
    if entry.image:
        return f"{entry.image} x {entry.image}"
    return f"{entry.seq} tokens" if entry.seq else _NONE


def model_dicts() -> list[dict[str, Any]]:
    """Plain data of the catalog's models."""
    keys = ("name", "title", "family", "parameters", "source", "unit", "image", "seq", "optimizer")
    return [
        {**{key: getattr(entry, key) for key in keys}, "aliases": list(entry.aliases)}
        for entry in map(models.get, models.names())
    ]
