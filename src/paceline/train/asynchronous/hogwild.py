"""Hogwild: workers of one machine write to the same parameters in shared memory, without locks (Niu, Recht,
Ré and Wright 2011).

Updates of sparse gradients touch only the rows that occur. A dense gradient that is mostly zero is written
where it is not. Lost updates are part of the method: with sparse ones collisions are rare.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.errors import RunError
from paceline.train.asynchronous.flat import FlatVector
from paceline.train.asynchronous.launch import announce
from paceline.train.asynchronous.meeting import rendezvous, world
from paceline.train.asynchronous.remote import Wrapper
from paceline.train.asynchronous.shared_file import SharedFile
from paceline.train.asynchronous.store import TIMEOUT_S, RunStore

#: below this share of elements that are not zero a dense gradient is written as a sparse one
_SPARSE = 0.5


class HogwildOptimizer(Wrapper):
    """Steps on shared parameters.

    Plain SGD writes sparsely; any other optimizer steps as it does, with state of its own per worker.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        flat: FlatVector,
        file: SharedFile,
        store: RunStore,
        worker: int,
    ) -> None:
        super().__init__(optimizer, worker)
        self._flat, self._file, self._store = flat, file, store
        self._closed = False

    @property
    def _plain(self) -> bool:
        """Whether a step is the gradient times the learning rate now; schedulers may bring a momentum in."""
        return isinstance(self.inner, torch.optim.SGD) and not any(
            group["momentum"] or group["weight_decay"] or group["maximize"] for group in self.param_groups
        )

    def close(self) -> None:
        """Leaves the run with a copy of the parameters: those in memory are the others'."""
        if not self._closed:
            self._closed = True
            for p in self._flat.parameters:
                p.data = p.data.clone()
            self._file.leave()
            self._store.add("left", 1)
        super().close()

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
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    workers: int | None = None,
    timeout_s: float = TIMEOUT_S,
) -> tuple[nn.Module, HogwildOptimizer]:
    """Maps the parameters of all workers of the run onto one file in memory."""
    flat, place, expected = FlatVector(optimizer), rendezvous(timeout_s), world(workers)
    store = place.store()
    worker = store.add("workers", 1) - 1
    if worker == 0:
        file = SharedFile.create()
        shared = _mapped(file.path, flat.count)
        shared.copy_(flat.values())
        store.set("memory", str(file.path))
        announce(place, workers=expected)
    else:
        file = SharedFile.join(Path(store.get("memory").decode()))
        count = file.path.stat().st_size // 4
        if count != flat.count:
            raise RunError(
                f"worker {worker} has {flat.count} parameters, the first one {count}; "
                "all workers train the same model"
            )
        shared = _mapped(file.path, flat.count)
    deadline = time.monotonic() + place.timeout_s
    mapped = store.add("mapped", 1)
    while mapped < expected and time.monotonic() < deadline:  # else a late one finds them gone
        time.sleep(0.005)
        mapped = store.add("mapped", 0)
    for p, piece in zip(flat.parameters, shared.split([p.numel() for p in flat.parameters]), strict=True):
        p.data = piece.view_as(p)
    return model, HogwildOptimizer(optimizer, flat, file, store, worker)


def _mapped(path: Path, count: int) -> Tensor:
    return torch.from_file(str(path), shared=True, size=count, dtype=torch.float32)
