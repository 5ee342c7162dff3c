"""Parameters in flat memory, cut into pieces that travel by themselves.

Parameters of one optimizer group and dtype lie one behind another in one buffer, and their gradients in
another, so that small ones are sent together (message fusion) and large ones in several messages. Each begins
at a multiple of the number of ranks: every piece has a part for each rank, and the padding between stays zero
under any optimizer that works element by element.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from paceline.errors import SpecError

#: bytes from which on small neighbours are not put together any more, and above which a parameter is cut,
#: where the link is not known
LEAST_BYTES, MOST_BYTES = 512 * 1024, 2048 * 1024
#: seconds that a piece should be on the link: long against what a message costs the interpreter, short
#: against the passes; and bytes at most
_PIECE_S, _LARGEST = 10e-3, 8 << 20
#: bytes of a piece on slow links. What several ranks send to one must fit into the queue of its port: packets
#: lost there cost a flow a timeout, and all wait for it. So, with more than two ranks, seconds that a piece
#: may be on the link, of which several are in flight; and bytes at least
_USUAL, _QUEUED_S, _SMALLEST = 1 << 20, 50e-3, 128 << 10
#: elements between two parameters' beginnings are a multiple of this: a cache line of float32
_LINE = 16


@dataclass(slots=True, eq=False)
class Slot:
    """Where a parameter lies in its buffer, in elements."""

    name: str
    parameter: nn.Parameter
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.parameter.numel()


@dataclass(slots=True, eq=False)
class Flat:
    """The parameters of one optimizer group and dtype, and their gradients."""

    group: int
    slots: list[Slot]
    data: Tensor
    grad: Tensor

    def gradient(self, slot: Slot) -> Tensor:
        """The gradient of a parameter in the buffer, in its shape."""
        return self.grad[slot.start : slot.stop].view(slot.parameter.shape)


@dataclass(slots=True, eq=False)
class Piece:
    """A stretch of a buffer that travels as one message."""

    flat: Flat
    start: int
    stop: int
    slots: list[Slot] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What lies in it, for people."""
        first, last = self.slots[0], self.slots[-1]
        if first is not last:
            return f"{first.name}..{last.name}"
        whole = self.stop - self.start >= first.parameter.numel()
        return (
            first.name
            if whole
            else f"{first.name}[{self.start - first.start}:{min(self.stop, first.stop) - first.start}]"
        )

    @property
    def data(self) -> Tensor:
        return self.flat.data[self.start : self.stop]

    @property
    def grad(self) -> Tensor:
        return self.flat.grad[self.start : self.stop]

    @property
    def bytes(self) -> int:
        return (self.stop - self.start) * self.flat.data.element_size()

    def shard(self, rank: int, world: int) -> slice:
        """The part of the buffer that a rank sums and updates."""
        share = (self.stop - self.start) // world
        return slice(self.start + rank * share, self.start + (rank + 1) * share)


Named = tuple[str, nn.Parameter]


def piece_bytes(link_Bps: float, world: int) -> tuple[int, int]:
    """Bytes up to which neighbours travel together, and above which a parameter is cut, for a link of that
    rate.
    """
    rate = link_Bps * world / max(1, world - 1)  # of a piece, of which each rank keeps its own part
    slow = _USUAL if world <= 2 else min(_USUAL, max(_SMALLEST, rate * _QUEUED_S))
    most = min(_LARGEST, max(slow, rate * _PIECE_S))
    return int(most) // 4, int(most)


def groups_of(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """The optimizer group of each parameter, by its id."""
    return {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}


def group_of(name: str, parameter: nn.Parameter, groups: dict[int, int]) -> int:
    """Its place in what `groups_of` found."""
    if id(parameter) not in groups:
        raise SpecError(
            f"parameter {name!r} needs a gradient but is not in the optimizer; add it, or set"
            " requires_grad=False"
        )
    return groups[id(parameter)]


def flatten(parameters: Iterable[Named], groups: dict[int, int], world: int) -> list[Flat]:
    """Moves parameters (values kept) into buffers: same group, dtype and device, in the order given."""
    sorted_: dict[tuple[int, torch.dtype, torch.device], list[Named]] = {}
    for name, parameter in parameters:
        sorted_.setdefault((group_of(name, parameter, groups), parameter.dtype, parameter.device), []).append(
            (name, parameter)
        )
    return [
        _flat(group, members, dtype, device, world) for (group, dtype, device), members in sorted_.items()
    ]


def _flat(group: int, members: Sequence[Named], dtype: torch.dtype, device: torch.device, world: int) -> Flat:
    unit = math.lcm(_LINE, world)
    slots, at = [], 0
    for name, parameter in members:
        slots.append(Slot(name, parameter, at))
        at += -(-parameter.numel() // unit) * unit
    data, grad = (torch.zeros(at, dtype=dtype, device=device) for _ in range(2))
    for slot in slots:
        view = data[slot.start : slot.stop].view(slot.parameter.shape)
        view.copy_(slot.parameter.detach())
        slot.parameter.data = view
    return Flat(group, slots, data, grad)


def cut(flat: Flat, world: int, least_bytes: int = LEAST_BYTES, most_bytes: int = MOST_BYTES) -> list[Piece]:
    """Pieces of a buffer, in its order: small neighbours together, large parameters in equal parts."""
    size, unit = flat.data.element_size(), math.lcm(_LINE, world)
    ends = [slot.start for slot in flat.slots[1:]] + [flat.data.numel()]
    pieces: list[Piece] = []
    begin, held = 0, list[Slot]()
    for slot, end in zip(flat.slots, ends, strict=True):
        if (end - slot.start) * size > most_bytes:
            if held:
                pieces.append(Piece(flat, begin, slot.start, held))
                begin, held = slot.start, []
            parts = -(-(end - slot.start) * size // most_bytes)
            step = -(-(end - slot.start) // (parts * unit)) * unit
            pieces += [Piece(flat, at, min(at + step, end), [slot]) for at in range(slot.start, end, step)]
            begin = end
            continue
        held.append(slot)
        if (end - begin) * size >= least_bytes:
            pieces.append(Piece(flat, begin, end, held))
            begin, held = end, []
    return [*pieces, Piece(flat, begin, flat.data.numel(), held)] if held else pieces
