"""What the ranks of `bench.strategies` run: the same network under each strategy, timed on links that change under it.

Everything that is done once (parameters sent round, the first plain steps of a strategy) runs on the bare link; the link is slow while
steps are timed and while a strategy looks at it to decide. Rank 0 writes a line as each measurement ends, so that little is lost if time
runs out; before them a line of facts, from which steps are predicted: a profile of one rank alone, encoders, the bare link.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import paceline.train as pt
from paceline.bench.strategies import best_link, predict
from paceline.errors import RunError, UnknownName
from paceline.spec.compression import SCHEMES
from paceline.train.comm import Engine
from paceline.train.profile import Profiler
from paceline.train.record import sent_bytes
from paceline.train.strategies.auto import LOSSES, rates
from paceline.train.strategies.base import agree
from paceline.train.strategies.probe import cores, probe

MODELS = ("cnn", "vgg-like", "mlp")
#: strategies that are made anew for each link: they look at it
LOOKING = ("overlap", "priority", "auto")
#: plain steps before the one in whose update each decides
_WATCHED = {"auto": (3, 4)}
#: steps timed at a time, at most, and seconds of one from which on none goes before those timed
_MOST, _LONG_S = 40, 4.0
#: seconds of steps before those timed: memory that is used for the first time is slow
_WARM_S = 0.3


def network(name: str) -> tuple[nn.Module, tuple[int, ...], int]:
    """A network of 20 to 30 MB of gradients, the shape of one input, and the batch of one rank."""
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


class Trial:
    """A network under one strategy."""

    def __init__(self, model: str, strategy: str, batch: int | None) -> None:
        torch.manual_seed(0)
        self.name = strategy
        self.net, shape, usual = network(model)
        self.optimizer: Any = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)
        rows = batch or usual
        self.x, self.y = torch.randn(rows, *shape), torch.randint(0, 10, (rows,))
        if strategy != "none":
            self.net, self.optimizer = pt.parallelize(self.net, self.optimizer, plan=strategy)

    def step(self, before_update: Callable[[], None] = lambda: None) -> None:
        """One step of training; something may be done before the update."""
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.net(self.x), self.y).backward()
        before_update()
        self.optimizer.step()

    def synchronize(self) -> None:
        """Waits until parameters are what the last step made them, everywhere."""
        if self.name not in ("none", "ddp"):
            pt.of(self.net).synchronize()
        dist.barrier()

    @property
    def note(self) -> str:
        """What `auto` chose."""
        return str(getattr(pt.of(self.net), "choice").strategy) if self.name == "auto" else ""  # noqa: B009

    def prepare(self, narrow: Callable[[], None], widen: Callable[[], None], warm: int) -> None:
        """First steps on the bare link, `warm` of them as they will be; the narrow one is there where the strategy looks."""
        looks = _WATCHED.get(self.name, (0,)) if self.name in LOOKING else ()
        for number in range(max(looks, default=0) + 1 + warm):
            if number in looks:
                self.step(narrow)
                self.synchronize()
                widen()
            else:
                self.step()
        self.synchronize()

    def timed(self, steps: int, lead: int) -> dict[str, float]:
        """Per step: seconds, bytes that this host sends, and seconds of processor time of this rank.

        After `lead` steps, from update to update: what hides under the next step is seen to hide. Without them, from rest to rest.
        """
        self.synchronize()
        before = sent_bytes()
        for _ in range(lead):
            self.step()
        worked, start = time.process_time(), time.perf_counter()
        for _ in range(steps):
            self.step()
        if not lead:
            self.synchronize()
        took, worked = time.perf_counter() - start, time.process_time() - worked
        self.synchronize()
        return {"step_s": took / steps, "cpu_s": worked / steps, "sent_bytes": (sent_bytes() - before) / (lead + steps)}


def profile(model: str, batch: int | None) -> dict[str, Any]:
    """Steps of one rank alone."""
    trial = Trial(model, "none", batch)
    for _ in range(8):  # until memory is in use and the processor awake
        trial.step()
    profiler = Profiler(trial.net)
    for _ in range(8):
        start = [0.0]

        def begin(start: list[float] = start) -> None:
            start[0] = time.perf_counter()

        trial.step(begin)
        profiler.stepped(time.perf_counter() - start[0])
    return profiler.profile(trial.optimizer).to_dict()


def facts(model: str, batch: int | None, strategies: Sequence[str]) -> dict[str, Any]:
    """What predictions start from, on the bare link; rank 0's."""
    device = torch.device("cpu")
    dist.barrier()
    found = profile(model, batch)
    schemes = tuple(dict.fromkeys([*(s for s in strategies if s.partition(":")[0] in SCHEMES), *LOSSES["some"]]))
    with Engine() as engine:
        machine = probe(engine, device)
    measured = rates(schemes, max(p.numel() for p in network(model)[0].parameters()), dist.get_world_size(), device)
    dist.barrier()
    return agree({"profile": found, "rates": asdict(measured), "machine": asdict(machine), "cores": cores(device), "on": _here()})


