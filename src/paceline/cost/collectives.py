"""What collectives cost on a cluster: each algorithm and protocol a line in the size, the library takes the
least.

    seconds(size) = alpha + beta * size + 2 * fill * sqrt(alpha * beta * size)

`alpha` counts the hops one after another, `beta` is the traffic on the narrowest tier over its bandwidth, and
the last term is what filling and draining a pipeline of optimally cut chunks costs: it is why bandwidth rises
so slowly with size. Hops and traffic follow from the algorithm and from where the ranks sit; what a hop takes
and what share of a line rate a library reaches are a few constants per kind of link
(`fitted/collectives.toml`).

Traffic per rank, of a buffer of `size` bytes as nccl-tests counts it (for all-gather and reduce-scatter the
whole, gathered buffer; for gather, scatter and all-to-all what the root or one rank sends or receives in
all):

    ring                2 (n-1)/n for all-reduce, (n-1)/n for reduce-scatter and all-gather, 1 for broadcast
                        and reduce
    tree                up and down: 2 inside a node; between nodes 1 for two of them and 2 for more (two
                        trees, each node inside of one and a leaf of the other)
    nvls                in the NVLink switch: 1 + 1/n each way
    sharp               in the network's switches: 1 each way
    halving-doubling    2 (n-1)/n in 2 log2(n) steps
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.catalog import architectures
from paceline.errors import SpecError, UnknownName
from paceline.spec.cluster import Cluster, Group, Tier

Array = NDArray[np.float64]

OPS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "send_recv",
)
LIBRARIES = ("nccl", "rccl", "gloo", "mpi")
PROTOCOLS = ("ll", "ll128", "simple")
#: share of the bandwidth of `simple` that a protocol's flags leave: every other word, one in sixteen
PAYLOAD = {"ll": 0.5, "ll128": 0.92, "simple": 1.0}
#: parallel aggregated trees (NCCL's PAT): share of the ring's bandwidth, and seconds per rank (the same file)
PAT_SHARE, PAT_RANK_S = 0.75, 2.8e-6
TREE_SHARE = 0.92
#: bytes from which bandwidth counts for more than latency
LARGE = 2.0**20
#: transports that cores drive: what one direction takes the other cannot have, so that two nodes gain nothing
#: by a tree
_HALF_DUPLEX = ("socket", "ethernet", "loopback")
#: operations on lists of tensors, which gloo flattens first
_LISTS = ("all_gather", "reduce_scatter", "all_to_all")


@cache
def nvls_share(architecture: str) -> float:
    """Share of NVLink's rate that multicast in the switches reaches; the least there is where an
    architecture's is not known.
    """
    found = architectures.get(architecture).nvls_share
    return found or min(one.nvls_share for one in architectures.known().values() if one.nvls_share)


@dataclass(frozen=True, slots=True)
class LinkConstants:
    """What a library makes of one kind of link."""

    #: share of the line rate that a ring reaches
    share: float
    #: the same for one sender and one receiver
    p2p: float
    #: seconds of one hop by protocol
    hop_s: Mapping[str, float]
    #: B/s that one device moves at most whatever the line rate, in a ring and to one receiver, for transports
    #: that cores drive
    cap_Bps: float = math.inf
    p2p_cap_Bps: float = math.inf


@dataclass(frozen=True, slots=True)
class LibraryConstants:
    """One library's."""

    #: seconds from the call to the first byte
    base_s: float
    fill: float
    links: Mapping[str, LinkConstants]
    #: what in-switch reduction reaches: of NVLink beyond its share, of that where the domain spans nodes, of
    #: a network
    nvls: float = 1.0
    nvls_nodes: float = 1.0
    sharp: float = 1.0
    #: seconds to set up multicast, and more for each rank that takes part
    nvls_s: float = 0.0
    nvls_rank_s: float = 0.0
    #: seconds per byte of gathering a list of tensors into one buffer and back
    copy: float = 0.0
    #: standard deviation of the logarithm of time, by kind of the outermost link used, from `LARGE` bytes on
    #: and below
    sigma: Mapping[str, float] = field(default_factory=dict)
    sigma_small: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """One way to run a collective: `alpha_s` seconds at least, `beta` seconds per byte."""

    algorithm: str
    protocol: str
    alpha_s: float
    beta: float
    #: how much of a pipeline's filling shows; a message that is not passed on has none
    fill: float = 0.0


