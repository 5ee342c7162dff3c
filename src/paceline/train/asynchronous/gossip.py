"""Gossip: no server; every worker steps on its own and averages with a neighbour at random (AD-PSGD, Lian et
al. 2018).

Each worker serves its own live parameters as a shard whose rule is to meet half way: both sides end at the
mean. Whoever asks waits for an answer; whoever is asked does not notice but for the lock, so that nobody can
wait in a circle.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

from paceline.errors import SpecError
from paceline.spec.defaults import PLAIN
from paceline.train.asynchronous.client import RoundTrip
from paceline.train.asynchronous.flat import FlatVector
from paceline.train.asynchronous.launch import announce
from paceline.train.asynchronous.meeting import rendezvous, world
from paceline.train.asynchronous.peer import Peers
from paceline.train.asynchronous.remote import Distributed
from paceline.train.asynchronous.store import TIMEOUT_S


class GossipOptimizer(Distributed):
    """The user's optimizer, and a meeting with one neighbour every `period` steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, peers: Peers, *, period: int, seed: int) -> None:
        super().__init__(optimizer, peers)
        self._peers, self.period, self._steps, self._random = (
            peers,
            period,
            0,
            random.Random(f"{seed}/{peers.worker}"),
        )
        # what visitors see and move: a vector of its own, since autograd is using the parameters meanwhile
        self._open = self.flat.values()
        peers.attach(lambda: self._open.clone(), self._halve)

    def _halve(self, theirs: Tensor) -> None:
        """Meets a visitor half way."""
        self._open += 0.5 * (theirs - self._open)

    def _step(self) -> RoundTrip | None:
        # the gradient is of older parameters, the step is taken from where visitors have moved them
        with self._peers.lock:
            self.flat.load(self._open)
            self.inner.step()
            self._open = mine = self.flat.values()
        self._steps += 1
        neighbours = [] if self._steps % self.period else self._peers.others()
        if not neighbours:
            return None
        theirs, exchange = self._peers.meet(self._random.choice(neighbours), mine.clone())
        if theirs is not None:
            with self._peers.lock:
                # the neighbour moved by half the difference from `mine`; doing the same here keeps the sum of
                # both
                self._open = self._open + 0.5 * (theirs - mine)
                self.flat.load(self._open)
        return exchange


def check_period(period: int) -> None:
    """Raises where it is none."""
    if period < 1:
        raise SpecError(f"a period counts from 1, got {period}")


def gossip(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    period: int = PLAIN.period,
    workers: int | None = None,
    seed: int = 0,
    timeout_s: float = TIMEOUT_S,
) -> tuple[nn.Module, GossipOptimizer]:
    """Every worker is a neighbour of every other; all start from the parameters of the first."""
    check_period(period)
    place, expected = rendezvous(timeout_s), world(workers)
    peers = Peers(place, FlatVector(optimizer).values(), expected=expected)
    if peers.worker == 0:
        announce(place, workers=expected)
    return model, GossipOptimizer(optimizer, peers, period=period, seed=seed)
