"""The loop of a task on one rank: what `paceline train` runs, under our launcher or under torchrun.

    torchrun --nproc-per-node 2 -m paceline.train.tasks.loop --task digits-cnn --strategy terngrad --checkpoint FOLDER --every 20

A run is a function of its seed: batches are drawn for all ranks together and shared out, so that step k is the same step for any number of
ranks, and a run that was interrupted goes on where its last checkpoint left it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import paceline.train as pt
from paceline.errors import SpecError
from paceline.spec.compression import SCHEMES
from paceline.train.checkpoint import Checkpoints
from paceline.train.comm import Engine
from paceline.train.optim import LARS
from paceline.train.profile import Profiler
from paceline.train.record import Record
from paceline.train.strategies.auto import rates
from paceline.train.strategies.estimate import Setting, step_s
from paceline.train.strategies.probe import probe
from paceline.train.tasks import Task, get


def batches(task: Task, steps: int, batch: int, seed: int, start: int = 0) -> Iterator[Tensor]:
    """Indices of the samples of each step, from step `start` on; every epoch in another order."""
    count = len(task.train[1])
    per_epoch = count // batch
    if not per_epoch:
        raise SpecError(f"{task.name} has {count} samples to train on; a batch of {batch} is too large")
    order, epoch = torch.empty(0), -1
    for step in range(start, steps):
        if step // per_epoch != epoch:
            epoch = step // per_epoch
            order = torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1000 + epoch))
        at = step % per_epoch * batch
        yield order[at : at + batch]


def optimizer_for(name: str, model: nn.Module, task: Task, lr: float | None) -> torch.optim.Optimizer:
    """sgd or lars, with the task's settings."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr or task.lr, momentum=task.momentum)
    if name == "lars":
        return LARS(model.parameters(), lr=lr or 10 * task.lr, momentum=task.momentum, eta=0.02)
    raise SpecError(f"optimizer must be sgd or lars; got {name!r}")


def train(
    task: str, strategy: str = "ddp", *, seed: int = 0, steps: int | None = None, batch: int | None = None, lr: float | None = None,
    optimizer: str = "sgd", warmup: int = 0, record: str | None = None, checkpoint: str | None = None, every: int = 50, timeout_s: float = 120.0,
    options: dict[str, Any] | None = None, evaluate_every: int = 0, stop_at_target: bool = False,
) -> dict[str, Any]:
    """Trains a task; the accuracy at the end, seconds, losses, and when the target was reached."""
    chosen, rank, world = get(task), dist.get_rank(), dist.get_world_size()
    batch = batch or chosen.batch
    if batch % world:
        raise SpecError(f"a batch of {batch} cannot be shared by {world} ranks; take a multiple of {world}")
    total = steps if steps is not None else chosen.epochs * (len(chosen.train[1]) // batch)
    torch.manual_seed(seed)
    model = chosen.model()
    own = optimizer_for(optimizer, model, chosen, lr)
    peak = [group["lr"] for group in own.param_groups]
    more = {} if strategy == "ddp" else {"timeout_s": timeout_s, **(options or {})}
    net, opt = pt.parallelize(model, own, plan=strategy, **more)
    saved = Checkpoints(checkpoint) if checkpoint else None
    start = saved.load(net, opt) if saved else 0
    losses, reached, began = [], None, time.perf_counter()
    with Record(record, rank=rank) as log:
        log.write("run", task=task, strategy=strategy, world=world, seed=seed, batch=batch, start=start)
        if record:
            _predict(log, chosen, strategy, net, batch // world)
        for step, indices in enumerate(batches(chosen, total, batch, seed, start), start + 1):
            if warmup:
                for group, top in zip(opt.param_groups, peak, strict=True):
                    group["lr"] = top * min(1.0, step / warmup)
            mine = indices[rank * batch // world : (rank + 1) * batch // world]
            loss, times = _step(net, opt, chosen.train[0][mine], chosen.train[1][mine])
            losses.append(loss)
            log.write("step", step=step, loss=loss, **times)
            if evaluate_every and step % evaluate_every == 0 and reached is None:
                now = time.perf_counter() - began
                if _accuracy(net, chosen) >= chosen.target:
                    reached = {"step": step, "seconds": now}
                    if stop_at_target:
                        break
            if saved and step % every == 0:
                saved.save(step, net, opt)
        seconds = time.perf_counter() - began
        if saved:
            saved.wait()
        found = {"accuracy": _accuracy(net, chosen), "seconds": seconds, "losses": losses, "reached": reached, "started_at": start,
                 "final_loss": _loss(net, chosen)}
        log.write("end", **{key: value for key, value in found.items() if key != "losses"})
    pt.close(net)
    return found


def _predict(log: Record, task: Task, strategy: str, net: nn.Module, rows: int) -> None:
    """What a step should take here, from a rank alone and a probe of the link; into the record, for `paceline check`. All ranks take part."""
    with Engine() as engine:
        machine = probe(engine, torch.device("cpu"))
    alone = task.model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=task.lr, momentum=task.momentum)
    profiler = Profiler(alone)
    for _ in range(8):
        _, times = _step(alone, optimizer, task.train[0][:rows], task.train[1][:rows])
        profiler.stepped(times["update_s"])
    profile = profiler.profile()
    names = (strategy,) if strategy.partition(":")[0] in SCHEMES else ()
    world = dist.get_world_size()
    cores = max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    measured = rates(names, max(p.numel() for p in net.parameters()), world, torch.device("cpu"))
    setting = Setting(machine=machine, world=world, cores=cores, rates=measured)
    with contextlib.suppress(SpecError):  # no model of this one: the record goes without
        seconds = step_s(strategy, profile, setting)
        forward, update = profile.forward_s, profile.update_s
        log.write("predicted", step=8 if strategy == "auto" else 2, seconds={
            "forward": forward, "backward": seconds - forward - update, "update": update, "step": seconds})


def _step(net: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> tuple[float, dict[str, float]]:
    """One step: its loss, and seconds by phase."""
    start = time.perf_counter()
    opt.zero_grad()
    loss = torch.nn.functional.cross_entropy(net(x), y)
    middle = time.perf_counter()
    loss.backward()
    late = time.perf_counter()
    opt.step()
    end = time.perf_counter()
    return loss.item(), {"forward_s": middle - start, "backward_s": late - middle, "update_s": end - late, "step_s": end - start}


@contextlib.contextmanager
def _evaluating(net: nn.Module) -> Iterator[None]:
    was = net.training
    net.eval()
    with torch.no_grad():
        yield
    net.train(was)


def _accuracy(net: nn.Module, task: Task) -> float:
    with _evaluating(net):
        return float((net(task.test[0]).argmax(1) == task.test[1]).float().mean())


def _loss(net: nn.Module, task: Task) -> float:
    """On a part of the training set: what runs are compared by."""
    with _evaluating(net):
        return float(torch.nn.functional.cross_entropy(net(task.train[0][:512]), task.train[1][:512]))


def several(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several trainings one after another in the same processes."""
    return [train(**run) for run in runs]


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
    parser.add_argument("--timeout-s", type=float, default=120.0)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    found = train(**vars(parser.parse_args()))
    if dist.get_rank() == 0:
        print(f"accuracy {found['accuracy']:.4f} loss {found['final_loss']!r} from step {found['started_at']}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