@cache
def constants(library: str) -> LibraryConstants:
    """The fitted constants of a library."""
    if library not in LIBRARIES:
        raise UnknownName("collective library", library, LIBRARIES, f"libraries: {', '.join(LIBRARIES)}")
    return from_table(
        tomllib.loads((files("paceline.cost") / "fitted" / "collectives.toml").read_text()), library
    )


def from_table(data: Mapping[str, Any], library: str) -> LibraryConstants:
    """The constants of a library in the tables of a file; RCCL is NCCL on other links."""
    table = data["nccl" if library == "rccl" else library]
    links = {
        kind: LinkConstants(
            **{key: value for key, value in entry.items() if key != "hop_s"},
            hop_s={p: entry["hop_s"][p] for p in PROTOCOLS},
        )
        for kind, entry in table["links"].items()
    }
    return LibraryConstants(**{key: value for key, value in table.items() if key != "links"}, links=links)


@overload
def collective_s(
    op: str, size_bytes: float, group: Group, cluster: Cluster, library: str = "nccl"
) -> float: ...
@overload
def collective_s(
    op: str, size_bytes: Sequence[float] | Array, group: Group, cluster: Cluster, library: str = "nccl"
) -> Array: ...
def collective_s(
    op: str, size_bytes: ArrayLike, group: Group, cluster: Cluster, library: str = "nccl"
) -> float | Array:
    """Seconds of a collective of `size_bytes` (one size or many) over a group."""
    size = np.asarray(size_bytes, dtype=float)
    if (size < 0).any():
        raise SpecError(f"{op}: a buffer has zero bytes or more, got {size.min():g}")
    seconds = times(lines(op, group, cluster, library), size).min(axis=0)
    return float(seconds) if size.ndim == 0 else np.asarray(seconds)


def choice(op: str, size_bytes: float, group: Group, cluster: Cluster, library: str = "nccl") -> AlphaBeta:
    """The algorithm and protocol that a library takes for that size."""
    found = lines(op, group, cluster, library)
    return found[int(times(found, np.asarray(float(size_bytes))).argmin())]


def times(found: Sequence[AlphaBeta], size: Array) -> Array:
    """Seconds of each line (first axis) at each size."""
    shape = (len(found), *(1,) * size.ndim)
    alpha, beta, fill = (
        np.array([getattr(line, name) for line in found]).reshape(shape)
        for name in ("alpha_s", "beta", "fill")
    )
    stream = beta * size
    return np.asarray(alpha + stream + 2 * fill * np.sqrt(alpha * stream))


def bus_factor(op: str, n: int) -> float:
    """What nccl-tests multiplies size / time with to get bus bandwidth."""
    if op == "all_reduce":
        return 2 * (n - 1) / n
    return 1.0 if op in ("broadcast", "reduce", "send_recv") else (n - 1) / n


def sigma(size_bytes: ArrayLike, group: Group, cluster: Cluster, library: str = "nccl") -> Array:
    """Standard deviation of the logarithm of a collective's time, for intervals."""
    known = constants(library)
    kind = outermost(group, cluster)
    large, small = (table.get(kind, table["other"]) for table in (known.sigma, known.sigma_small))
    return np.where(np.asarray(size_bytes) >= LARGE, large, small)


def outermost(group: Group, cluster: Cluster) -> str:
    """The kind of the outermost link that a group uses."""
    return next(
        (cluster.tiers[i].kind for i in reversed(range(len(cluster.tiers))) if group.fan(i) > 1), "none"
    )


@lru_cache(maxsize=4096)
def _lines(op: str, group: Group, cluster: _ById, library: str) -> tuple[AlphaBeta, ...]:
    return tuple(lines_with(op, group, cluster.cluster, library, constants(library)))


@dataclass(frozen=True, eq=False)
class _ById:
    """A cluster as a key: equal where it is the same object, because its facts cannot be hashed."""

    cluster: Cluster

    def __hash__(self) -> int:
        return id(self.cluster)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self.cluster is other.cluster


def lines(op: str, group: Group, cluster: Cluster, library: str = "nccl") -> tuple[AlphaBeta, ...]:
    """Every way a library has to run a collective on this group."""
    return _lines(op, group, _ById(cluster), library)


