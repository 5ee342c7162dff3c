"""A cluster: nodes of devices, and the nested networks that join them, each number with its source.

Facts come from TOML (`catalog/clusters/*.toml`, or a user's own file for a cluster that does not exist):

    name = "my-pod"
    device = "h100-sxm"                # a device of the catalog or a .toml file
    nodes = 4
    [node]
    devices = 8
    [tier.nvswitch]                    # tiers from the innermost outwards
    kind = "nvswitch"
    domain = 8                         # devices that this tier joins; left out: all of the cluster
    bandwidth = "450 GB/s"             # of one device, in each direction
    features = ["nvls"]
    [tier.network]
    kind = "roce"
    bandwidth = "12.5 GB/s"            # what one device can use by itself ...
    node_bandwidth = "50 GB/s"         # ... and what the devices of a node have together, where they share it
    oversubscription = 2               # a fat tree that narrows by this factor above its inner domains

`like = "dgx-h100"` takes what is not given from another cluster. Bandwidth is a line rate; what a
library reaches of it, and latencies that no file gives, are constants of the kind of link
(`cost/collectives.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.errors import SpecError, nearest
from paceline.spec import checks
from paceline.spec.device import Device
from paceline.spec.facts import Fact, FactReader, read_text

#: kinds of link; those of `NETWORKS` leave the node through a NIC
NETWORKS = ("infiniband", "roce", "ethernet", "socket", "efa", "slingshot", "aries", "omnipath")
LINKS = ("nvlink", "nvswitch", "xgmi", "ici", "pcie", "qpi", "shm", "loopback")
#: how the devices of a tier are joined; it says what a part of a domain can use of a device's links
TOPOLOGIES = ("switch", "fat-tree", "dragonfly", "mesh", "cube-mesh", "torus-2d", "torus-3d")
#: `nvls` and `sharp` reduce and multicast inside the switches
FEATURES = ("nvls", "sharp", "rails")

#: keys of [tier.NAME] that are facts -> (attribute, dimension)
TIER_FIELDS: dict[str, tuple[str, str]] = {
    "domain": ("domain", "count"),
    "bandwidth": ("bandwidth_Bps", "bandwidth"),
    "node_bandwidth": ("node_bandwidth_Bps", "bandwidth"),
    "latency": ("latency_s", "time"),
    "oversubscription": ("oversubscription", "count"),
}
_FIELDS = {"node.devices": "count", "stragglers.cv": "fraction"}
_TIER_TEXTS: dict[str, type] = {"kind": str, "topology": str, "features": list}
_TEXT_KEYS = {"name", "title", "device", "nodes", "like", "aliases", "notes"}
_SECTIONS = {"sources", "node", "tier", "stragglers", "mix"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One level of the network: what joins the domains of the tier inside it (the devices, for the
    innermost).
    """

    name: str
    kind: str
    #: B/s that one device can use by itself, in each direction
    bandwidth_Bps: float
    #: devices that the tier joins; None: all of the cluster
    domain: int | None = None
    #: B/s that the devices of one node have together, in each direction; None: each has its own
    node_bandwidth_Bps: float | None = None
    #: seconds of one hop; None: that of the kind
    latency_s: float | None = None
    #: by how much the tier narrows what leaves its inner domains
    oversubscription: float = 1.0
    topology: str = "switch"
    features: tuple[str, ...] = ()

    @property
    def network(self) -> bool:
        """Whether it leaves the node."""
        return self.kind in NETWORKS

    def sped_up(self, factor: float) -> Tier:
        """The tier with so many times the bandwidth."""
        node = self.node_bandwidth_Bps
        return replace(
            self,
            bandwidth_Bps=factor * self.bandwidth_Bps,
            node_bandwidth_Bps=None if node is None else factor * node,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Where the ranks `base + i * stride` of a process group sit."""

    size: int
    stride: int = 1
    base: int = 0
    #: members that share a domain of each tier, from the innermost outwards (the most, where they do not
    #: divide)
    members: tuple[int, ...]
    #: whether the other groups of the same mesh dimension communicate at the same time
    concurrent: bool = True

    @property
    def ranks(self) -> range:
        return range(self.base, self.base + self.size * self.stride, self.stride)

    def fan(self, tier: int) -> int:
        """Inner domains that one domain of this tier joins for the group; 1 where it does not need the
        tier.
        """
        return math.ceil(self.members[tier] / (self.members[tier - 1] if tier else 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes of equal make (`mix` names the exceptions) and the tiers that join their devices."""

    name: str
    title: str
    device: Device
    node_devices: int
    nodes: int = 1
    tiers: tuple[Tier, ...]
    #: standard deviation of the ranks' step times over their mean
    straggler_cv: float = 0.0
    #: (device, nodes that hold it instead of `device`)
    mix: tuple[tuple[Device, int], ...] = ()
    aliases: tuple[str, ...] = ()
    notes: str = ""
    #: provenance by TOML path, such as `tier.network.bandwidth`
    facts: Mapping[str, Fact] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.names("cluster", self)

    @staticmethod
    def parse(text: str) -> Cluster:
        """The cluster that a user writes: `32xdgx-h100`, `4x8xh100-sxm@400Gb/s/gpu`, `pod.toml` (see
        `catalog.clusters.get`).
        """
        from paceline.catalog import clusters

        return clusters.get(text)

    @property
    def device_count(self) -> int:
        return self.nodes * self.node_devices

    @property
    def devices(self) -> tuple[tuple[Device, int], ...]:
        """(device, nodes that hold it), the usual one first."""
        return ((self.device, self.nodes - sum(count for _, count in self.mix)), *self.mix)

    def domain(self, tier: int) -> int:
        """Devices in one domain of a tier."""
        return min(self.tiers[tier].domain or self.device_count, self.device_count)

    def scaled(self, times: int) -> Cluster:
        """This cluster `times` over, in one network."""
        if times < 1:
            raise SpecError(f"a cluster has at least one node, got {times} x {self.name}")
        most = self.tiers[-1].domain if self.tiers else 1
        if most is not None and times * self.device_count > most:
            raise SpecError(
                f"{times} x {self.name} are {times * self.device_count} devices, but its outermost tier joins"
                f" {most}"
            )
        mix = tuple((device, count * times) for device, count in self.mix)
        return replace(
            self, name=f"{times}x{self.name}" if times > 1 else self.name, nodes=self.nodes * times, mix=mix
        )

    def priced(self, per_s: float) -> Cluster:
        """This cluster at so many USD per second of each device, whatever the catalog says."""
        if not 0 < per_s < math.inf:
            raise SpecError(f"a price is above zero, got {per_s:g} USD per second of a device")
        fact = Fact(value=per_s, kind="declared", source="--price")

        def at(device: Device) -> Device:
            return replace(device, price_per_s=per_s, facts={**device.facts, "price.hour": fact})

        mix = tuple((at(device), nodes) for device, nodes in self.mix)
        return replace(self, device=at(self.device), mix=mix)

    def group(self, size: int, stride: int = 1, base: int = 0, *, concurrent: bool = True) -> Group:
        """The placement of a process group whose ranks are `base + i * stride`.

        The other groups of its mesh dimension (those that start at the ranks it skips) are taken to
        communicate at the same time and to share NICs with it, unless `concurrent` is false.
        """
        if size < 1 or stride < 1 or base < 0:
            raise SpecError(
                f"a group has a size and a stride of at least 1 and a base of at least 0, got {size},"
                f" {stride}, {base}"
            )
        needed = base + (size - 1) * stride + 1
        if needed > self.device_count:
            raise SpecError(
                f"a group of {size} ranks with stride {stride} from rank {base} needs {needed} devices;"
                f" {self.name} has {self.device_count}"
            )
        members = [self._members(i, size, stride, base) for i in range(len(self.tiers))]
        return Group(size=size, stride=stride, base=base, members=tuple(members), concurrent=concurrent)

    def _members(self, tier: int, size: int, stride: int, base: int) -> int:
        """The most ranks of a group in one domain of a tier."""
        domain = self.domain(tier)
        last = base + (size - 1) * stride
        if base // domain == last // domain:
            return size
        whole = math.ceil(domain / stride)
        if domain % stride == 0 and base % domain == base % stride:
            return min(size, whole)
        counts = [0] * (last // domain + 1)
        for rank in range(base, last + 1, stride):
            counts[rank // domain] += 1
        return max(counts)

    def uplink(self, group: Group, tier: int) -> float:
        """B/s, each way, that a group's members in one inner domain have together into a tier: line rates, no
        losses.
        """
        level = self.tiers[tier]
        inner = group.members[tier - 1] if tier else 1
        total = inner * level.bandwidth_Bps * self._usable(group, tier)
        if level.node_bandwidth_Bps is not None:
            in_node = min(inner, math.ceil(self.node_devices / group.stride))
            shared = level.node_bandwidth_Bps * (in_node / self.node_devices if group.concurrent else 1.0)
            total = min(total, shared * math.ceil(inner / in_node))
        return total / level.oversubscription

    def _usable(self, group: Group, tier: int) -> float:
        """The share of a device's links that lead to other members, where links are not switched."""
        topology, fan = self.tiers[tier].topology, group.fan(tier)
        whole = max(self.domain(tier) // (self.domain(tier - 1) if tier else 1), fan)
        if fan <= 1 or whole <= 1:
            return 1.0
        if topology == "mesh":
            return (fan - 1) / (whole - 1)
        # two quads: a quarter of the links to each neighbour of the quad, a quarter to the other quad
        if topology == "cube-mesh":
            return min(1.0, (fan - 1) / 4)
        if topology.startswith("torus"):
            axes = int(topology[-2])
            return min(1.0, max(1, math.ceil(axes * math.log(fan) / math.log(whole) - 1e-9)) / axes)
        return 1.0


def fact_dimension(path: str) -> str:
    """The dimension of a fact, such as `tier.network.bandwidth`."""
    return _FIELDS[path] if path in _FIELDS else TIER_FIELDS[path.rpartition(".")[2]][1]


def read(path: Path | str, clusters: Callable[[str], Cluster], devices: Callable[[str], Device]) -> Cluster:
    """The cluster described by a TOML file; `clusters` resolves its `like`, `devices` its `device`."""
    return parse(read_text(path, "cluster"), str(path), clusters, devices)


def parse(
    text: str, where: str, clusters: Callable[[str], Cluster], devices: Callable[[str], Device]
) -> Cluster:
    """The cluster described by TOML `text`; messages name `where`, the line and the key."""
    reader = _Reader(text, where, _TEXT_KEYS, _SECTIONS, {"nodes": int, "aliases": list})
    try:
        base = clusters(reader.text("like")) if "like" in reader.data else None
    except RecursionError:
        raise reader.error("like", f"{reader.data['like']!r} leads back to this cluster") from None
    return reader.cluster(base, devices)


class _Reader(FactReader):
    """Turns parsed TOML into a Cluster."""

    def cluster(self, base: Cluster | None, devices: Callable[[str], Device]) -> Cluster:
        facts: dict[str, Fact] = dict(base.facts) if base else {}
        for path, dimension in _FIELDS.items():
            section, leaf = path.split(".")
            for key, raw in self.data.get(section, {}).items():
                if key != leaf:
                    raise self.error(
                        f"{section}.{key}", f"unknown key {key!r}; allowed in [{section}]: {leaf}"
                    )
                facts[path] = self.fact(path, raw, dimension)
        if "device" not in self.data and base is None:
            raise self.error("device", "missing: name a device of the catalog or a .toml file")
        if "node.devices" not in facts:
            raise self.error("node", "missing node.devices: how many devices a node holds")
        tiers = {tier.name: tier for tier in base.tiers} if base else {}
        for name, table in self.data.get("tier", {}).items():
            self.check(f"tier.{name}", table, dict)
            tiers[name] = self.tier(name, table, tiers.get(name), facts)
        named = self.text("device") if "device" in self.data else ""
        device = base.device if base and "device" not in self.data else devices(named)
        cluster = Cluster(
            name=self.text("name", Path(self.where).stem),
            title=self.text("title", self.text("name", Path(self.where).stem)),
            device=device,
            node_devices=self.whole("node.devices", facts["node.devices"].value),
            nodes=self.data.get("nodes", base.nodes if base else 1),
            tiers=tuple(tiers.values()),
            straggler_cv=facts["stragglers.cv"].value if "stragglers.cv" in facts else 0.0,
            mix=self.mix(base, devices),
            aliases=tuple(self.data.get("aliases", ())),
            notes=self.text("notes", ""),
            facts=facts,
        )
        self.sane(cluster)
        return cluster

    def tier(self, name: str, table: Mapping[str, Any], base: Tier | None, facts: dict[str, Fact]) -> Tier:
        path = f"tier.{name}"
        values: dict[str, Any] = {}
        for key, raw in table.items():
            if key in TIER_FIELDS:
                attribute, dimension = TIER_FIELDS[key]
                facts[f"{path}.{key}"] = self.fact(f"{path}.{key}", raw, dimension)
                values[attribute] = facts[f"{path}.{key}"].value
            elif key in _TIER_TEXTS:
                self.check(f"{path}.{key}", raw, _TIER_TEXTS[key])
                values[key] = tuple(raw) if key == "features" else raw
            else:
                raise self.unknown(f"{path}.{key}", "key", key, (*_TIER_TEXTS, *TIER_FIELDS))
        if "domain" in values:
            values["domain"] = self.whole(f"{path}.domain", values["domain"])
        for key, words in (("kind", (*LINKS, *NETWORKS)), ("topology", TOPOLOGIES), ("features", FEATURES)):
            for word in values.get(key, ()) if key == "features" else filter(None, [values.get(key)]):
                if word not in words:
                    raise self.unknown(f"{path}.{key}", key.removesuffix("s"), word, words)
        if base is not None:
            return replace(base, **values)
        for key in ("kind", "bandwidth"):
            if key not in table:
                raise self.error(path, f"missing {key}")
        return Tier(name=name, **values)

    def unknown(self, path: str, noun: str, word: str, allowed: Sequence[str]) -> SpecError:
        near = nearest(word, allowed)
        return self.error(
            path,
            f"unknown {noun} {word!r}; "
            + (f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(allowed)}"),
        )

    def whole(self, path: str, value: float) -> int:
        if value != int(value):
            raise self.error(path, f"expected a whole number, got {value:g}")
        return int(value)

    def mix(self, base: Cluster | None, devices: Callable[[str], Device]) -> tuple[tuple[Device, int], ...]:
        if "mix" not in self.data:
            return base.mix if base else ()
        for name, count in self.data["mix"].items():
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise self.error(f"mix.{name}", f"expected a number of nodes, got {count!r}")
        return tuple((devices(name), count) for name, count in self.data["mix"].items())

    def sane(self, cluster: Cluster) -> None:
        if isinstance(cluster.nodes, bool) or cluster.nodes < 1:
            raise self.error("nodes", f"must be at least 1, got {cluster.nodes!r}")
        if sum(count for _, count in cluster.mix) > cluster.nodes:
            raise self.error("mix", f"names more nodes than the {cluster.nodes} of the cluster")
        if not cluster.tiers and cluster.device_count > 1:
            raise self.error("tier", "missing: give at least one [tier.NAME], the innermost first")
        for inner, outer in pairwise(cluster.tiers):
            if inner.domain is None:
                raise self.error(
                    f"tier.{inner.name}", "missing domain: only the outermost tier may join the whole cluster"
                )
            if outer.domain is not None and (outer.domain <= inner.domain or outer.domain % inner.domain):
                raise self.error(
                    f"tier.{outer.name}.domain",
                    f"{outer.domain} devices are not made of domains of {inner.domain} ({inner.name})",
                )
        if (
            cluster.tiers
            and cluster.tiers[-1].domain is not None
            and cluster.tiers[-1].domain < cluster.device_count
        ):
            last = cluster.tiers[-1]
            raise self.error(
                f"tier.{last.name}.domain",
                f"{last.domain} devices are joined, but the cluster has {cluster.device_count}",
            )
