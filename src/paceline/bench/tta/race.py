"""A run to a target, on one rank: what `launch.run` starts once for all runs of a table.

The clock starts when the ranks have met, and stops at the end of the evaluation that meets the target:
evaluations count. Ranks that hold the same parameters share an evaluation; with parameter servers, worker 0
evaluates what it holds while the others go on.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import paceline.train as pt
from paceline.bench.tta.facts import measured
from paceline.train._torch import default_store
from paceline.train.asynchronous import NAMES as ASYNCHRONOUS
from paceline.train.parallel import strategy_in
from paceline.train.tasks import Task, get
from paceline.train.tasks.course import batches
from paceline.train.tasks.loop import optimizer_for
from paceline.train.tasks.noise import Meter
from paceline.train.tasks.step import right_answers, step

#: steps of a worker between two looks at whether worker 0 has met the target
_ASK_EVERY = 4
#: workers that are ahead of worker 0 take up to so many times its steps
_AHEAD = 3
#: side of the product by which the pace of the machine is seen beside each run, and how often it is done
_SIDE, _TIMES = 256, 10
#: of seconds and metrics as they are written
_DIGITS = 6
#: a task's data is made once for all runs
_known = cache(get)
#: numbers of runs apart, the same on all ranks
_runs = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One run, as JSON brings it. Steps count batches of all ranks together."""

    task: str
    contestant: str
    strategy: str
    optimizer: str
    batch: int
    lr: float
    seed: int
    target: float
    #: steps between evaluations, steps over which the rate rises, and steps after which a run gives up
    every: int
    warmup: int
    most: int
    #: `test`, or `validation` while settings are chosen
    data: str = "test"
    #: whether the gradient noise scale is measured, which takes time
    noise: bool = False


def several(runs: Sequence[Mapping[str, Any]], raw: str) -> int:
    """Does runs one after another in the same processes; rank 0 appends each to the file `raw` as it ends."""
    for one in runs:
        words = {name: value for name, value in one.items() if name != "kind"}
        found = _KINDS[one["kind"]](words)
        if dist.get_rank() == 0:
            with Path(raw).open("a", encoding="utf-8") as file:
                file.write(json.dumps({**one, **found}) + "\n")
    return len(runs)


def _reported(words: Mapping[str, Any]) -> dict[str, Any]:
    return race(Setup(**words))


def _tuned(words: Mapping[str, Any]) -> dict[str, Any]:
    """Tries each rate of a grid once, as many for every contestant; a trial goes on no longer than the best
    before it.
    """
    own = {name: value for name, value in words.items() if name != "rates"}
    trials: list[dict[str, Any]] = []
    for rate in words["rates"]:
        ends = [one["steps"] for one in trials if one["reached_s"] is not None]
        found = race(Setup(**{**own, "lr": rate, "most": min([own["most"], *ends])}))
        last = found["evaluations"][-1]["metric"] if found["evaluations"] else 0.0
        trials.append({"lr": rate, "steps": found["steps"], "reached_s": found["reached_s"], "metric": last})
    return {"trials": trials}


def _measured(words: Mapping[str, Any]) -> dict[str, Any]:
    task = _known(words["task"])
    rows = task.test[0][_share(len(task.test[1]))]
    return measured(task, words["batch"], words["optimizers"], words["schemes"], rows)


_KINDS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "run": _reported,
    "tuning": _tuned,
    "noise": _reported,
    "facts": _measured,
}