def lines_with(
    op: str, group: Group, cluster: Cluster, library: str, known: LibraryConstants
) -> list[AlphaBeta]:
    """The same with constants that are not those shipped, for the fit."""
    if op not in OPS:
        raise UnknownName("collective", op, OPS, f"collectives: {', '.join(OPS)}")
    copy = known.copy if op in _LISTS else 0.0
    if group.size == 1:
        return [AlphaBeta("none", "none", known.base_s if library == "gloo" else 0.0, copy)]
    levels = [_level(i, group, cluster, known) for i in range(len(cluster.tiers)) if group.fan(i) > 1]
    place = _Place(op, group.size, levels, known, cluster)
    if op in ("send_recv", "gather", "scatter", "all_to_all"):
        ways = place.direct()
    elif library == "gloo":
        ways = place.gloo()
    elif library == "mpi":
        ways = place.mpi()
    else:
        ways = place.nccl(library)
    return [replace(line, beta=line.beta + copy) for line in ways] if copy else list(ways)


@dataclass(frozen=True, slots=True)
class _Level:
    """A tier that a group uses: how many inner domains it joins, of how many members, at what rate."""

    tier: Tier
    fan: int
    inner: int
    #: B/s of one inner domain's members together, after losses, and of one member sending alone
    uplink: float
    single: float
    hop_s: Mapping[str, float]
    line: float


def _level(i: int, group: Group, cluster: Cluster, known: LibraryConstants) -> _Level:
    tier = cluster.tiers[i]
    link = known.links.get(tier.kind, known.links["other"])
    inner = group.members[i - 1] if i else 1
    line = cluster.uplink(group, i)
    one = cluster.uplink(replace(group, members=(1,) * i + group.members[i:]), i)
    hop = {p: s + (tier.latency_s or 0.0) for p, s in link.hop_s.items()}
    return _Level(
        tier,
        group.fan(i),
        inner,
        min(line * link.share, inner * link.cap_Bps),
        min(one * link.p2p, link.p2p_cap_Bps),
        hop,
        line,
    )


def _up_and_down(level: _Level) -> int:
    """Times that a tree sends a buffer out of one of the domains it joins."""
    return 1 if level.fan == 2 and level.tier.kind not in _HALF_DUPLEX else 2


