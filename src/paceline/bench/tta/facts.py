"""What times of a race are predicted from: a rank alone, the link, encoders, an evaluation; nothing of a
race.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.train.comm import Engine
from paceline.train.probe import cores, probe, rates
from paceline.train.profile import Profiler
from paceline.train.tasks import Task
from paceline.train.tasks.loop import optimizer_for
from paceline.train.tasks.step import right_answers, step

#: steps of a profile: those before it, at least, and seconds after which it ends
_WARM, _LEAST, _SECONDS = 3, 12, 0.25
_LOOKS = 8


def measured(
    task: Task, batch: int, optimizers: Sequence[str], schemes: Sequence[str], evaluated: Tensor
) -> dict[str, Any]:
    """Seconds of a rank's share of a batch under each optimizer, without communication, and of its share of
    an evaluation; means, as races add up all their steps. All ranks take part, so that each has a core.
    """
    cpu, rows = torch.device("cpu"), batch // dist.get_world_size()
    with Engine() as engine:
        machine = probe(engine, cpu, whole=True)
    profiles = {name: _profile(task, rows, name) for name in optimizers}
    sizes = [p.numel() for p in task.model().parameters()]
    coded = rates(schemes, sizes, dist.get_world_size(), cpu)
    own, threads = cores(cpu)
    return {
        "machine": asdict(machine),
        "profiles": profiles,
        "rates": asdict(coded),
        "cores": own,
        "threads": threads,
        "evaluation_s": _evaluation_s(task, evaluated),
    }


def _profile(task: Task, rows: int, optimizer: str) -> dict[str, Any]:
    net = task.model()
    opt = optimizer_for(optimizer, net, task, None)
    profiler, whole_s = Profiler(net), list[float]()
    dist.barrier()
    for number in count(-_WARM):
        picked = torch.randint(len(task.train[1]), (rows,))
        begun = time.perf_counter()
        done = step(net, opt, task.train[0][picked], task.train[1][picked])
        profiler.stepped(done.seconds["update_s"])
        if number >= 0:
            whole_s.append(time.perf_counter() - begun)
        if number >= _LEAST and sum(whole_s) > _SECONDS:
            break
    return {**profiler.profile(opt).to_dict(), "step_s": statistics.fmean(whole_s)}


def _evaluation_s(task: Task, evaluated: Tensor) -> float:
    net, right = task.model(), torch.zeros(len(evaluated), dtype=torch.int64)
    seconds = []
    for _ in range(_LOOKS):
        begun = time.perf_counter()
        right_answers(net, evaluated, right)
        seconds.append(time.perf_counter() - begun)
    return statistics.fmean(seconds)
