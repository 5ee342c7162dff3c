"""What deferred strategies send: pieces of flat memory, or the factors of a fully connected layer's gradient.

A part has a gradient that is reduced during the backward pass and an update that follows `optimizer.step()`;
both are jobs of the engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.train.comm import Collective, Engine, Job, Ticket
from paceline.train.layout import Piece
from paceline.train.optim.layerwise import Layerwise
from paceline.train.strategies.updates import clone, spread_state, take_state, update

Settings = Sequence[Mapping[str, Any]]
State = dict[Any, dict[str, Any]]


class Part(ABC):
    """One thing that travels."""

    #: whether nothing is computed before the first message of its gradient
    bare = False

    def __init__(self, name: str, parameters: list[nn.Parameter], rank: int, world: int) -> None:
        self.name, self.parameters, self.rank, self.world = name, parameters, rank, world
        #: gradients that have not become ready in this pass
        self.waiting = len(parameters)
        #: of the gradient on its way; None: there is none that an update could use
        self.reduced: Ticket | None = None
        #: of passes before this one that belong to the same step
        self._held: list[Tensor] = []
        #: updates that have begun
        self.updates = 0

    @property
    @abstractmethod
    def results(self) -> list[Tensor]:
        """Where the reduced gradient is, as far as this rank updates it."""

    def mean(self) -> Job:
        """A job: the mean over ranks of the gradient, as far as this rank updates it, added to what is held
        of passes before.
        """
        yield from self.reduce()
        for result, held in zip(self.results, self._held, strict=False):
            result.add_(held)
        self._held = []

    def reading(self) -> Collective | None:
        """What brings the whole of the reduced gradient here; None where it is here."""
        return None

    def take_back(self) -> None:  # noqa: B027
        """Takes this rank's share of the whole gradient, which somebody may have changed, for the update."""

    def hold(self) -> None:
        """Keeps the reduced gradient for the next one to be added to it."""
        self._held = [result.clone() for result in self.results]

    @abstractmethod
    def reduce(self) -> Job:
        """A job: the mean over ranks of the gradient of one pass."""

    @abstractmethod
    def update(self, now: Settings, scale: float | None) -> Job:
        """A job: the own part updated with the settings of now, then everyone's brought here."""

    @abstractmethod
    def square(self) -> Tensor:
        """Of the reduced gradient, such that the sum over ranks is the square of its norm."""

    @abstractmethod
    def take(self, full: Mapping[Any, Mapping[str, Any]]) -> None:
        """Takes its share of the state of whole parameters."""

    def release(self) -> None:  # noqa: B027
        """Lets go of the model, where it has changed something there."""

    @abstractmethod
    def shared(self) -> list[Tensor]:
        """This rank's share of state that ranks share out; nothing where each has all of it."""

    @abstractmethod
    def spread(self, rows: Sequence[Sequence[Tensor]], full: State) -> None:
        """Puts its state into the state of whole parameters; `rows`: what is `shared`, by rank."""

    def gathered(self, engine: Engine) -> list[list[Tensor]]:
        """What is `shared`, of every rank; all ranks take part."""
        own = self.shared()
        if not own:
            return []
        rows: list[list[Tensor]] = engine.submit(f"state of {self.name}", _gather(own)).wait()
        return rows


