"""A task's run on several ranks, acted out by one process: for accuracies on machines with fewer cores than
ranks.

Each rank's gradients are computed in turn and go through that rank's own compressor, with the random numbers
that it would draw; nothing is sent. Tests hold it against real processes. For compressed and plain averaging
(`ddp`, `allreduce` and the schemes), not for strategies that defer.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from paceline.cost.compression import assign
from paceline.errors import SpecError
from paceline.spec.compression import SCHEMES, Float32, Scheme, parse
from paceline.train.compress import Compressor, Round, make
from paceline.train.compress.momentum import take_momentum
from paceline.train.tasks import get
from paceline.train.tasks.course import batches, course
from paceline.train.tasks.loop import optimizer_for
from paceline.train.tasks.step import accuracy, final_loss, noted


class Acted:
    """The compressors of all ranks, and the mean that they arrive at."""

    def __init__(self, model: nn.Module, strategy: str, optimizer: torch.optim.Optimizer, world: int) -> None:
        if strategy.partition(":")[0] not in ("ddp", "allreduce", *SCHEMES):
            raise SpecError(f"one process acts out ddp, allreduce and compressed averaging; got {strategy!r}")
        self.world, self._named = world, dict(model.named_parameters())
        scheme = Float32() if strategy in ("ddp", "allreduce") else parse(strategy)
        chosen = dict(assign(scheme, [(name, tuple(p.shape)) for name, p in self._named.items()]))
        self._taken = take_momentum(chosen, optimizer)
        self._ranks = [_made(chosen, rank, world) for rank in range(world)]

    def mean(self, gradients: list[dict[str, Tensor]]) -> None:
        """Puts the mean of the ranks' gradients, as it arrives, into each parameter."""
        every = [compressor for rank in self._ranks for compressor in dict.fromkeys(rank.values())]
        for compressor in every:
            compressor.begin_step()
        for name, parameter in self._named.items():
            own = [rank[name] for rank in gradients]
            if isinstance(self._ranks[0][name].scheme, Float32):
                parameter.grad = torch.stack(own).sum(0) / self.world
                if self._taken is not None:
                    self._taken.decay(parameter, parameter.grad)
                    self._taken.accelerate(name, parameter.grad)
                continue
            if self._taken is not None:
                for gradient in own:
                    self._taken.decay(parameter, gradient)
            exchanges = [
                rank[name].exchange(name, gradient, gradient)
                for rank, gradient in zip(self._ranks, own, strict=True)
            ]
            asked = [next(exchange) for exchange in exchanges]
            while asked:
                came = _carried_out(asked)
                asked = []
                for exchange in exchanges:
                    try:
                        asked.append(exchange.send([list(part) for part in came]))
                    except StopIteration:
                        continue
            parameter.grad = own[0]
        for compressor in every:
            compressor.end_step()


def _made(chosen: dict[str, Scheme], rank: int, world: int) -> dict[str, Compressor]:
    made = {scheme: make(scheme, rank=rank, world=world) for scheme in dict.fromkeys(chosen.values())}
    return {name: made[scheme] for name, scheme in chosen.items()}


def _carried_out(asked: list[Round]) -> list[list[Tensor]]:
    """What a collective would bring."""
    if asked[0].op == "gather":
        return [request.payload for request in asked]
    together = [torch.stack(parts) for parts in zip(*(request.payload for request in asked), strict=True)]
    return [[part.amax(0) if asked[0].op == "max" else part.sum(0) for part in together]]


def train(
    task: str,
    strategy: str = "ddp",
    *,
    world: int = 2,
    seed: int = 0,
    steps: int | None = None,
    batch: int | None = None,
    lr: float | None = None,
    optimizer: str = "sgd",
    weight_decay: float | None = None,
    warmup: int | None = None,
) -> dict[str, Any]:
    """What `loop.train` gives, of as many ranks."""
    chosen = get(task)
    planned = course(chosen, steps=steps, batch=batch, warmup=warmup)
    torch.manual_seed(seed)
    net = chosen.model()
    opt = optimizer_for(optimizer, net, chosen, lr, weight_decay)
    peak, acted, began = opt.param_groups[0]["lr"], Acted(net, strategy, opt, world), time.perf_counter()
    for one, indices in zip(planned, batches(chosen, [one.batch for one in planned], seed), strict=True):
        opt.param_groups[0]["lr"] = peak * one.rate
        gradients = []
        for rank in range(world):
            mine = indices[rank * len(indices) // world : (rank + 1) * len(indices) // world]
            loss = torch.nn.functional.cross_entropy(net(chosen.train[0][mine]), chosen.train[1][mine]) * (
                len(mine) * world / len(indices)
            )
            found = torch.autograd.grad(loss, list(net.parameters()))
            gradients.append(dict(zip(dict(net.named_parameters()), found, strict=True)))
        acted.mean(gradients)
        opt.step()
    return {
        "accuracy": accuracy(net, chosen),
        "final_loss": final_loss(net, chosen),
        "seconds": time.perf_counter() - began,
        "reached": None,
    }


def several(runs: list[dict[str, Any]], raw: str | None = None) -> list[dict[str, Any]]:
    """One after another; each is appended to the file `raw` as soon as it is done."""
    return [noted(run, train(**run), raw) for run in runs]
