"""Measured collectives: each row of the three sources as an operation on a group of a cluster, from its
columns alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from paceline.bench.validate.case import Row, csv_rows, find, json_rows
from paceline.catalog import clusters, devices
from paceline.cost.collectives import bus_factor
from paceline.spec.cluster import Cluster, Group, Tier
from paceline.spec.device import Device


@dataclass(frozen=True, slots=True)
class MeasuredCollective:
    """One row: a collective of `size` bytes took `seconds`; or why it cannot be predicted."""

    name: str
    system: str
    device: str
    skip: str | None = None
    op: str = ""
    size: float = 0.0
    seconds: float = 0.0
    library: str = "nccl"
    cluster: Cluster | None = None
    group: Group | None = None

    @property
    def origin(self) -> str:
        """Who measured it: what cross-validation leaves out, with every system of theirs (of gloo, which one
        source measured, an operation).
        """
        return self.system if self.library == "gloo" else self.system.split("_")[0].split()[0]


_COLUMNS = (
    "case_id",
    "dataset",
    "collective",
    "library",
    "gpu",
    "n_ranks",
    "n_nodes",
    "gpus_per_node",
    "intra_node",
    "inter_node",
    "inter_node_gbps_per_node",
    "size_bytes",
    "time_us",
    "busbw_GBps",
    "algo",
    "notes",
)
#: what the column `gpu` calls a device -> the catalog's name; the first that matches
_GPUS = (
    (r"GB300", "gb300"),
    (r"GB200", "gb200"),
    (r"B300", "b300"),
    (r"B200", "b200"),
    (r"GH200", "gh200"),
    (r"H200", "h200"),
    (r"H100 PCIe", "h100-pcie"),
    (r"H100", "h100-sxm"),
    (r"H20\b", "h20"),
    (r"A100.*PCIe", "a100-pcie-80gb"),
    (r"A100.*40GB", "a100-sxm-40gb"),
    (r"A100", "a100-sxm-80gb"),
    (r"A6000|A40|3090", "rtx3090"),
    (r"V100.*PCIe", "v100-pcie-16gb"),
    (r"V100", "v100-sxm-16gb"),
    (r"P100", "p100-sxm"),
    (r"MI355X", "mi355x"),
    (r"MI325X", "mi325x"),
    (r"MI300X", "mi300x"),
    (r"MI250X", "mi250x"),
    (r"\bT4\b", "t4"),
    (r"\bL40S\b", "l40s"),
    (r"\bL4\b", "l4"),
)
#: Gb/s per node where a row names the network but not its rate: what this node is sold with
_USUAL_GBPS = {
    "h100-sxm": 3200,
    "h200": 3200,
    "b200": 3200,
    "gb200": 1600,
    "gb300": 3200,
    "a100-sxm-80gb": 1600,
    "mi300x": 3200,
    "mi355x": 3200,
}
_NETWORKS = (
    (r"EFA", "efa"),
    (r"RoCE", "roce"),
    (r"InfiniBand|\bIB\b|NDR|HDR|Quantum", "infiniband"),
    (r"Slingshot", "slingshot"),
    (r"Ethernet|GbE|TCP|socket", "ethernet"),
)
_OPS = {"alltoall": "all_to_all", "sendrecv": "send_recv"}
#: a row about a network that was known to be wrong is no target
_BROKEN = re.compile(r"misconfigured|degraded", re.IGNORECASE)


def published(folder: Path) -> Iterator[MeasuredCollective] | None:
    """nccl-tests and rccl-tests tables of published/collectives_busbw.csv."""
    path = find(folder / "published", "collectives_busbw.csv")
    return map(_published_row, csv_rows(path, _COLUMNS)) if path is not None else None


def _published_row(row: Row) -> MeasuredCollective:
    name, system = row["case_id"], row["dataset"]
    known = next((device for pattern, device in _GPUS if re.search(pattern, row["gpu"], re.IGNORECASE)), None)
    size = float(row["size_bytes"] or 0)
    ranks, nodes = int(row["n_ranks"]), int(row["n_nodes"])
    op = _OPS.get(str(row["collective"]), str(row["collective"]))
    factor = bus_factor(op, ranks)
    seconds = (
        float(row["time_us"]) * 1e-6
        if row["time_us"]
        else size * factor / (float(row["busbw_GBps"] or 0) * 1e9 or float("inf"))
    )
    skip = None
    if _BROKEN.search(system + row["notes"]):
        skip = "network known to be misconfigured or degraded"
    elif known is None or row["notes"].startswith("hardware not stated"):
        skip = "device not stated"
    elif (
        nodes > 1
        and (not row["inter_node"] or "not stated" in row["inter_node"])
        and not row["inter_node_gbps_per_node"]
    ):
        skip = "network not stated"
    elif not seconds or not size:
        skip = "time not given"
    if skip is not None or known is None:
        return MeasuredCollective(name, system, known or "unknown", skip)
    per_node = min(int(row["gpus_per_node"]), 64)
    cluster = _published_cluster(
        known,
        ranks,
        nodes,
        per_node,
        row["intra_node"],
        row["inter_node"],
        row["inter_node_gbps_per_node"],
        "NVLS off" in row["algo"],
    )
    library = "rccl" if devices.get(known).vendor == "amd" else "nccl"
    return MeasuredCollective(
        name, system, known, None, op, size, seconds, library, cluster, cluster.group(ranks, concurrent=False)
    )


@cache
def _published_cluster(
    name: str, ranks: int, nodes: int, per_node: int, intra: str, inter: str, gbps: str, nvls_off: bool
) -> Cluster:
    device = devices.get(name)
    inside = _inside(device, ranks, nodes, per_node, intra)
    if nvls_off:
        inside = replace(inside, features=())
    tiers = [inside] if per_node > 1 else []
    if (inside.domain or 0) < ranks:
        kind = next(
            (kind for pattern, kind in _NETWORKS if re.search(pattern, inter, re.IGNORECASE)), "infiniband"
        )
        rate = float(gbps or _USUAL_GBPS.get(name, 400)) * 1e9 / 8
        sharp = ("sharp",) if "SHARP" in inter else ()
        tiers.append(
            Tier(
                name="network",
                kind=kind,
                bandwidth_Bps=rate / per_node,
                node_bandwidth_Bps=rate,
                features=sharp,
            )
        )
    return Cluster(
        name=f"{nodes}x{per_node}x{name}",
        title=inter,
        device=device,
        node_devices=per_node,
        nodes=nodes,
        tiers=tuple(tiers),
    )


def _inside(device: Device, ranks: int, nodes: int, per_node: int, intra: str) -> Tier:
    """What joins the devices of a node, or of the racks of one NVLink domain."""
    if "shared memory" in intra:
        return Tier(
            name="host", kind="shm", domain=per_node, bandwidth_Bps=device.host_bandwidth_Bps or 15.75e9
        )
    tier = clusters.link(device, per_node)
    if "bridge" in intra:
        return replace(tier, kind="nvlink", features=())
    if "NVL72" in intra:
        racks = 2 if "two racks" in intra else 1
        return replace(tier, domain=-(-nodes // racks) * per_node if racks > 1 else min(72, ranks))
    return tier


#: folder of kernels_fp16 -> the cluster it was measured on
_FP16_CLUSTERS = {"a100_sxm4_80gb": "perlmutter-a100-sockets", "gh200": "vista-gh200"}
_FP16_OPS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "p2p": "send_recv",
    "reducescatter": "reduce_scatter",
}
FP16_BYTES = 2


def fp16(folder: Path) -> Iterator[MeasuredCollective] | None:
    """NCCL inside torch.distributed on Perlmutter and Vista: kernels_fp16/*/nccl_*."""
    root = folder / "kernels_fp16"
    paths = sorted(root.glob("*/nccl_*.csv.gz")) + sorted(root.glob("*/nccl_*.csv"))
    return (row for path in paths for row in _fp16_rows(path)) if paths else None