def _here() -> str:
    """The machine, for people."""
    names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{os.cpu_count()} cores ({names[0] if names else platform.machine()}), torch {torch.__version__}"


class _Link:
    """Asks the process that owns the cluster to set the links; see `strategies.Shaper`."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._count = 0

    def set(self, link_Bps: float | None) -> None:  # noqa: N803
        """All ranks call; returns when it is done."""
        dist.barrier()
        if dist.get_rank() == 0:
            wanted, done = (self._folder / f"{kind}{self._count}" for kind in ("wanted", "done"))
            part = wanted.with_suffix(".part")
            part.write_text(json.dumps(link_Bps))
            part.rename(wanted)
            until = time.monotonic() + 30
            while not done.exists():
                if time.monotonic() > until:
                    raise RunError("the links of the emulated cluster were not set within 30 s")
                time.sleep(1e-3)
        self._count += 1
        dist.barrier()


def worker(
    model: str, strategies: Sequence[str], links: Sequence[float | str | None], seconds: float, rounds: int, batch: int | None, folder: str,
    output: str,
) -> None:
    """Times everything in turns; lines go to `output`."""
    world, wire = dist.get_world_size(), _Link(folder)
    known = facts(model, batch, strategies)
    common = {"model": model, "batch": batch or network(model)[2], "hosts": world}
    rates_Bps = list(dict.fromkeys(best_link(known, world) if isinstance(link, str) else link for link in links))  # noqa: N806
    expected = {rate: predict(known, strategies, world, rate) for rate in rates_Bps}
    warm = max(2, min(10, round(_WARM_S / predict(known, ("none",), world, None)["none"])))
    slow = [rate for rate in rates_Bps if max(expected[rate].values()) > _LONG_S]
    for turn, narrow in [*((turn, [rate for rate in rates_Bps if rate not in slow]) for turn in range(rounds)), (0, slow)]:
        if not narrow:
            continue
        if turn or narrow is slow:  # a machine's pace changes
            known = {**known, "profile": agree(profile(model, batch))}
        _write(output, {"kind": "facts", **common, **known})
        for name in strategies if turn % 2 == 0 else reversed(strategies):
            trial: Trial | None = None
            for rate in narrow:
                long = expected[rate][name]
                if turn and long > seconds * 2:
                    continue  # long steps are the wire's: once is enough
                if trial is None or name in LOOKING:
                    _close(trial)
                    trial = Trial(model, name, batch)
                    trial.prepare(lambda rate=rate: wire.set(rate), lambda: wire.set(None), warm)  # type: ignore[misc]
                steps = max(1, min(_MOST, round(seconds / long)))
                wire.set(rate)
                took = trial.timed(steps, lead=int(long < _LONG_S if name in LOOKING else long < seconds))
                wire.set(None)
                _write(output, {"kind": "step", **common, "link_Bps": rate, "strategy": name, "turn": turn, "steps": steps, **took,
                                "note": trial.note})
            _close(trial)


def _close(trial: Trial | None) -> None:
    if trial is not None and trial.name not in ("none", "ddp"):
        pt.close(trial.net)


def _write(output: str, line: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        with Path(output).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
