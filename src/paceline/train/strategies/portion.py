"""The elements of a piece that this rank updates, with their gradient and their state of the optimizer."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.train.comm import Engine
from paceline.train.layout import Piece, Slot

Settings = Sequence[Mapping[str, Any]]
#: the optimizer's state, by parameter
State = dict[Any, dict[str, Any]]


class Portion:
    """The whole piece, or one rank's share of it where ranks share it out (`shared`).

    `twin` is a clone of the user's optimizer for just these elements; its settings are set before each step.
    """

    def __init__(self, piece: Piece, optimizer: Optimizer, engine: Engine, *, shared: bool) -> None:
        self.piece = piece
        self.own = piece.shard(engine.rank, engine.world) if shared else slice(piece.start, piece.stop)
        self.values = piece.flat.data[self.own]
        self.gradient = torch.empty_like(self.values) if shared else piece.grad
        self.twin = _clone(optimizer, piece.flat.group, self.values)

    @property
    def group(self) -> dict[str, Any]:
        """The settings of the optimizer for it."""
        return self.twin.param_groups[0]

    @property
    def state(self) -> dict[str, Any]:
        """What the optimizer remembers of it."""
        entries: dict[str, Any] = self.twin.state[self.values]
        return entries

    def prepare(self, now: Settings, scale: float | None) -> None:
        """Before an update: the settings of now, and the gradient in true units."""
        self.group.update(now[self.piece.flat.group])
        if scale is not None:
            self.gradient.mul_(scale)

    def update(self) -> None:
        """One step of the optimizer."""
        self.values.grad = self.gradient
        self.twin.step()
        self.values.grad = None

    def slots(self) -> Iterator[tuple[Slot, slice, slice]]:
        """Parameters of the piece: which of these elements are theirs, and which of theirs these are."""
        return _overlaps(self.piece.slots, self.own.start, self.own.stop)

    def take(self, full: Mapping[Any, Mapping[str, Any]]) -> None:
        """Takes its part of the state of whole parameters."""
        self.twin.state.clear()
        for slot, here, there in self.slots():
            for name, value in full.get(slot.parameter, {}).items():
                if isinstance(value, Tensor) and value.shape == slot.parameter.shape and value.dim() > 0:
                    if name not in self.state:
                        self.state[name] = self.values.new_zeros(self.values.shape, dtype=value.dtype)
                    self.state[name][here] = value.reshape(-1)[there]
                else:
                    self.state.setdefault(name, copy.deepcopy(value))

    def split(self) -> dict[str, Tensor]:
        """Entries of state that have a number for each element."""
        return {
            name: value
            for name, value in self.state.items()
            if isinstance(value, Tensor) and value.shape == self.values.shape
        }

    def spread(self, rows: Sequence[Iterator[Tensor]], full: State) -> None:
        """Puts its state into that of whole parameters; `rows`: what each rank has `split`, if they share."""
        whole = {
            name: torch.cat([next(row) for row in rows]) if rows else value
            for name, value in self.split().items()
        }
        for slot, here, there in _overlaps(self.piece.slots, self.piece.start, self.piece.stop):
            target = full.setdefault(slot.parameter, {})
            for name, value in self.state.items():
                if name not in whole:
                    target.setdefault(name, copy.deepcopy(value))
                    continue
                if name not in target:
                    target[name] = torch.zeros(slot.parameter.shape, dtype=value.dtype, device=value.device)
                target[name].view(-1)[there] = whole[name][here]


def _overlaps(slots: Sequence[Slot], start: int, stop: int) -> Iterator[tuple[Slot, slice, slice]]:
    """Each parameter with its elements among [start, stop) of the buffer, counted there and in itself."""
    for slot in slots:
        low = max(slot.start, start)
        high = max(low, min(slot.stop, stop))
        yield slot, slice(low - start, high - start), slice(low - slot.start, high - slot.start)


def _clone(optimizer: Optimizer, group: int, values: Tensor) -> Optimizer:
    """An optimizer of the same kind for one flat tensor."""
    twin = copy.copy(optimizer)
    for name in ("step", "state_dict", "load_state_dict", "_paceline"):  # the strategy's, on the instance
        twin.__dict__.pop(name, None)
    twin.state = defaultdict(dict)
    twin.param_groups = [{**optimizer.param_groups[group], "params": [values]}]
    return twin


def settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Learning rate and the like of each group, as they are now."""
    return [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