def _fp16_rows(path: Path) -> Iterator[MeasuredCollective]:
    stem = path.name.split(".")[0]
    op = next((op for word, op in _FP16_OPS.items() if word in stem), None)
    system = _FP16_CLUSTERS.get(path.parent.name, "")
    for number, row in enumerate(csv_rows(path, ("shape", "nodes", "GPUsPerNode", "dur(us)")), 1):
        name = f"{path.parent.name}/{path.name}:{number}"
        nodes, each = int(float(row["nodes"])), int(float(row["GPUsPerNode"]))
        seconds, n = float(row["dur(us)"]) * 1e-6, nodes * each
        if op is None or not system:
            yield MeasuredCollective(name, path.parent.name, path.parent.name, "unknown collective or system")
            continue
        if not re.search(r"_\d+_\d+$", stem):
            yield MeasuredCollective(
                name, system, path.parent.name, "repeats the rows of one file per placement"
            )
            continue
        cluster, group = _placement(system, nodes, each)
        # torch's all-gather takes the shard of one rank
        size = float(row["shape"]) * FP16_BYTES * (n if op == "all_gather" else 1)
        line = min(cluster.uplink(group, i) for i in range(len(cluster.tiers)) if group.fan(i) > 1)
        if size * bus_factor(op, n) / seconds > 1.05 * line:
            yield MeasuredCollective(name, system, cluster.device.name, f"{op}: faster than the line rate")
        else:
            place = f"{system} {'inside' if nodes == 1 else 'between'} nodes"
            yield MeasuredCollective(
                name, place, cluster.device.name, None, op, size, seconds, "nccl", cluster, group
            )


