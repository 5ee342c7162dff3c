"""What the ranks of `bench.strategies` run: the same network under each strategy, timed on links that change
under it.

All strategies are alive at once and take turns in blocks of a few steps, round after round, each round in the
reverse order of the one before: a machine whose pace drifts is as slow for one as for the others, and
strategies can be compared round by round. Everything that is done once (parameters sent round, the first
plain steps of a strategy) runs on the bare link; the link is slow while steps are timed and while a strategy
looks at it to decide. Rank 0 writes a line as each block ends, so that little is lost if time runs out;
before those of a link a line of facts, from which steps are predicted: a profile of one rank alone, encoders,
the bare link.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
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
from paceline.train.comm import Engine, agree
from paceline.train.probe import cores, probe, rates
from paceline.train.profile import Profiler
from paceline.train.record import sent_bytes
from paceline.train.strategies.estimate import LOSSES

MODELS = ("cnn", "vgg-like", "mlp")
#: strategies that are made anew for each link: they look at it
LOOKING = ("overlap", "priority", "auto")
#: plain steps before the one in whose update each looks
_WATCHED = {"auto": 3}
#: steps timed at a time, at most
_MOST = 40
#: steps before those timed, by the seconds that one takes less than: where parameters arrive under the next,
#: some until they do so evenly
_LEADS, _OTHERS = {0.5: 3, 4.0: 1}, {1.0: 1}
#: rounds in which all strategies are timed; then those predicted to take up to so many times the fastest;
#: once, what takes so many seconds
_FULL, _NEAR, _ONCE_S = 3, 1.3, 4.0
#: seconds of steps before those timed: memory that is used for the first time is slow
_WARM_S = 0.3


def network(name: str) -> tuple[nn.Module, tuple[int, ...], int]:
    """A network of 20 to 30 MB of gradients, the shape of one input, and the batch of one rank."""

    def conv(*channels: int) -> list[nn.Module]:
        return [
            part
            for a, b in itertools.pairwise(channels)
            for part in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU())
        ]

    if name == "cnn":
        layers = [
            *conv(3, 32, 64),
            nn.MaxPool2d(2),
            *conv(64, 128),
            nn.MaxPool2d(2),
            *conv(128, 256),
            nn.MaxPool2d(2),
            *conv(256, 512, 512, 512),
        ]
        return (
            nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)),
            (3, 24, 24),
            16,
        )
    if name == "vgg-like":
        layers = [*conv(3, 32), nn.MaxPool2d(2), *conv(32, 64), nn.MaxPool2d(2), *conv(64, 64), nn.Flatten()]
        return (
            nn.Sequential(
                *layers, nn.Linear(2304, 2048), nn.ReLU(), nn.Linear(2048, 512), nn.ReLU(), nn.Linear(512, 10)
            ),
            (3, 24, 24),
            16,
        )
    if name == "mlp":
        widths = (1024, 1536, 1536, 1024)
        layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(1024, 10)), (1024,), 32
    raise UnknownName("benchmark model", name, MODELS, f"models: {', '.join(MODELS)}")


class Trial:
    """A network under one strategy."""

    def __init__(self, model: str, strategy: str, batch: int | None) -> None:
        torch.manual_seed(0)
        self.name, self.kind = strategy, strategy.partition(":")[0]
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
        if self.name != "none":
            pt.of(self.net).synchronize()
        dist.barrier()

    @property
    def note(self) -> str:
        """What `auto` chose."""
        return str(getattr(pt.of(self.net), "choice").strategy) if self.kind == "auto" else ""  # noqa: B009

    def prepare(self, narrow: Callable[[], None], widen: Callable[[], None], warm: int) -> None:
        """First steps on the bare link, `warm` of them as they will be; the narrow one is there where the
        strategy looks.
        """
        for _ in range(_WATCHED.get(self.kind, 0)):
            self.step()
        if self.kind in LOOKING:
            self.step(narrow)
            if self.kind == "auto":  # may try some, the first step of which looks, too
                auto = pt.of(self.net)
                self.step()
                while not getattr(auto, "settled"):  # noqa: B009
                    self.step()
                self.step()
            self.synchronize()
            widen()
        for _ in range(warm):
            self.step()
        self.synchronize()

    def timed(self, steps: int, lead: int) -> dict[str, float]:
        """Per step: seconds, bytes that this host sends, and seconds of processor time of this rank.

        After `lead` steps, from update to update: what hides under the next step is seen to hide. Without
        them, from rest to rest. Of `none`, each step as long as that of the slowest rank: who waits for the
        others has no other floor.
        """
        self.synchronize()
        before = sent_bytes()
        for _ in range(lead):
            self.step()
        worked, ends = time.process_time(), [time.perf_counter()]
        for _ in range(steps):
            self.step()
            ends.append(time.perf_counter())
        if not lead:
            self.synchronize()
            ends[-1] = time.perf_counter()
        took, worked = ends[-1] - ends[0], time.process_time() - worked
        self.synchronize()
        if self.name == "none":
            each = torch.tensor(
                [after - before for before, after in itertools.pairwise(ends)], dtype=torch.float64
            )
            dist.all_reduce(each, op=dist.ReduceOp.MAX)
            took = float(each.sum())
        return {
            "step_s": took / steps,
            "cpu_s": worked / steps,
            "sent_bytes": (sent_bytes() - before) / (lead + steps),
        }


def profile(trial: Trial, warm: int = 8, steps: int = 8) -> dict[str, Any]:
    """Steps of one rank alone, after some until memory is in use and the processor awake."""
    for _ in range(warm):
        trial.step()
    profiler = Profiler(trial.net)
    for _ in range(steps):
        start = [0.0]

        def begin(start: list[float] = start) -> None:
            start[0] = time.perf_counter()

        trial.step(begin)
        profiler.stepped(time.perf_counter() - start[0])
    profiler.remove()
    return profiler.profile(trial.optimizer).to_dict()


def facts(model: str, alone: Trial, strategies: Sequence[str]) -> dict[str, Any]:
    """What predictions start from, on the bare link; rank 0's."""
    device = torch.device("cpu")
    dist.barrier()
    found = profile(alone)
    schemes = tuple(
        dict.fromkeys([*(s for s in strategies if s.partition(":")[0] in SCHEMES), *LOSSES["some"]])
    )
    with Engine() as engine:
        machine = probe(engine, device, whole=True)
    measured = rates(
        schemes, [p.numel() for p in network(model)[0].parameters()], dist.get_world_size(), device
    )
    dist.barrier()
    own, threads = cores(device)
    return agree(
        {
            "profile": found,
            "rates": asdict(measured),
            "machine": asdict(machine),
            "cores": own,
            "threads": threads,
            "on": _here(),
        }
    )