@dataclass(frozen=True, slots=True)
class _Place:
    """A collective on the tiers it uses, from the innermost outwards."""

    op: str
    n: int
    levels: Sequence[_Level]
    known: LibraryConstants
    cluster: Cluster

    @property
    def inside(self) -> list[_Level]:
        return [level for level in self.levels if not level.tier.network]

    @property
    def outside(self) -> list[_Level]:
        return [level for level in self.levels if level.tier.network]

    def steps(self) -> float:
        """Steps of a ring."""
        return {"all_reduce": 2 * (self.n - 1), "reduce_scatter": self.n - 1, "all_gather": self.n - 1}.get(
            self.op, self.n
        )

    def ring(self, protocols: Sequence[str]) -> Iterator[AlphaBeta]:
        bandwidth = min(level.uplink for level in self.levels)
        traffic = bus_factor(self.op, self.n)
        domains = float(self.n)
        # of the ring's hops, those that stay within one domain of a tier and leave the one inside it
        parts = []
        for level in self.levels:
            parts.append((domains - domains / level.fan, level))
            domains /= level.fan
        for protocol in protocols:
            hop = (
                sum(share * level.hop_s[protocol] for share, level in parts)
                + domains * self.levels[-1].hop_s[protocol]
            )
            yield AlphaBeta(
                "ring",
                protocol,
                self.known.base_s + self.steps() * hop / self.n,
                traffic / (bandwidth * PAYLOAD[protocol]),
                self.known.fill,
            )

    def tree(self, protocols: Sequence[str]) -> Iterator[AlphaBeta]:
        """All-reduce up and down a chain in each node and two trees between nodes."""
        slow = [2 / (level.uplink * TREE_SHARE) for level in self.inside]
        slow += [_up_and_down(level) / (level.uplink * TREE_SHARE) for level in self.outside]
        for protocol in protocols:
            yield AlphaBeta(
                "tree",
                protocol,
                self.known.base_s + 2 * self.depth(protocol),
                max(slow) / PAYLOAD[protocol],
                self.known.fill,
            )

    def depth(self, protocol: str) -> float:
        """Seconds from the leaves to the root."""
        chain = sum((level.fan - 1) * level.hop_s[protocol] for level in self.inside)
        return chain + sum(math.ceil(math.log2(level.fan)) * level.hop_s[protocol] for level in self.outside)

    def in_switch(self) -> Iterator[AlphaBeta]:
        """All-reduce in the NVLink switches, the network's, or both."""
        inside, outside = self.inside, self.outside
        multicast = len(inside) == 1 and "nvls" in inside[0].tier.features
        aggregates = bool(outside) and all("sharp" in level.tier.features for level in outside)
        if not multicast and not aggregates:
            return
        slow, alpha = [], self.known.base_s
        if multicast:
            level = inside[0]
            share = self.known.nvls * nvls_share(self.cluster.device.architecture)
            share *= self.known.nvls_nodes if level.fan > self.cluster.node_devices else 1.0
            slow.append((1 + 1 / level.fan) / (level.line * share))
            alpha += self.known.nvls_s + level.fan * self.known.nvls_rank_s
        else:
            slow += [2 / (level.uplink * TREE_SHARE) for level in inside]
            alpha += 2 * sum((level.fan - 1) * level.hop_s["simple"] for level in inside)
        for level in outside:
            slow.append(
                1 / (level.line * self.known.sharp) if aggregates else _up_and_down(level) / level.uplink
            )
            alpha += 2 * level.hop_s["simple"] * (1 if aggregates else math.ceil(math.log2(level.fan)))
        algorithm = "nvls-tree" if outside else "nvls"
        if aggregates:
            algorithm = "sharp"
        yield AlphaBeta(algorithm, "simple", alpha, max(slow), self.known.fill)

    def nccl(self, library: str) -> Iterator[AlphaBeta]:
        # LL128 needs stores of 128 bytes to arrive whole, which NVLink gives and PCI Express does not
        whole = library == "nccl" and all(level.tier.kind in ("nvlink", "nvswitch") for level in self.inside)
        protocols = PROTOCOLS if whole else ("ll", "simple")
        in_switch = list(self.in_switch()) if self.op == "all_reduce" and library == "nccl" else []
        yield from in_switch
        # where the network aggregates, NCCL's tuner takes that for any size that is not bound by latency
        yield from self.ring(
            ("ll", "ll128") if any(line.algorithm == "sharp" for line in in_switch) and whole else protocols
        )
        if self.op == "all_reduce":
            yield from self.tree(protocols)
        elif self.op in ("reduce_scatter", "all_gather") and not self.inside:
            level = self.levels[0]
            alpha = (
                self.known.base_s
                + math.ceil(math.log2(self.n)) * level.hop_s["simple"] / 3.5
                + self.n * PAT_RANK_S
            )
            yield AlphaBeta(
                "pat",
                "simple",
                alpha,
                bus_factor(self.op, self.n) / (level.uplink * PAT_SHARE),
                self.known.fill,
            )

    def gloo(self) -> Iterator[AlphaBeta]:
        """Rings for the reductions, a binomial tree for broadcast; reduce-scatter is an all-reduce, of which
        each keeps a part.
        """
        if self.op in ("broadcast", "reduce"):
            yield self.doubling(math.ceil(math.log2(self.n)))
        elif self.op == "reduce_scatter":
            yield from replace(self, op="all_reduce").ring(("simple",))
        else:
            yield from self.ring(("simple",))

    def mpi(self) -> Iterator[AlphaBeta]:
        """Rings, and halving-doubling (recursive doubling of the whole where messages are short)."""
        rounds = math.ceil(math.log2(self.n))
        yield from self.ring(("simple",))
        if self.op == "all_reduce":
            yield self.doubling(rounds)
        if self.op in ("all_reduce", "reduce_scatter", "all_gather"):
            once = self.doubling(rounds * (2 if self.op == "all_reduce" else 1))
            bandwidth = min(level.uplink / level.inner for level in self.levels)
            yield AlphaBeta(
                "halving-doubling",
                "simple",
                once.alpha_s,
                bus_factor(self.op, self.n) / bandwidth,
                self.known.fill,
            )
        else:
            yield self.doubling(rounds)

    def doubling(self, rounds: int) -> AlphaBeta:
        """`rounds` exchanges of the whole buffer with partners ever further away."""
        hop = max(level.hop_s["simple"] for level in self.levels)
        return AlphaBeta(
            "doubling",
            "simple",
            self.known.base_s + rounds * hop,
            rounds / min(level.single for level in self.levels),
        )

    def direct(self) -> Iterator[AlphaBeta]:
        """Messages straight from sender to receiver: the tier that is busiest sets the pace."""
        slow = []
        for level in self.levels:
            away = (self.n - level.inner) / self.n  # of a member's data, what has to leave the inner domain
            if self.op == "all_to_all":
                slow.append(level.inner * away / level.uplink)
            else:
                slow.append((1.0 if self.op == "send_recv" else away) / level.single)
        hop = max(level.hop_s["simple"] for level in self.levels)
        # connections to many peers are served one after another, a few at a time
        rounds = 1 if self.op == "send_recv" else math.ceil(math.log2(self.n))
        # one message goes over the outermost tier only
        yield AlphaBeta(
            "direct",
            "simple",
            self.known.base_s + rounds * hop,
            slow[-1] if self.op == "send_recv" else max(slow),
        )


