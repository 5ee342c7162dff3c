"""The elements of a piece that this rank updates, with their gradient and their state of the optimizer."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.train.comm import Engine
from paceline.train.layout import Piece, Slot
from paceline.train.optim.layerwise import Layerwise
from paceline.train.strategies.base import State, Tensors

#: the optimizer's state, by parameter
States = dict[Any, State]


@dataclass(slots=True, kw_only=True)
class Update:
    """What a step makes of reduced gradients."""

    #: settings of each group of the optimizer
    now: Sequence[Mapping[str, Any]]
    #: gradients are multiplied by this
    scale: float | None
    #: of each parameter, under a layer-wise optimizer
    norms: Tensors = field(default_factory=dict)


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
    def state(self) -> State:
        """What the optimizer remembers of it."""
        entries: State = self.twin.state[self.values]
        return entries

    def prepare(self, update: Update) -> None:
        """Before an update: the settings of now, and the gradient in true units."""
        self.group.update(update.now[self.piece.flat.group])
        if update.scale is not None:
            self.gradient.mul_(update.scale)

    def step(self, update: Update) -> None:
        """One step of the optimizer, the first half of which may have been `measure`."""
        if isinstance(self.twin, Layerwise):
            ratios = torch.ones_like(self.values)
            for slot, here, _ in self.slots():
                if slot.parameter.dim() > 1:
                    first, second = update.norms[slot.parameter]
                    ratios[here] = self.twin.ratio(first, second, self.group)
            self.twin.finish(self.values, self.gradient, self.group, self.state, ratios)
        else:
            self.prepare(update)
            self.values.grad = self.gradient
            self.twin.step()
            self.values.grad = None

    def measure(self, update: Update) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """For an optimizer that needs norms of layers: of each parameter, this rank's share of both squares;
        the step that follows is prepared.
        """
        assert isinstance(self.twin, Layerwise)
        self.prepare(update)
        both = self.twin.measure(self.values, self.gradient, self.group, self.state)
        for slot, here, _ in self.slots():
            yield slot.parameter, torch.stack([tensor[here].float().square().sum() for tensor in both])

    def slots(self) -> Iterator[tuple[Slot, slice, slice]]:
        """Parameters of the piece: which of these elements are theirs, and which of theirs these are."""
        return _overlaps(self.piece.slots, self.own.start, self.own.stop)

    def take(self, full: Mapping[Any, State]) -> None:
        """Takes its part of the state of whole parameters."""
        self.twin.state.clear()
        state = self.state
        for slot, here, there in self.slots():
            for name, value in full.get(slot.parameter, {}).items():
                if isinstance(value, Tensor) and value.shape == slot.parameter.shape and value.dim() > 0:
                    if name not in state:
                        state[name] = torch.zeros_like(self.values, dtype=value.dtype)
                    state[name][here] = value.reshape(-1)[there]
                else:
                    state.setdefault(name, copy.deepcopy(value))

    def split(self) -> dict[str, Tensor]:
        """Entries of state that have a number for each element."""
        return {
            name: value
            for name, value in self.state.items()
            if isinstance(value, Tensor) and value.shape == self.values.shape
        }

    def spread(self, rows: Sequence[Iterator[Tensor]], full: States) -> None:
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