def _here() -> str:
    """The machine, for people."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    tcp = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    return (
        f"{os.cpu_count()} cores ({names[0] if names else platform.machine()}), torch {torch.__version__},"
        f" TCP {tcp}"
    )


class _Link:
    """Asks the process that owns the cluster to set the links; see `strategies.Shaper`."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._count = 0

    def set(self, link_Bps: float | None) -> None:
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
    model: str,
    strategies: Sequence[str],
    links: Sequence[float | str | None],
    seconds: float,
    rounds: int,
    batch: int | None,
    folder: str,
    output: str,
) -> None:
    """Times everything in turns; lines go to `output`."""
    world, wire, alone = dist.get_world_size(), _Link(folder), Trial(model, "none", batch)
    known = facts(model, alone, strategies)
    common = {"model": model, "batch": batch or network(model)[2], "hosts": world}
    warm = max(2, min(10, round(_WARM_S / predict(known, ("none",), world, None)["none"])))
    trials = {"none": alone}
    for number, rate in enumerate(
        dict.fromkeys(best_link(known, world) if isinstance(link, str) else link for link in links)
    ):
        if number:  # a machine's pace changes
            known = {**known, "profile": agree(profile(alone, 2, 6))}
        _write(output, {"kind": "facts", **common, **known})
        expected = predict(known, strategies, world, rate)
        for name in strategies:
            if name not in trials:
                trials[name] = Trial(model, name, batch)
                trials[name].prepare(lambda rate=rate: wire.set(rate), lambda: wire.set(None), warm)  # type: ignore[misc]
        wire.set(rate)
        for turn in range(rounds):
            for name in _taking_part(turn, strategies, expected):
                long = expected[name]
                steps = max(1, min(_MOST, round(seconds / long)))
                leads = _LEADS if trials[name].kind in LOOKING else _OTHERS
                took = trials[name].timed(
                    steps, lead=next((count for below, count in leads.items() if long < below), 0)
                )
                _write(
                    output,
                    {
                        "kind": "step",
                        **common,
                        "link_Bps": rate,
                        "strategy": name,
                        "turn": turn,
                        "steps": steps,
                        **took,
                        "note": trials[name].note,
                    },
                )
        wire.set(None)
        for name in [name for name, trial in trials.items() if trial.kind in LOOKING]:
            _close(trials.pop(name))
    for trial in trials.values():
        _close(trial)


def _taking_part(turn: int, strategies: Sequence[str], expected: Mapping[str, float]) -> list[str]:
    """Who is timed in a round, in order: once is enough for the longest steps; the last rounds are between
    those that may be the fastest.
    """
    near = _NEAR * min((expected[name] for name in strategies if name != "none"), default=0.0)
    chosen = [
        name
        for name in strategies
        if not turn
        or (expected[name] <= _ONCE_S and (turn < _FULL or name == "none" or expected[name] <= near))
    ]
    return chosen if turn % 2 == 0 else chosen[::-1]


def _close(trial: Trial) -> None:
    if trial.name != "none":
        pt.close(trial.net)


def _write(output: str, line: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        # whole lines: another cluster may write there, too
        with Path(output).open("ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")
