"""Hogwild: workers of one machine write to the same parameters in shared memory, without locks (Niu, Recht, Ré and Wright 2011).

Updates of sparse gradients touch only the rows that occur. A dense gradient that is mostly zero is written where it is not.
Lost updates are part of the method: with sparse ones collisions are rare.
"""

from __future__ import annotations

import atexit
import os
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.errors import RunError
from paceline.train.asynchronous.flat import Flat
from paceline.train.asynchronous.remote import Wrapper

#: below this share of elements that are not zero a dense gradient is written as a sparse one
_SPARSE = 0.5


class HogwildOptimizer(Wrapper):
    """Steps on shared parameters. Plain SGD writes sparsely; any other optimizer steps as it does, with state of its own per worker."""

    def __init__(self, optimizer: torch.optim.Optimizer, worker: int) -> None:
        super().__init__(optimizer, worker)
        self._plain = isinstance(optimizer, torch.optim.SGD) and not any(
            group["momentum"] or group["weight_decay"] or group["maximize"] for group in optimizer.param_groups)

    @torch.no_grad()
    def _step(self) -> None:
        """Straight into memory that others are reading and writing."""
        if not self._plain:
            self.inner.step()
            return
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    _write(p, p.grad, float(group["lr"]))


def _write(p: Tensor, gradient: Tensor, rate: float) -> None:
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        p.index_add_(0, gradient.indices()[0], gradient.values(), alpha=-rate)
        return
    flat = gradient.reshape(-1)
    touched = flat.nonzero().squeeze(1)
    if touched.numel() < _SPARSE * flat.numel():
        p.view(-1).index_add_(0, touched, flat[touched], alpha=-rate)
    else:
        p.add_(gradient, alpha=-rate)


def hogwild(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, name: str | None = None, wait_s: float = 60.0,
) -> tuple[nn.Module, HogwildOptimizer]:
    """Maps the parameters of all workers with the same `name` (that of the run unless given) onto one file in memory."""
    flat = Flat(optimizer)
    run = name or os.environ.get("PACELINE_RENDEZVOUS", os.environ.get("TORCHELASTIC_RUN_ID", "hogwild"))
    folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    path = folder / ("paceline-" + "".join(c if c.isalnum() else "-" for c in run))
    first = _claim(path)
    shared = torch.from_file(str(path), shared=True, size=flat.count, dtype=torch.float32)
    ready = path.with_name(path.name + ".ready")
    if first:
        shared.copy_(flat.values())
        ready.touch()
        atexit.register(_remove, path, ready)
    deadline = time.monotonic() + wait_s
    while not ready.exists():
        if time.monotonic() > deadline:
            raise RunError(f"shared parameters {path} were not filled within {wait_s:g} s; remove the file if a crashed run left it")
        time.sleep(0.005)
    for p, piece in zip(flat.parameters, shared.split([p.numel() for p in flat.parameters]), strict=True):
        p.data = piece.view_as(p)
    worker = int(os.environ.get("PACELINE_WORKER", os.environ.get("RANK", "0")))
    return model, HogwildOptimizer(optimizer, worker)


def _claim(path: Path) -> bool:
    """Whether this process is the first; the file stays as long as that process does."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR))
    except FileExistsError:
        return False
    return True


def _remove(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
