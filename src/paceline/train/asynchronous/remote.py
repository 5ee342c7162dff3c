"""The optimizer that a user's loop steps: it looks like theirs, and the work is done with the servers."""

from __future__ import annotations

import atexit
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.train.asynchronous.client import Client, Exchange, Joined
from paceline.train.asynchronous.flat import Flat
from paceline.train.asynchronous.record import Recorder


class Wrapper(ABC):
    """What all of these optimizers share: the user's own underneath, records, an orderly end."""

    def __init__(self, optimizer: torch.optim.Optimizer, worker: int) -> None:
        self.inner = optimizer
        self.recorder = Recorder(worker)
        self.last: Exchange | None = None
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
    fetched with every so many. In between the worker goes on with the parameters it has.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, client: Client, *, push_every: int = 1, fetch_every: int = 1) -> None:
        super().__init__(optimizer, client)
        self._client = client
        self._push_every, self._fetch_every = push_every, fetch_every
        self._steps, self._unfetched = 0, 0
        self._sum: Tensor | None = None

    def _step(self) -> Exchange | None:
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


