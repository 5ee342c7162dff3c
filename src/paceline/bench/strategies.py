"""Strategies side by side on an emulated cluster: seconds per step predicted and measured, bytes on the wire counted by the interfaces.

    paceline bench strategies --hosts 2 --link 100Mbit/s --model vgg-like

Each strategy trains the same network from the same seed in the same processes, in rounds, so that what disturbs the machine disturbs
all of them; `none` does not communicate at all: the floor. The prediction takes its profile and its encoders' rates from `none` and the
link from what was asked for, not from the run that it predicts.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.errors import SpecError, UnknownName
from paceline.train.launch import run
from paceline.units import show

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn

MODELS = ("cnn", "vgg-like", "mlp")
STRATEGIES = ("none", "ddp", "allreduce", "overlap", "priority", "fp16", "terngrad", "dgc", "auto")
#: share of a link's rate that TCP over Ethernet of 1500 bytes leaves for payload: 1448 of 1538, headers counted by the token bucket as 14
PAYLOAD = 1448 / 1514


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One strategy on one link."""

    strategy: str
    hosts: int
    link_Bps: float | None
    #: seconds per step, of each round
    rounds_s: tuple[float, ...]
    predicted_s: float | None
    #: of one host, per step
    sent_bytes: float
    note: str = ""

    @property
    def step_s(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.rounds_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All of them."""

    model: str
    parameters_bytes: int
    rows: tuple[Row, ...] = field(default_factory=tuple)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "rows": [{**asdict(row), "step_s": row.step_s} for row in self.rows]}

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table(title=f"{self.model}, {show(self.parameters_bytes, 'bytes')} of gradients")
        for title in ("hosts", "link", "strategy", "step", "spread", "predicted", "of ddp", "sent per step", ""):
            table.add_column(title, justify="left" if title in ("strategy", "", "link") else "right")
        base = {(row.hosts, row.link_Bps): row.step_s for row in self.rows if row.strategy == "ddp"}
        for row in self.rows:
            spread = (max(row.rounds_s) - min(row.rounds_s)) / row.step_s
            reference = base.get((row.hosts, row.link_Bps))
            table.add_row(
                str(row.hosts), "unshaped" if row.link_Bps is None else f"{row.link_Bps * 8 / 1e6:g} Mbit/s", row.strategy, show(row.step_s, "time"),
                f"{spread:.0%}", "" if row.predicted_s is None else show(row.predicted_s, "time"),
                "" if reference is None else f"{row.step_s / reference:.2f}", show(row.sent_bytes, "bytes"), row.note,
            )
        return table


def network(name: str) -> tuple[nn.Module, tuple[int, ...], int]:
    """A network of 20 to 30 MB of gradients, the shape of one input, and the batch of one rank."""
    from torch import nn

    def conv(*channels: int) -> list[nn.Module]:
        return [part for a, b in itertools.pairwise(channels) for part in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU())]

    if name == "cnn":
        layers = [*conv(3, 32, 64), nn.MaxPool2d(2), *conv(64, 128), nn.MaxPool2d(2), *conv(128, 256), nn.MaxPool2d(2), *conv(256, 512, 512, 512)]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)), (3, 24, 24), 16
    if name == "vgg-like":
        layers = [*conv(3, 32), nn.MaxPool2d(2), *conv(32, 64), nn.MaxPool2d(2), *conv(64, 64), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(2304, 2048), nn.ReLU(), nn.Linear(2048, 512), nn.ReLU(), nn.Linear(512, 10)), (3, 24, 24), 16
    if name == "mlp":
        widths = (1024, 1536, 1536, 1024)
        layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(1024, 10)), (1024,), 32
    raise UnknownName("benchmark model", name, MODELS, f"models: {', '.join(MODELS)}")


def worker(model: str, strategies: Sequence[str], steps: int, rounds: int, batch: int | None = None, warm: int = 2) -> dict[str, Any]:
    """What a rank runs: seconds per step of each strategy and round; on rank 0 also the profile and rates for the prediction."""
    import torch
    import torch.distributed as dist

    found: dict[str, Any] = {"rounds": {name: [] for name in strategies}, "sent": {name: [] for name in strategies}, "notes": {}}
    for turn in range(rounds):
        for name in strategies if turn % 2 == 0 else reversed(strategies):
            seconds, sent, note = _time(model, name, steps, batch, warm)
            found["rounds"][name].append(seconds)
            found["sent"][name].append(sent)
            found["notes"][name] = note
    if dist.get_rank() == 0:
        found["profile"] = _profile(model, batch)
        from paceline.train.strategies.auto import rates

        schemes = tuple(s for s in strategies if s not in ("none", "ddp", "allreduce", "overlap", "priority", "auto"))
        measured = rates(schemes, 1 << 20, dist.get_world_size(), torch.device("cpu"))
        found["rates"] = {"encode_s": measured.encode_s, "decode_s": measured.decode_s, "copy_s": measured.copy_s}
        from paceline.train.strategies.probe import _flops

        found["flops"] = _flops(torch.device("cpu"))
    dist.barrier()
    return found


def _time(model: str, name: str, steps: int, batch: int | None, warm: int) -> tuple[float, float, str]:
    """Seconds per step, bytes this host sent per step, and what `auto` chose."""
    import torch
    import torch.distributed as dist

    import paceline.train as pt
    from paceline.train.record import sent_bytes

    torch.manual_seed(0)
    net, shape, usual = network(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    x = torch.randn(batch or usual, *shape)
    y = torch.randint(0, 10, (batch or usual,))
    if name != "none":
        net, optimizer = pt.parallelize(net, optimizer, plan=name)  # type: ignore[assignment]

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()

    for _ in range(warm + (4 if name == "auto" else 0)):
        step()
    if name not in ("none", "ddp"):
        pt.of(net).synchronize()
    dist.barrier()
    before, start = sent_bytes(), time.perf_counter()
    for _ in range(steps):
        step()
    if name not in ("none", "ddp"):
        pt.of(net).synchronize()
    dist.barrier()
    seconds, sent = (time.perf_counter() - start) / steps, (sent_bytes() - before) / steps
    note = ""
    if name == "auto":
        note = getattr(pt.of(net), "choice").strategy  # noqa: B009
    pt.close(net)
    return seconds, sent, note


def _profile(model: str, batch: int | None) -> dict[str, Any]:
    """Steps of one rank alone."""
    import torch

    from paceline.train.profile import Profiler

    torch.manual_seed(0)
    net, shape, usual = network(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    profiler = Profiler(net)
    x, y = torch.randn(batch or usual, *shape), torch.randint(0, 10, (batch or usual,))
    for _ in range(5):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        start = time.perf_counter()
        optimizer.step()
        profiler.stepped(time.perf_counter() - start)
    return profiler.profile().to_dict()


def compare(
    *, model: str = "cnn", strategies: Sequence[str] = STRATEGIES, hosts: Sequence[int] = (2,), links_Bps: Sequence[float | None] = (12.5e6,),  # noqa: N803
    steps: int = 5, rounds: int = 3, batch: int | None = None, cpus: float | None = None, timeout_s: float = 900.0,
) -> Comparison:
    """Predicted and measured, for every strategy, link and number of hosts."""
    from paceline.bench.emulate import EmulatedCluster

    net, _, _ = network(model)
    size = sum(p.numel() * 4 for p in net.parameters())
    if not strategies or not links_Bps or not hosts:
        raise SpecError("name at least one strategy, one link and one number of hosts")
    rows: list[Row] = []
    for count in hosts:
        with EmulatedCluster(hosts=count, cpus=cpus) as cluster:
            for link in links_Bps:
                cluster.shape(link)
                ranks = run("paceline.bench.strategies:worker", world=count, on=cluster, timeout_s=timeout_s,
                            arguments={"model": model, "strategies": list(strategies), "steps": steps, "rounds": rounds, "batch": batch})
                rows += _rows(ranks, strategies, count, link)
    return Comparison(model=model, parameters_bytes=size, rows=tuple(rows))


def _rows(ranks: Sequence[Mapping[str, Any]], strategies: Sequence[str], hosts: int, link: float | None) -> list[Row]:
    first = ranks[0]
    predicted = predict(first, strategies, hosts, link)
    return [
        Row(strategy=name, hosts=hosts, link_Bps=link, rounds_s=tuple(max(times) for times in zip(*(r["rounds"][name] for r in ranks), strict=True)),
            predicted_s=predicted.get(name), sent_bytes=statistics.median(first["sent"][name]), note=first["notes"][name])
        for name in strategies
    ]


#: what a veth pair and two kernels' network stacks reach on this machine when no link is shaped, per direction; and a message's overhead
UNSHAPED_BPS, LATENCY_S = 1.2e9, 1e-3


def predict(measured: Mapping[str, Any], strategies: Sequence[str], hosts: int, link: float | None) -> dict[str, float]:
    """Seconds per step by the model that `auto` decides with; passes from the profile, scaled to the floor measured beside the rest."""
    from paceline.train.profile import Profile
    from paceline.train.strategies.estimate import Rates, Setting, step_s
    from paceline.train.strategies.probe import Machine

    profile = Profile.from_dict(measured["profile"])
    machine = Machine(latency_s=LATENCY_S, link_Bps=UNSHAPED_BPS if link is None else link * PAYLOAD, flops=measured["flops"])
    setting = Setting(machine=machine, world=hosts, rates=Rates(**measured["rates"]), cores=1)
    return {name: step_s(name, profile, setting) for name in strategies}