# -- contention ----------------------------------------------------------------------------------


def share_links(flows: Sequence[Group], cluster: Cluster) -> Array:
    """Bus bandwidth (B/s, line rates) of each of several collectives that run at the same time, max-min fair.

    Every flow loads the uplink of each domain that it leaves. Rates rise together until a link is full; flows
    through it keep their rate, the others go on rising (progressive filling). Divide by the rate of a flow
    alone to get by how much it is slowed down.
    """
    loads: dict[tuple[int, int, bool], dict[int, float]] = {}
    for f, group in enumerate(flows):
        for i in range(len(cluster.tiers)):
            if group.fan(i) <= 1:
                continue
            inner = cluster.domain(i - 1) if i else 1
            spread = Counter(rank // inner for rank in group.ranks)
            for domain in spread:
                loads.setdefault((i, domain, True), {})[f] = 1.0
            # each member carries its part through a link of its own
            for rank in group.ranks if inner > 1 else ():
                loads.setdefault((i, rank, False), {})[f] = 1 / spread[rank // inner]
    tightest: dict[tuple[tuple[int, float], ...], float] = {}  # links with the same load are one constraint
    for (i, _, whole), used in loads.items():
        limit = _uplink_capacity(cluster.tiers[i], cluster.domain(i - 1) if i and whole else 1, cluster)
        key = tuple(used.items())
        tightest[key] = min(limit, tightest.get(key, limit))
    load = np.zeros((len(tightest), len(flows)))
    for link, key in enumerate(tightest):
        for f, value in key:
            load[link, f] = value
    most = np.array(
        [
            min(
                (
                    cluster.uplink(replace(group, concurrent=False), i)
                    for i in range(len(cluster.tiers))
                    if group.fan(i) > 1
                ),
                default=np.inf,
            )
            for group in flows
        ]
    )
    return max_min(load, np.array(list(tightest.values())), most)


def _uplink_capacity(tier: Tier, inner: int, cluster: Cluster) -> float:
    """B/s out of one inner domain, all its devices together."""
    own = inner * tier.bandwidth_Bps
    if tier.node_bandwidth_Bps is not None:
        own = min(own, tier.node_bandwidth_Bps * max(1.0, inner / cluster.node_devices))
    return own / tier.oversubscription


def max_min(load: Array, capacity: Array, most: Array) -> Array:
    """Max-min fair rates: `load[l, f]` is what flow f puts on link l per unit of its rate, `most` each flow's
    own limit.
    """
    rates = np.zeros(load.shape[1])
    rising = most > 0
    left = capacity.astype(float).copy()
    while rising.any():
        weight = load[:, rising].sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.where(weight > 0, left / weight, np.inf)
        step = min(float(room.min(initial=np.inf)), float((most - rates)[rising].min()))
        if not math.isfinite(step):
            rates[rising] = np.inf  # nothing limits them
            break
        rates[rising] += step
        left -= weight * step
        full = left <= 1e-9 * capacity
        rising &= (rates < most * (1 - 1e-12)) & ~(load[full] > 0).any(axis=0)
    return rates