class PiecePart(Part):
    """A piece of flat memory; `shares`: each rank sums and updates one part of it, otherwise all of it."""

    bare = True

    def __init__(self, piece: Piece, optimizer: Optimizer, rank: int, world: int, shares: bool) -> None:
        super().__init__(piece.name, [slot.parameter for slot in piece.slots], rank, world)
        self.piece, self.shares = piece, shares and world > 1
        self.own = piece.shard(rank, world) if self.shares else slice(piece.start, piece.stop)
        self.values = piece.flat.data[self.own]
        self.arrived = torch.empty_like(piece.grad) if self.shares else None
        self.gradient = torch.empty_like(self.values) if self.shares else piece.grad
        self.twin = clone(optimizer, piece.flat.group, self.values)
        #: of layer-wise optimizers, both norms of each parameter, once they are known
        self.norms: Tensor | None = None

    @property
    def results(self) -> list[Tensor]:
        return [self.gradient]

    def _stretches(self) -> list[slice]:
        """Of each parameter, the elements of it that this rank updates."""
        start, stop = self.own.start, self.own.stop
        return [
            slice(max(slot.start, start) - start, max(0, min(slot.stop, stop) - start))
            for slot in self.piece.slots
        ]

    def measure(self, now: Settings, scale: float | None) -> Tensor:
        """For optimizers that need norms of layers: per parameter, this rank's share of both squares; the
        update that follows is prepared.
        """
        assert isinstance(self.twin, Layerwise)
        if scale is not None:
            self.gradient.mul_(scale)
        group = self.twin.param_groups[0]
        group.update(now[self.piece.flat.group])
        both = self.twin.measure(self.values, self.gradient, group, self.twin.state[self.values])
        return torch.stack(
            [
                torch.stack(
                    [t[part].square().sum() if part.stop > part.start else t.new_zeros(()) for t in both]
                )
                for part in self._stretches()
            ]
        )

    def _finish(self) -> None:
        assert isinstance(self.twin, Layerwise) and self.norms is not None
        group = self.twin.param_groups[0]
        ratios = self.twin.ratio(self.norms[:, 0], self.norms[:, 1], group)
        spread = torch.ones_like(self.values)
        for slot, part, ratio in zip(self.piece.slots, self._stretches(), ratios, strict=True):
            if slot.parameter.dim() > 1 and part.stop > part.start:
                spread[part] = ratio
        self.twin.finish(self.values, self.gradient, group, self.twin.state[self.values], spread)

    def reduce(self) -> Job:
        if self.world == 1:
            return
        if self.arrived is None:
            yield Collective("sum", [self.piece.grad])
            self.piece.grad.div_(self.world)
            return
        yield Collective("exchange", [self.piece.grad], [self.arrived], own=False)
        rows = list(self.arrived.view(self.world, -1))
        rows[self.rank] = self.piece.grad.view(self.world, -1)[self.rank]
        # in the order of ranks: the same sums in every run
        total = torch.add(rows[0], rows[1], out=self.gradient)
        for row in rows[2:]:
            total.add_(row)
        total.div_(self.world)

    def update(self, now: Settings, scale: float | None) -> Job:
        if self.norms is not None:
            self._finish()
        else:
            update(
                self.twin,
                now[self.piece.flat.group],
                self.gradient if scale is None else self.gradient.mul_(scale),
            )
        if self.shares:
            yield Collective("gather", [self.values], [self.piece.data], last=True)

    def reading(self) -> Collective | None:
        return Collective("gather", [self.gradient], [self.piece.grad], last=True) if self.shares else None

    def take_back(self) -> None:
        if self.shares:
            self.gradient.copy_(self.piece.flat.grad[self.own])

    def square(self) -> Tensor:
        return self.gradient.float().square().sum() / (1 if self.shares else self.world)

    def take(self, full: Mapping[Any, Mapping[str, Any]]) -> None:
        self.twin.state.clear()
        take_state(self.twin, full, self.piece.slots, self.own.start, self.own.stop)

    def _split(self) -> dict[str, Tensor]:
        """Entries of its state that are as long as what it updates."""
        entries: dict[str, Any] = next(iter(self.twin.state.values()), {})
        count = self.own.stop - self.own.start
        return {
            name: value
            for name, value in entries.items()
            if isinstance(value, Tensor) and value.dim() == 1 and value.numel() == count
        }

    def shared(self) -> list[Tensor]:
        return list(self._split().values()) if self.shares else []

    def spread(self, rows: Sequence[Sequence[Tensor]], full: State) -> None:
        split = self._split()
        if self.shares:
            split = {name: torch.cat([row[i] for row in rows]) for i, name in enumerate(split)}
        entries: dict[str, Any] = next(iter(self.twin.state.values()), {})
        spread_state(entries, split, self.piece.slots, self.piece.start, full)


def _gather(tensors: list[Tensor]) -> Job:
    return (yield Collective("gather", tensors))
