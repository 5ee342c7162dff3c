"""The loop of a task on one rank: what `paceline train` runs, under our launcher, torchrun or `paceline
schedule`.

    torchrun --nproc-per-node 2 -m paceline.train.tasks.loop --task digits-cnn --strategy terngrad
        --checkpoint FOLDER --every 20

A run is a function of its seed: batches are drawn for all ranks together and shared out, so that step k is
the same step for any number of ranks, and a run that was interrupted goes on where its last checkpoint left
it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import paceline.train as pt
from paceline.errors import PacelineError, SpecError, UnknownName
from paceline.train.comm import CommEvent
from paceline.train.job import Job, join
from paceline.train.optim import LARS
from paceline.train.parallel import strategy_in
from paceline.train.record import Record
from paceline.train.tasks import Task, get
from paceline.train.tasks.course import Step, batches, course
from paceline.train.tasks.expect import predict
from paceline.train.tasks.noise import Meter
from paceline.train.tasks.show import Shown
from paceline.train.tasks.step import Done, accuracy, final_loss, noted, step

#: steps at the end of a run whose timeline is kept
_KEPT_STEPS = 8
#: strategies whose updates are each of one rank's share of a batch, which the learning rate is for
_ONE_BY_ONE = ("ps-async", "ps-bounded")


def optimizer_for(
    name: str, model: nn.Module, task: Task, lr: float | None, weight_decay: float | None = None
) -> torch.optim.Optimizer:
    """sgd or lars, with the task's settings where none are given."""
    if lr is not None and not lr > 0:
        raise SpecError(f"the learning rate must be positive, got {lr:g}")
    decay = task.weight_decay if weight_decay is None else weight_decay
    if not decay >= 0:
        raise SpecError(f"weight decay must be 0 or more, got {decay:g}")
    if name == "sgd":
        return torch.optim.SGD(
            model.parameters(), lr=lr or task.lr, momentum=task.momentum, weight_decay=decay
        )
    if name == "lars":
        return LARS(
            model.parameters(), lr=lr or 10 * task.lr, momentum=task.momentum, weight_decay=decay, eta=0.02
        )
    raise UnknownName("optimizer", name, ("sgd", "lars"), "optimizers: sgd, lars")


def shared(planned: Sequence[Step], world: int) -> Sequence[Step]:
    """The same steps, if every rank gets a sample of the first, the smallest."""
    if planned and world > planned[0].batch:
        raise SpecError(
            f"a batch of {planned[0].batch} cannot be shared by {world} ranks; each needs a sample"
        )
    return planned


