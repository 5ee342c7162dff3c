"""The optimizer that a user's loop steps: it looks like theirs, and the work is done with the servers."""

from __future__ import annotations

import atexit
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.errors import RunError
from paceline.train.asynchronous.client import Client, Exchange, Joined
from paceline.train.asynchronous.flat import Flat
from paceline.train.asynchronous.record import Recorder

#: how many times as long this worker is to take for its compute: to try out what a slow one does to the others
SLOW = "PACELINE_SLOW"


class Wrapper(ABC):
    """What all of these optimizers share: the user's own underneath, records, an orderly end."""

    def __init__(self, optimizer: torch.optim.Optimizer, worker: int) -> None:
        self.inner = optimizer
        self.recorder = Recorder(worker)
        self.last: Exchange | None = None
        self._slow = float(os.environ.get(SLOW, "1"))
        atexit.register(self.close)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The user's own: schedulers change the learning rate there."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        return self.inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of this worker."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._slow > 1 and self.recorder.steps:  # what came before the first step was not compute
            time.sleep((self._slow - 1) * self.recorder.computed())
        compute_s = self.recorder.computed()
        self.last = self._step()
        self.recorder.exchanged(compute_s, self.last)
        return loss

    @abstractmethod
    def _step(self) -> Exchange | None:
        """The step itself, and what was exchanged in it."""

    def close(self) -> None:
        """Leaves the run; also called when the process ends."""
        atexit.unregister(self.close)
        self.recorder.close()


class Distributed(Wrapper):
    """Workers with parameters of their own, which others bring up to date."""

    def __init__(self, optimizer: torch.optim.Optimizer, run: Joined) -> None:
        self._run = run
        self.flat = Flat(optimizer)
        self.flat.load(run.join())
        self._start_rates = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer, run.worker)

    def _rate(self) -> float:
        """Learning rate now, over the one at the start: schedules of the worker act on the server."""
        start = self._start_rates[0]
        return float(self.param_groups[0]["lr"]) / start if start else 1.0

    def close(self) -> None:
        self._run.leave()
        super().close()


class ServerOptimizer(Distributed):
    """Gradients go to the servers, whose optimizer steps; parameters come back.

    `push_every` and `fetch_every` (DistBelief, Dean et al. 2012): gradients are summed over that many steps before they are sent, parameters are
    fetched with every so many. In between the worker goes on with the parameters it has. `overlap` sends the part of each server as soon as its
    gradients are there.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, client: Client, *, push_every: int = 1, fetch_every: int = 1, overlap: bool = False,
    ) -> None:
        super().__init__(optimizer, client)
        self._client = client
        self._push_every, self._fetch_every = push_every, fetch_every
        self._steps, self._unfetched = 0, 0
        self._sum: Tensor | None = None
        self._early = Early(self.flat, client, self._rate) if overlap else None

    def _step(self) -> Exchange | None:
        if self._early is not None:
            values, exchange = self._early.finish()
            assert values is not None
            self.flat.load(values)
            return exchange
        gradients = self.flat.gradients()
        self._sum = gradients if self._sum is None else self._sum.add_(gradients)
        self._steps += 1
        self._unfetched += 1
        if self._steps % self._push_every:
            return None
        fetch = self._unfetched >= self._fetch_every
        values, exchange = self._client.exchange(self._sum / self._push_every, fetch=fetch, rate=self._rate())
        self._sum = None
        if values is not None:
            self.flat.load(values)
            self._unfetched = 0
        return exchange


class Early:
    """Sends the part of a server as soon as the backward pass has its last gradient, while the pass goes on with earlier layers."""

    def __init__(self, flat: Flat, client: Client, rate: Callable[[], float]) -> None:
        self._flat, self._client, self._rate = flat, client, rate
        self._pieces = flat.pieces(client.sizes)
        self._where = {id(p): [s for s, pieces in enumerate(self._pieces) if any(q is p for q, _, _ in pieces)] for p in flat.parameters}
        self._missing: list[set[int]] = []
        self._again()
        for p in flat.parameters:
            p.register_post_accumulate_grad_hook(self._ready)

    def _again(self) -> None:
        self._missing = [{id(p) for p, _, _ in pieces} for pieces in self._pieces]

    def _ready(self, p: Tensor) -> None:
        for server in self._where[id(p)]:
            if not self._missing[server]:
                raise RunError("overlap sends gradients during the backward pass, of which a step may have one; leave it out to accumulate gradients")
            self._missing[server].discard(id(p))
            if not self._missing[server]:
                self._begin(server)

    def _begin(self, server: int) -> None:
        self._client.begin(server, self._flat.gathered(self._pieces[server]), rate=self._rate())

    def finish(self) -> tuple[Tensor | None, Exchange]:
        """Sends what had no gradient in this pass, and waits for all."""
        for server, missing in enumerate(self._missing):
            if missing:
                self._begin(server)
        self._again()
        return self._client.finish()


class ElasticOptimizer(Distributed):
    """The worker steps on its own, with momentum as its optimizer has it; every `period` steps it and the centre pull at each other."""

    def __init__(self, optimizer: torch.optim.Optimizer, client: Client, *, period: int = 4) -> None:
        super().__init__(optimizer, client)
        self._client = client
        self._period, self._steps = period, 0

    def _step(self) -> Exchange | None:
        self.inner.step()
        self._steps += 1
        if self._steps % self._period:
            return None
        moves, exchange = self._client.exchange(self.flat.values())
        assert moves is not None
        self.flat.move(moves)
        return exchange


