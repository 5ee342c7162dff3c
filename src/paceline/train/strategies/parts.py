"""What deferred strategies send: pieces of flat memory, or the factors of a fully connected layer's gradient.

A part has a gradient that is reduced during the backward pass and an update that follows `optimizer.step()`;
both are jobs of the engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.train.comm import Collective, Engine, Job, Ticket, single
from paceline.train.layout import Piece
from paceline.train.strategies.base import State
from paceline.train.strategies.portion import Portion, States, Update


class DeferredPart(ABC):
    """One thing that travels; `shared`: each rank updates its share of every portion, otherwise all of it."""

    #: whether nothing is computed before the first message of its gradient
    bare = False

    def __init__(self, name: str, portions: list[Portion], engine: Engine, *, shared: bool) -> None:
        self.name, self.portions, self.engine, self.shared = name, portions, engine, shared
        self.rank, self.world = engine.rank, engine.world
        #: its parameters where they lie
        self.slots = [(one.piece.flat, slot) for one in portions for slot in one.piece.slots]
        self.parameters = [slot.parameter for _, slot in self.slots]
        #: parameters whose gradients have not become ready in this pass
        self.waiting: set[nn.Parameter] = set(self.parameters)
        #: of the gradient on its way; None: there is none that an update could use
        self.reduced: Ticket | None = None
        #: reduced gradients of passes before this one that belong to the same step
        self._held: list[Tensor] = []
        #: updates that have begun
        self.updates = 0

    @property
    def gradients(self) -> list[Tensor]:
        """The reduced gradient, as far as this rank updates it."""
        return [portion.gradient for portion in self.portions]

    @abstractmethod
    def reduce(self) -> Job:
        """A job: the mean over ranks of the gradient of one pass."""

    def mean(self) -> Job:
        """A job: the mean over ranks of the gradient, added to what is held of passes before."""
        yield from self.reduce()
        for gradient, held in zip(self.gradients, self._held, strict=False):
            gradient.add_(held)
        self._held = []

    def hold(self) -> None:
        """Keeps the reduced gradient for the next one to be added to it."""
        self._held = [gradient.clone() for gradient in self.gradients]

    def reading(self) -> Collective:
        """Brings the whole of a reduced gradient here that ranks share out."""
        for portion in self.portions:
            flat = portion.piece.flat
            if not flat.grad.numel():  # of factors, nobody has asked for it so far
                flat.grad = torch.empty_like(flat.data)
        whole = [portion.piece.grad for portion in self.portions]
        return Collective("gather", self.gradients, whole, last=True)

    def take_back(self) -> None:
        """Takes this rank's share of the whole gradient, which somebody may have changed, for the update."""
        if self.shared:
            for portion in self.portions:
                portion.gradient.copy_(portion.piece.flat.grad[portion.own])

    def measure(self, update: Update) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Before the update of an optimizer that needs norms of layers: see `Portion`."""
        for portion in self.portions:
            yield from portion.measure(update)

    def update(self, update: Update) -> Job:
        """A job: the own portions updated, then everyone's brought here."""
        self.updates += 1
        for portion in self.portions:
            portion.step(update)
        yield from self.bring()

    def bring(self) -> Job:
        """A job: what other ranks have updated is brought here."""
        if self.shared:
            values, whole = zip(*((one.values, one.piece.data) for one in self.portions), strict=True)
            yield Collective("gather", list(values), list(whole), last=True)

    def square(self) -> Tensor:
        """Of the reduced gradient, such that the sum over ranks is the square of its norm."""
        total = torch.stack([gradient.float().square().sum() for gradient in self.gradients]).sum()
        return total if self.shared else total / self.world

    # -- the optimizer's state -------------------------------------------------------------------------

    def take(self, full: Mapping[Any, State]) -> None:
        """Takes its share of the state of whole parameters."""
        for portion in self.portions:
            portion.take(full)

    def state(self) -> list[Tensor]:
        """This rank's share of state that ranks share out; nothing where each has all of it."""
        return [value for one in self.portions for value in one.split().values()] if self.shared else []

    def spread(self, rows: Sequence[Sequence[Tensor]], full: States) -> None:
        """Puts its state into the state of whole parameters; `rows`: the `state` of every rank."""
        each = [iter(row) for row in rows] if self.shared else []
        for portion in self.portions:
            portion.spread(each, full)

    def gathered(self) -> list[list[Tensor]]:
        """The `state` of every rank; all ranks take part."""
        own = self.state()
        if not own:
            return []
        asked = single(Collective("gather", own))
        rows: list[list[Tensor]] = self.engine.submit(f"state of {self.name}", asked).wait()
        return rows


class PiecePart(DeferredPart):
    """A piece of flat memory."""

    bare = True

    def __init__(self, piece: Piece, optimizer: Optimizer, engine: Engine, *, shared: bool) -> None:
        self.piece = piece
        self.portion = Portion(piece, optimizer, engine, shared=shared)
        super().__init__(piece.name, [self.portion], engine, shared=shared)
        self._arrived = torch.empty_like(piece.grad) if shared else None

    def reduce(self) -> Job:
        if self.world == 1:
            return
        if self._arrived is None:
            yield Collective("sum", [self.piece.grad])
            self.piece.grad.div_(self.world)
            return
        yield Collective("exchange", [self.piece.grad], [self._arrived], own=False)
        rows = list(self._arrived.view(self.world, -1))
        rows[self.rank] = self.piece.grad.view(self.world, -1)[self.rank]
        # in the order of ranks: the same sums in every run
        total = torch.add(rows[0], rows[1], out=self.portion.gradient)
        for row in rows[2:]:
            total.add_(row)
        total.div_(self.world)
