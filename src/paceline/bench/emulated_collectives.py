"""Collectives on an emulated cluster, in the columns of nccl-tests, predicted beside measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from paceline.bench.emulate.cluster import CONGESTION, burst_bytes
from paceline.bench.strategies import PAYLOAD
from paceline.cost.collectives import bus_factor
from paceline.train.launch import run
from paceline.units import show

if TYPE_CHECKING:
    from rich.table import Table

OPS = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast")
#: what a veth pair and two kernels' network stacks reach when no link is shaped, per direction; and a
#: message's overhead
UNSHAPED_BPS, LATENCY_S = 1.2e9, 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTiming:
    """One operation of one size (bytes as nccl-tests counts them: of the whole, gathered buffer)."""

    op: str
    hosts: int
    link_Bps: float | None
    size_bytes: int
    seconds: float
    predicted_s: float

    @property
    def algorithm_Bps(self) -> float:
        """Size over time."""
        return self.size_bytes / self.seconds

    @property
    def bus_Bps(self) -> float:
        """The same in terms of what the links carry."""
        return self.algorithm_Bps * bus_factor(self.op, self.hosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTimings:
    """All of them."""

    lines: tuple[CollectiveTiming, ...]
    #: how the hosts' TCP finds a link's rate
    tcp: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "tcp": self.tcp,
            "lines": [
                {**asdict(line), "algorithm_Bps": line.algorithm_Bps, "bus_Bps": line.bus_Bps}
                for line in self.lines
            ],
        }

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table(title=f"gloo on an emulated cluster, TCP {self.tcp}")
        for title in (
            "hosts",
            "link",
            "operation",
            "size (B)",
            "time (us)",
            "algbw (GB/s)",
            "busbw (GB/s)",
            "predicted (us)",
        ):
            table.add_column(title, justify="left" if title in ("operation", "link") else "right")
        for line in self.lines:
            link = "unshaped" if line.link_Bps is None else show(line.link_Bps, "bandwidth")
            table.add_row(
                str(line.hosts),
                link,
                line.op,
                str(line.size_bytes),
                f"{line.seconds * 1e6:.0f}",
                f"{line.algorithm_Bps / 1e9:.4f}",
                f"{line.bus_Bps / 1e9:.4f}",
                f"{line.predicted_s * 1e6:.0f}",
            )
        return table


def worker(sizes: Sequence[int]) -> dict[str, Any]:
    """Seconds of each operation and size on one rank: the least of a few; and the TCP of its host."""
    import torch
    import torch.distributed as dist

    from paceline.train._torch import gather_single

    world = dist.get_world_size()
    out: dict[str, list[float]] = {op: [] for op in OPS}

    def call(op: str, whole: torch.Tensor, other: torch.Tensor, part: torch.Tensor) -> None:
        if op == "all_reduce":
            dist.all_reduce(whole)
        elif op == "all_gather":
            gather_single(whole, part)
        elif op == "all_to_all":
            dist.all_to_all_single(other, whole)
        elif op == "reduce_scatter":
            dist.reduce_scatter(part, list(whole.chunk(world)))
        else:
            dist.broadcast(whole, 0)
            dist.barrier()  # the root is done before the others

    for size in sizes:
        count = max(world, size // 4 // world * world)
        tensors = torch.ones(count), torch.ones(count), torch.ones(count // world)
        for op in OPS:
            call(op, *tensors)
            best = float("inf")
            for _ in range(3):
                dist.barrier()
                start = time.perf_counter()
                call(op, *tensors)
                best = min(best, time.perf_counter() - start)
            out[op].append(best)
    return {**out, "tcp": CONGESTION.read_text().strip()}


def predicted_s(op: str, size_bytes: float, hosts: int, link_Bps: float | None) -> float:
    """A message's overhead, and the bytes that the busiest link carries beyond what its token bucket has
    saved up.

    gloo's reduce-scatter is an all-reduce of which each keeps a part.
    """
    traffic = bus_factor("all_reduce" if op == "reduce_scatter" else op, hosts) * size_bytes
    if link_Bps is None:
        return LATENCY_S + traffic / UNSHAPED_BPS
    return LATENCY_S + max(0.0, traffic - burst_bytes(link_Bps)) / (link_Bps * PAYLOAD)


def measure(
    *, hosts: Sequence[int], links_Bps: Sequence[float | None], largest_bytes: int = 4_000_000
) -> CollectiveTimings:
    """Every operation, from 64 kB on in steps of four."""
    import torch  # noqa: F401  (the ranks need it: said before a cluster is made)

    from paceline.bench.emulate import EmulatedCluster

    sizes = [65536]
    while sizes[-1] * 4 <= largest_bytes:
        sizes.append(sizes[-1] * 4)
    lines, tcp = [], ""
    for count in hosts:
        with EmulatedCluster(hosts=count, congestion="reno") as cluster:  # as in `bench strategies`
            for link in links_Bps:
                cluster.shape(link)
                ranks = run(
                    "paceline.bench.emulated_collectives:worker",
                    world=count,
                    on=cluster,
                    arguments={"sizes": sizes},
                )
                tcp = ranks[0]["tcp"]
                for op in OPS:
                    lines += [
                        CollectiveTiming(
                            op=op,
                            hosts=count,
                            link_Bps=link,
                            size_bytes=size,
                            seconds=max(rank[op][i] for rank in ranks),
                            predicted_s=predicted_s(op, size, count, link),
                        )
                        for i, size in enumerate(sizes)
                    ]
    return CollectiveTimings(lines=tuple(lines), tcp=tcp)
