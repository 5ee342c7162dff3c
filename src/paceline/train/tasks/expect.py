"""What a step of a task should take here, for the record of a run and `paceline check`."""

from __future__ import annotations

import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import SpecError
from paceline.spec.compression import SCHEMES
from paceline.train.comm import Engine
from paceline.train.probe import probe, rates
from paceline.train.profile import Profiler
from paceline.train.record import Record
from paceline.train.strategies.estimate import Setting, allowed, step_s
from paceline.train.tasks import Task
from paceline.train.tasks.step import step


def predict(log: Record, task: Task, strategy: str, net: nn.Module, rows: int) -> None:
    """Seconds by phase, from a rank alone and a probe of the link; into the record. All ranks take part."""
    with Engine() as engine:
        machine = probe(engine, torch.device("cpu"))
    alone = task.model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=task.lr, momentum=task.momentum)
    profiler = Profiler(alone)
    for _ in range(8):
        done = step(alone, optimizer, task.train[0][:rows], task.train[1][:rows])
        profiler.stepped(done.seconds["update_s"])
    profile = profiler.profile()
    kind = strategy.partition(":")[0]
    names = allowed(strategy) if kind == "auto" else ()
    if kind in SCHEMES:
        names = (strategy,)
    world = dist.get_world_size()
    cores = max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    measured = rates(names, [p.numel() for p in net.parameters()], world, torch.device("cpu"))
    setting = Setting(machine=machine, world=world, cores=cores, rates=measured)
    with contextlib.suppress(SpecError):  # no model of this one: the record goes without
        seconds = step_s(strategy, profile, setting)
        forward, update = profile.forward_s, profile.update_s
        first = 8 if kind == "auto" else 2
        log.write(
            "predicted",
            step=first,
            compute_backward_s=profile.backward_s,
            seconds={
                "forward": forward,
                "backward": seconds - forward - update,
                "update": update,
                "step": seconds,
            },
        )
