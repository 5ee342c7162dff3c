"""Strategies on a task: accuracy over seeds with its spread, and time to the task's target."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.errors import SpecError
from paceline.train.asynchronous import NAMES as ASYNCHRONOUS
from paceline.train.launch import Place, run

_ONE_RUN = "checkpoints are of one run: name one strategy and one seed"
#: two-sided 95 % points of Student's distribution, by degrees of freedom
_STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


def half_interval(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean of a few values; not a number of one."""
    count = len(values)
    return (
        _STUDENT.get(count - 1, 1.96) * statistics.stdev(values) / math.sqrt(count) if count > 1 else math.nan
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """One strategy, one run per seed."""

    strategy: str
    accuracies: tuple[float, ...]
    seconds: tuple[float, ...]
    #: until the target was reached; None: it was not
    reached_s: tuple[float | None, ...]
    #: on the training set, at the end
    losses: tuple[float, ...] = ()

    @property
    def accuracy(self) -> float:
        """The mean."""
        return statistics.fmean(self.accuracies)

    @property
    def interval(self) -> float:
        """Half of the 95 % interval of the mean."""
        return half_interval(self.accuracies)

    def against(self, other: Runs, what: str = "accuracies") -> tuple[float, float]:
        """Mean over seeds of the difference in accuracy (or in `losses`) to another strategy, and half of its
        95 % interval: seeds are paired.
        """
        apart = [
            mine - theirs for mine, theirs in zip(getattr(self, what), getattr(other, what), strict=True)
        ]
        return statistics.fmean(apart), half_interval(apart)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """All strategies."""

    task: str
    world: int
    target: float
    rows: tuple[Runs, ...]
    #: the step after which the run was told to stop, with a checkpoint; None: it went to its end
    stopped: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        rows = [
            {
                **asdict(row),
                "accuracy": row.accuracy,
                "interval": row.interval if len(row.accuracies) > 1 else None,
            }
            for row in self.rows
        ]
        return {**asdict(self), "rows": rows}

    def __rich__(self) -> Any:
        from paceline.report.training import trained

        rows = [(row.strategy, row.accuracy, row.interval, row.seconds, row.reached_s) for row in self.rows]
        end = (
            "" if self.stopped is None else f"; stopped after step {self.stopped}, goes on when started again"
        )
        return trained(f"{self.task} on {self.world} ranks, target {self.target:.0%}{end}", rows)


def compare(
    task: str,
    strategies: Sequence[str],
    *,
    world: int = 2,
    seeds: int = 1,
    seed: int = 0,
    steps: int | None = None,
    batch: int | None = None,
    lr: float | None = None,
    optimizer: str = "sgd",
    weight_decay: float | None = None,
    warmup: int | None = None,
    growth: float | None = None,
    noise: bool = False,
    record: Path | None = None,
    board: bool = False,
    checkpoint: Path | None = None,
    every: int = 50,
    servers: int | None = None,
    staleness: int | None = None,
    jobs: int = 1,
    timeout_s: float = 3600.0,
) -> Compared:
    """Trains each strategy with each seed (`seed` and those after it), all in the same processes, or in
    `jobs` groups of them at a time.

    Names and settings are looked at first: after a mistake nothing was started or written.

    Started by `paceline schedule`, it is a job: one rank on each device that it was given, checkpoints where
    the scheduler says, progress told.
    """
    from paceline.train.parallel import check, strategy_in
    from paceline.train.tasks import get
    from paceline.train.tasks.course import course
    from paceline.train.tasks.loop import optimizer_for, shared
    from paceline.train.tasks.noise import allowed
    from paceline.train.tasks.show import bars

    place = Place.given()
    world = place.world if place is not None else world
    chosen = get(task)
    if min(world, seeds, jobs, every) < 1:
        raise SpecError(
            f"world, seeds, jobs and every count from 1; got {world}, {seeds}, {jobs} and {every}"
        )
    if steps is not None and steps < 1:
        raise SpecError(f"a run has at least one step, got {steps}")
    names = [name.replace(";", ",") for name in strategies]
    for name in names:
        check(name, world)
    _check_servers(names, servers, staleness)
    for name in names:
        size = _batch(name, batch)
        shared(course(chosen, steps=steps, batch=size, warmup=warmup, growth=growth), world)
    optimizer_for(optimizer, chosen.model(), chosen, lr, weight_decay)
    for name in names if noise else ():
        allowed(name)
    if len(names) * seeds > 1 and (checkpoint is not None or place is not None):
        raise SpecError(_ONE_RUN)
    if seeds > 1 and any("checkpoint=" in name for name in names):
        raise SpecError(_ONE_RUN)
    if place is not None and strategy_in(names[0]) in ASYNCHRONOUS:
        raise SpecError(f"a scheduled job takes strategies that wait for all ranks; got {names[0]!r}")
    if board and record is None:
        raise SpecError("--board writes into the record's folder; name one with --record FOLDER")
    if board and not find_spec("tensorboard"):
        raise SpecError(
            "--board writes for TensorBoard, which is not installed; run: pip install 'paceline[board]'"
        )
    runs = [
        {
            "task": task,
            "strategy": name,
            "seed": number,
            "steps": steps,
            "batch": _batch(name, batch),
            "lr": lr,
            "optimizer": optimizer,
            "warmup": warmup,
            "weight_decay": weight_decay,
            "growth": growth,
            "noise": noise,
            "board": board,
            "every": every,
            "record": str(_folder(record, name, number, alone=len(names) * seeds == 1)) if record else None,
            "checkpoint": str(checkpoint) if checkpoint else None,
            "evaluations": 100,
            "options": _options(name, servers, staleness),
        }
        for number in range(seed, seed + seeds)
        for name in names
    ]
    if jobs > 1:
        found = side_by_side(runs, world=world, jobs=jobs, timeout_s=timeout_s)
    else:
        with bars([f"{one['strategy']}, seed {one['seed']}" for one in runs]) as shown:
            found = run(
                "paceline.train.tasks.loop:several",
                world=world,
                arguments={"runs": runs},
                environment=shown,
                timeout_s=timeout_s,
                place=place,
            )[0]
    rows = tuple(
        gathered(
            name, [result for request, result in zip(runs, found, strict=True) if request["strategy"] == name]
        )
        for name in names
    )
    stopped = found[-1]["steps"] if found[-1]["stopped"] else None
    return Compared(task=task, world=world, target=chosen.target, rows=rows, stopped=stopped)


def gathered(strategy: str, results: Sequence[Mapping[str, Any]]) -> Runs:
    """What `loop.train` gave for each seed, as one row."""
    return Runs(
        strategy=strategy,
        accuracies=tuple(m["accuracy"] for m in results),
        seconds=tuple(m["seconds"] for m in results),
        reached_s=tuple((m.get("reached") or {}).get("seconds") for m in results),
        losses=tuple(m["final_loss"] for m in results),
    )


def side_by_side(
    runs: Sequence[Mapping[str, Any]],
    *,
    world: int,
    jobs: int,
    timeout_s: float = 3600.0,
    alone: bool = False,
    raw: str | None = None,
) -> list[dict[str, Any]]:
    """Results of runs (arguments of `loop.train`), in their order; `jobs` groups of processes at a time each
    take a share of them.

    With `alone` one process acts out the ranks of a run (see `alone`). Runs are appended to the file `raw` as
    they end.
    """
    jobs = min(jobs, len(runs))
    module, ranks = ("alone", 1) if alone else ("loop", world)

    def some(first: int) -> list[dict[str, Any]]:
        share = [{**one, "world": world} if alone else dict(one) for one in runs[first::jobs]]
        return list(
            run(
                f"paceline.train.tasks.{module}:several",
                world=ranks,
                arguments={"runs": share, "raw": raw},
                timeout_s=timeout_s,
            )[0]
        )

    with ThreadPoolExecutor(max(1, jobs)) as pool:
        parts = list(pool.map(some, range(jobs)))
    return [parts[i % jobs][i // jobs] for i in range(len(runs))]


def _check_servers(names: Sequence[str], servers: int | None, staleness: int | None) -> None:
    for name, value in (("servers", servers), ("staleness", staleness)):
        if value is not None and not any(name in _options(one, servers, staleness) for one in names):
            raise SpecError(
                f"--{name} is for parameter servers (ps-async, ps-bounded, easgd...); got {', '.join(names)}"
            )
        if value is not None and value < (1 if name == "servers" else 0):
            raise SpecError(f"--{name} must be {1 if name == 'servers' else 0} or more, got {value}")


def _batch(strategy: str, batch: int | None) -> int | None:
    """Samples of a step: as `--batch` says, or as a plan does."""
    from paceline.train.parallel import batch_in

    said = batch_in(strategy)
    if said and batch is not None and said != batch:
        raise SpecError(f"--batch {batch}, but the plan {strategy!r} says gbs={said}; leave one of them out")
    return said or batch


def _folder(record: Path, name: str, number: int, *, alone: bool) -> Path:
    """Of the record of one run: each of several has a folder of its own."""
    return record if alone else record / f"{name.partition(':')[0]}-{number}"


def _options(strategy: str, servers: int | None, staleness: int | None) -> dict[str, Any]:
    """What of these a strategy takes."""
    given = {
        name: value for name, value in (("servers", servers), ("staleness", staleness)) if value is not None
    }
    from paceline.train.parallel import strategy_in

    name = strategy_in(strategy)
    if name not in ASYNCHRONOUS:
        return {}
    from paceline.train.asynchronous.wrap import options_of

    return options_of(name, given)
