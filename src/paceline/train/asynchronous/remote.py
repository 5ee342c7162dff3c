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
from torch.optim import Optimizer

from paceline.errors import RunError
from paceline.train._torch import mark_stepped
from paceline.train.asynchronous.client import Client, Joined, RoundTrip
from paceline.train.asynchronous.flat import FlatVector
from paceline.train.asynchronous.moments import divided, whole
from paceline.train.asynchronous.policy import UpdatePolicy
from paceline.train.asynchronous.record import Recorder

#: how many times as long this worker is to take for its compute: to try out what a slow one does to the
#: others
SLOW = "PACELINE_SLOW"


class Wrapper(Optimizer, ABC):
    """What all of these optimizers share: the user's own underneath, records, an orderly end.

    They are optimizers to torch, so that its schedulers and scalers take them. Parameter groups and state are
    the user's own.
    """

    def __init__(self, optimizer: Optimizer, worker: int) -> None:
        self.inner = optimizer
        self.recorder = Recorder(worker)
        self.last: RoundTrip | None = None
        self._slow = float(os.environ.get(SLOW, "1"))
        self.__setstate__({})  # hooks and profiling, as of a copied optimizer: its __init__ would add groups
        atexit.register(self.close)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The user's own: schedulers change the learning rate there."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not in the middle of a run: its servers and workers have divided the parameters."""
        raise RunError(
            "a run has the parameters that its optimizer had at the start; "
            "add parameter groups before parallelize"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of this worker."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._slow > 1 and self.recorder.steps:  # what came before the first step was not compute
            time.sleep((self._slow - 1) * self.recorder.computed())
        compute_s = self.recorder.computed()
        self.last = self._step()
        mark_stepped(self.inner)  # for schedulers that were made for it before the run
        self.recorder.exchanged(compute_s, self.last)
        return loss

    @abstractmethod
    def _step(self) -> RoundTrip | None:
        """The step itself, and what was exchanged in it."""

    def close(self) -> None:
        """Leaves the run; also called when the process ends."""
        atexit.unregister(self.close)
        self.recorder.close()


class Distributed(Wrapper):
    """Workers with parameters of their own, which others bring up to date."""

    #: of the servers, where there are any
    policy: UpdatePolicy | None = None

    def __init__(self, optimizer: Optimizer, run: Joined) -> None:
        self._run = run
        self.flat = FlatVector(optimizer)
        self.flat.load(run.join())
        super().__init__(optimizer, run.worker)

    def close(self) -> None:
        super().close()
        self._run.leave()


class ServerOptimizer(Distributed):
    """Gradients go to the servers, whose optimizer steps; parameters come back.

    `push_every` and `fetch_every` (DistBelief, Dean et al. 2012): gradients are summed over that many steps
    before they are sent, parameters are fetched with every so many. In between the worker goes on with the
    parameters it has. `overlap` sends the part of each server as soon as its gradients are there.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        client: Client,
        *,
        push_every: int = 1,
        fetch_every: int = 1,
        overlap: bool = False,
    ) -> None:
        super().__init__(optimizer, client)
        self.inner.state.clear()  # which the servers have now
        self._client = client
        self._shards = self.flat.shards(len(client.sizes))
        self._push_every, self._fetch_every = push_every, fetch_every
        self._steps, self._unfetched = 0, 0
        self._sum: Tensor | None = None
        self._early = Early(self.flat, client) if overlap else None

    def _step(self) -> RoundTrip | None:
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
        mean = self._sum / self._push_every
        values, exchange = self._client.exchange(mean, fetch=fetch, options=self.flat.options())
        self._sum = None
        if values is not None:
            self.flat.load(values)
            self._unfetched = 0
        return exchange

    def state_dict(self) -> dict[str, Any]:
        """As the optimizer of one process would give it; the servers are asked for what they keep."""
        kept = self._client.state()
        mine, self.inner.state = self.inner.state, whole(self.flat.parameters, self._shards, kept)  # type: ignore[assignment]
        try:
            return self.inner.state_dict()
        finally:
            self.inner.state = mine

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hands state to the servers; all workers load the same, before the first step."""
        self.inner.load_state_dict(state_dict)
        self._client.load(divided(self.flat.parameters, self._shards, self.inner.state))
        self.inner.state.clear()

    def close(self) -> None:
        if self._early is not None:
            self._early.remove()
        super().close()


class Early:
    """Sends the part of a server as soon as the backward pass has its last gradient, while the pass goes on
    with earlier layers.
    """

    def __init__(self, flat: FlatVector, client: Client) -> None:
        self._flat, self._client = flat, client
        self._pieces = flat.pieces(client.sizes)
        self._where = {
            id(p): [s for s, pieces in enumerate(self._pieces) if any(q is p for q, _, _ in pieces)]
            for p in flat.parameters
        }
        self._missing: list[set[int]] = []
        self._again()
        self._hooks = [p.register_post_accumulate_grad_hook(self._ready) for p in flat.parameters]

    def remove(self) -> None:
        """Takes the hooks away."""
        for hook in self._hooks:
            hook.remove()

    def _again(self) -> None:
        self._missing = [{id(p) for p, _, _ in pieces} for pieces in self._pieces]

    def _ready(self, p: Tensor) -> None:
        for server in self._where[id(p)]:
            if not self._missing[server]:
                raise RunError(
                    "overlap sends gradients during the backward pass, of which a step may have one; leave it"
                    " out to accumulate gradients"
                )
            self._missing[server].discard(id(p))
            if not self._missing[server]:
                self._begin(server)

    def _begin(self, server: int) -> None:
        self._client.begin(server, self._flat.gathered(self._pieces[server]), options=self._flat.options())

    def finish(self) -> tuple[Tensor | None, RoundTrip]:
        """Sends what had no gradient in this pass, and waits for all."""
        for server, missing in enumerate(self._missing):
            if missing:
                self._begin(server)
        self._again()
        return self._client.finish()


class ElasticOptimizer(Distributed):
    """The worker steps on its own, with momentum as its optimizer has it; every `period` steps it and the
    centre pull at each other.
    """

    def __init__(self, optimizer: Optimizer, client: Client, *, period: int) -> None:
        super().__init__(optimizer, client)
        self._client = client
        self.period, self._steps = period, 0

    def _step(self) -> RoundTrip | None:
        self.inner.step()
        self._steps += 1
        if self._steps % self.period:
            return None
        moves, exchange = self._client.exchange(self.flat.values())
        assert moves is not None
        self.flat.move(moves)
        return exchange