def race(setup: Setup) -> dict[str, Any]:
    """Trains until an evaluation meets the target, or gives up; all ranks begin and end together."""
    task, rank, world = _known(setup.task), dist.get_rank(), dist.get_world_size()
    begun = time.perf_counter()
    torch.manual_seed(setup.seed)
    model = task.model()
    own = optimizer_for(setup.optimizer, model, task, setup.lr)
    meter = Meter(model, setup.strategy) if setup.noise else None
    net, opt = pt.parallelize(model, own, plan=setup.strategy)
    apart = strategy_in(setup.strategy) in ASYNCHRONOUS
    evaluated = held(task, setup.data)
    watch = (_Apart if apart else _Together)(net, evaluated, setup)
    noise: list[float | None] = []
    dist.barrier()
    started = datetime.now(UTC).isoformat(timespec="milliseconds")
    set_up_s = time.perf_counter() - begun
    watch.start()
    taken = 0
    for taken, indices in enumerate(batches(task, [setup.batch] * watch.most, setup.seed), 1):
        mine = indices[rank * len(indices) // world : (rank + 1) * len(indices) // world]
        for group in opt.param_groups:
            group["lr"] = setup.lr * min(1.0, taken / setup.warmup)
        step(net, opt, task.train[0][mine], task.train[1][mine])
        if meter is not None:
            noise.append(meter.after(len(indices)))
        if watch.over(taken):
            break
    wall_s = watch.close()
    pt.close(net)
    dist.barrier()
    return {
        "steps": taken,
        "reached_s": watch.reached_s,
        "wall_s": wall_s,
        "evaluations": watch.evaluations,
        "started_at": started,
        "set_up_s": set_up_s,
        "train_samples": len(task.train[1]),
        "eval_samples": len(evaluated[1]),
        "noise_samples": [one for one in noise[len(noise) // 2 :] if one is not None],
        "load": os.getloadavg()[0],
        "reference_s": _reference_s(),
    }


def held(task: Task, data: str) -> tuple[Tensor, Tensor]:
    """What is evaluated on."""
    if data == "validation" and task.validation is not None:
        return task.validation
    return task.test


def _share(count: int) -> slice:
    """Of an evaluation, the part of this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return slice(rank * count // world, (rank + 1) * count // world)


def _reference_s() -> float:
    """Seconds of work that is always the same: the pace of the machine. All ranks do it at once."""
    a = torch.ones(_SIDE, _SIDE)
    start = time.perf_counter()
    for _ in range(_TIMES):
        a @ a
    return time.perf_counter() - start


class _Together:
    """Looks at runs whose ranks hold the same parameters: each evaluates its share, and all hear the sum."""

    def __init__(self, net: nn.Module, data: tuple[Tensor, Tensor], setup: Setup) -> None:
        self._net, self._setup = net, setup
        self._count = len(data[1])
        self._x, self._y = self._own(data)
        self._began = 0.0
        self.most = setup.most
        self.reached_s: float | None = None
        self.evaluations: list[dict[str, float]] = []

    def _own(self, data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        own = _share(self._count)
        return data[0][own], data[1][own]

    def start(self) -> None:
        self._began = time.perf_counter()

    def over(self, taken: int) -> bool:
        """Whether the run is at its end, by its target or its limit."""
        if taken % self._setup.every == 0:
            self._look(taken)
        return self.reached_s is not None or taken >= self.most

    def _look(self, taken: int) -> None:
        before = time.perf_counter()
        share = self._right() / self._count
        now = time.perf_counter()
        seconds = round(now - self._began, _DIGITS)
        self.evaluations.append(
            {
                "step": taken,
                "seconds": seconds,
                "metric": round(share, _DIGITS),
                "evaluation_s": round(now - before, _DIGITS),
            }
        )
        if self.evaluations[-1]["metric"] >= self._setup.target:
            self.reached_s = seconds

    def _right(self) -> float:
        right = torch.tensor([float(right_answers(self._net, self._x, self._y))])
        dist.all_reduce(right)
        return float(right)

    def close(self) -> float:
        """Seconds of the whole run."""
        return time.perf_counter() - self._began


class _Apart(_Together):
    """Looks at runs whose workers hold parameters of their own: worker 0 evaluates, and tells the others."""

    def __init__(self, net: nn.Module, data: tuple[Tensor, Tensor], setup: Setup) -> None:
        super().__init__(net, data, setup)
        self._store, self._first = default_store(), dist.get_rank() == 0
        self._key = f"paceline/tta/{next(_runs)}"
        if not self._first:
            self.most = _AHEAD * setup.most

    def _own(self, data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return data

    def over(self, taken: int) -> bool:
        if self._first:
            return super().over(taken)
        return taken % _ASK_EVERY == 0 and bool(self._store.check([self._key]))

    def _right(self) -> float:
        return float(right_answers(self._net, self._x, self._y))

    def close(self) -> float:
        if self._first:
            self._store.set(self._key, "over")
        else:
            self._store.wait([self._key])
        return super().close()