def train(
    task: str,
    strategy: str = "ddp",
    *,
    seed: int = 0,
    steps: int | None = None,
    batch: int | None = None,
    lr: float | None = None,
    optimizer: str = "sgd",
    weight_decay: float | None = None,
    warmup: int | None = None,
    growth: float | None = None,
    noise: bool = False,
    record: str | None = None,
    board: bool = False,
    checkpoint: str | None = None,
    every: int = 50,
    keep: int = 2,
    timeout_s: float = 120.0,
    options: dict[str, Any] | None = None,
    evaluations: int = 0,
    stop_at_target: bool = False,
) -> dict[str, Any]:
    """Trains a task; the accuracy at the end, seconds, losses, and when the target was reached, as seen in
    one of `evaluations` looks.

    Seconds are those of training: looks are not counted.
    """
    chosen, rank, world = get(task), dist.get_rank(), dist.get_world_size()
    planned = shared(course(chosen, steps=steps, batch=batch, warmup=warmup, growth=growth), world)
    torch.manual_seed(seed)
    model = chosen.model()
    if lr is None and optimizer == "sgd" and strategy_in(strategy) in _ONE_BY_ONE:
        # the linear scaling rule: as many updates as ranks make up one of the whole batch
        lr = chosen.lr / world
    own = optimizer_for(optimizer, model, chosen, lr, weight_decay)
    peak = [group["lr"] for group in own.param_groups]
    meter = Meter(model, strategy) if noise else None
    net, opt = pt.parallelize(model, own, plan=strategy, timeout_s=timeout_s, **(options or {}))
    job = Job(net, opt, folder=checkpoint, every=every, keep=keep, timeout_s=timeout_s)
    losses, reached, looked, began = [], None, 0.0, time.perf_counter()
    look_every = max(1, len(planned) // evaluations) if evaluations else 0
    with Record(record, rank=rank, board=board) as log:
        shown = Shown(rank, len(planned), job.start)
        log.write(
            "run",
            task=task,
            strategy=strategy,
            world=world,
            seed=seed,
            batch=planned[0].batch if planned else 0,
            start=job.start,
        )
        if record:
            predict(log, chosen, strategy, net, planned[0].batch // world)
        trace = _Trace(net, len(planned)) if record else None
        for number, indices in zip(
            job.steps(len(planned)),
            batches(chosen, [one.batch for one in planned], seed, job.start),
            strict=False,
        ):
            for group, top in zip(opt.param_groups, peak, strict=True):
                group["lr"] = top * planned[number - 1].rate
            mine = indices[rank * len(indices) // world : (rank + 1) * len(indices) // world]
            done = step(
                net, opt, chosen.train[0][mine], chosen.train[1][mine], len(mine) * world / len(indices)
            )
            losses.append(job.mean(done.loss))
            measured = {"noise_samples": meter.after(len(indices))} if meter is not None else {}
            log.write("step", step=number, loss=losses[-1], batch=len(indices), **done.seconds, **measured)
            shown.step(number, losses[-1])
            if trace is not None:
                trace.add(number, done)
            if look_every and number % look_every == 0 and reached is None:
                now = time.perf_counter()
                if accuracy(net, chosen) >= chosen.target:
                    reached = {"step": number, "seconds": now - began - looked}
                    if stop_at_target:
                        break
                looked += time.perf_counter() - now
        seconds = time.perf_counter() - began - looked
        found = {
            "accuracy": accuracy(net, chosen),
            "seconds": seconds,
            "losses": losses,
            "reached": reached,
            "started_at": job.start,
            "final_loss": final_loss(net, chosen),
            "stopped": job.stopped,
            "steps": job.start + len(losses),
        }
        log.write("end", **{key: value for key, value in found.items() if key != "losses"})
        if trace is not None:
            log.timeline(trace.events or (), trace.phases, f"{task}, {strategy}, {world} ranks, measured")
    pt.close(net)
    job.close()
    return found


class _Trace:
    """What happened when in the last steps of a run."""

    def __init__(self, net: nn.Module, total: int) -> None:
        self._net, self._from = net, total - _KEPT_STEPS
        self.events: Sequence[CommEvent] | None = None
        self.phases: list[tuple[str, float, float]] = []

    def add(self, number: int, done: Done) -> None:
        """After each step; the first of those that count only starts the recording."""
        if self.events is not None:
            self.phases += done.phases
        elif number >= self._from:
            self.events = ()
            # torch's own DDP, parameter servers: they have no engine to look into
            with contextlib.suppress(SpecError):
                self.events = pt.of(self._net).engine.record()


def several(runs: list[dict[str, Any]], raw: str | None = None) -> list[dict[str, Any]]:
    """Several trainings one after another in the same processes; rank 0 appends each to the file `raw` as it
    ends.
    """
    return [noted(run, train(**run), raw if dist.get_rank() == 0 else None) for run in runs]


def main() -> None:
    """Under torchrun."""
    parser = argparse.ArgumentParser(prog="python -m paceline.train.tasks.loop")
    parser.add_argument("--task", default="digits-cnn")
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--record")
    parser.add_argument("--checkpoint")
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--keep", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=120.0)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.use_deterministic_algorithms(True)
    options = parser.parse_args()
    join(timeout_s=options.timeout_s)
    try:
        found = train(**vars(options))
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr, flush=True)
        os._exit(2)  # peers may hang: leave without waiting for their sockets
    if dist.get_rank() == 0:
        print(
            f"accuracy {found['accuracy']:.4f} loss {found['final_loss']!r} from step {found['started_at']}",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