@cache
def _placement(system: str, nodes: int, each: int) -> tuple[Cluster, Group]:
    """The first `each` devices of `nodes` nodes: a run that uses a part of a node leaves the rest of it
    idle.
    """
    cluster = clusters.get(system)
    stride = cluster.node_devices if each == 1 else 1
    if 1 < each < cluster.node_devices and nodes > 1:  # ranks 0 1 4 5 ...: as if nodes had no more devices
        inner = cluster.tiers[0]
        part = inner.bandwidth_Bps * (
            (each - 1) / (cluster.node_devices - 1) if inner.topology == "mesh" else 1
        )
        tiers = (replace(inner, domain=each, bandwidth_Bps=part), *cluster.tiers[1:])
        cluster = replace(cluster, node_devices=each, tiers=tiers)
    cluster = cluster.scaled(nodes)
    return cluster, cluster.group(nodes * each, stride, concurrent=False)


def gloo(folder: Path) -> Iterator[MeasuredCollective] | None:
    """Gloo between processes of one host: h200/gloo_loopback_16core.jsonl."""
    path = find(folder / "h200", "gloo_loopback_16core.jsonl")
    if path is None:
        return None
    return (
        _gloo_row(number, row) for number, row in enumerate(json_rows(path), 1) if row["kind"] == "collective"
    )


def _gloo_row(number: int, row: Row) -> MeasuredCollective:
    world = row["world"]
    cluster = loopback(world)
    return MeasuredCollective(
        f"gloo:{number}",
        f"gloo {row['op']}",
        "cpu",
        None,
        row["op"],
        float(row["bytes"]),
        row["s"],
        "gloo",
        cluster,
        cluster.group(world),
    )


@cache
def loopback(world: int) -> Cluster:
    """Processes of one host that talk over its loopback device."""
    host = devices.get("haswell-cori")
    tier = Tier(name="host", kind="loopback", bandwidth_Bps=host.memory_bandwidth_Bps)
    return Cluster(
        name=f"{world} processes", title="one host", device=host, node_devices=max(world, 1), tiers=(tier,)
    )
