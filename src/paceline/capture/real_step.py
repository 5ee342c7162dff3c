"""A model with values: built, initialised and run on this machine's CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.capture.build import default_loss
from paceline.capture.resolve import resolve
from paceline.capture.step import StepInputs, _user_code
from paceline.errors import SpecError
from paceline.spec.workload import Workload
from paceline.units import show

#: learning rate of the plain steps that a model takes before it is measured
RATE = 0.01
#: standard deviation of the embeddings of catalog models, as language models start
EMBEDDING_DEVIATION = 0.02
#: bytes per parameter of a real step in fp32: weight and gradient
_BYTES = 8


def real_step(model: Any, *, batch: int, seq: int | None = None, image: int | None = None) -> StepInputs:
    """The model that a user names, with its values, and inputs of so many samples."""
    torch.manual_seed(0)
    job, _ = resolve(model, batch=batch, seq=seq, image=image, real=True)
    job.module.train()
    if isinstance(model, str) and ":" not in model:
        _initialise(job)
        # the catalog's inputs have sizes alone
        return replace(job, args=tuple(_drawn(job, value) for value in job.args))
    return job


def _initialise(job: StepInputs) -> None:
    """Small embeddings: torch's have deviation 1, and a head that shares them would saturate its softmax."""
    for module in job.module.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            nn.init.normal_(module.weight, std=EMBEDDING_DEVIATION)


def _drawn(job: StepInputs, value: Any) -> Any:
    """A random input like `value`: normal, or an index into any embedding (of tokens: into the largest)."""
    if not isinstance(value, Tensor) or value.is_floating_point():
        return torch.randn_like(value) if isinstance(value, Tensor) else value
    rows = [
        module.num_embeddings
        for module in job.module.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    ]
    choose = max if job.unit == "tokens" else min
    return torch.randint(choose(rows, default=1), value.shape)


def check_size(workload: Workload) -> None:
    """Raises where a model's weights and gradients do not fit this machine."""
    memory = _memory_bytes()
    needed = workload.parameter_count * _BYTES
    if memory is not None and needed > memory / 2:
        raise SpecError(
            f"{workload.name} would run for real, and its weights and gradients are"
            f" {show(needed, 'bytes')}, with {show(memory, 'bytes')} in this machine; take a smaller model of"
            " its kind"
        )


def _memory_bytes() -> int | None:
    """Memory of this machine, where the system says it."""
    with suppress(ValueError, OSError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def loss_of(job: StepInputs) -> Tensor:
    """Runs the model forward, to its loss."""
    with _user_code(job.name, "forward pass"):
        return (job.loss or default_loss)(job.module(*job.args, **dict(job.kwargs)))


def take_steps(job: StepInputs, steps: int) -> None:
    """Updates the model by plain gradient descent on its inputs."""
    trained = [parameter for parameter in job.module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(job).backward()
        optimizer.step()


def passes(job: StepInputs) -> list[Callable[[], Tensor]]:
    """The forward passes to measure."""
    return [partial(loss_of, job)]
