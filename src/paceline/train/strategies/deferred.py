"""Gradients leave during the backward pass; updates and what follows them hide under the next forward pass.

    overlap     all-to-all of gradients, each rank sums and updates its share (optimizer state is shared out), all-gather of parameters
    priority    all-reduce of gradients, all ranks update everything; the layers that the next forward pass needs first go first

Synchronous SGD, exactly: no parameter is used before it is the new one. The first step runs plainly: it shows in which order parameters
are used and gradients become ready. Rank 0's orders hold for all.

Cost of a step, with F and B the passes, C_rs and C_ag the time of reduce-scatter and all-gather on the wire, for layers that are small
against the whole:

    overlap     max(F, C_ag) + max(B, C_rs)        against F + max(B, C_rs + C_ag) of an all-reduce that must end before the update

Lee et al., Communication-Efficient Parallelization Strategy for Deep Convolutional Neural Network Training, MLHPC 2018. The schedule of
the all-reduce is that of Jayarajan et al., Priority-based Parameter Propagation, SysML 2019.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.train.comm import Collective, Job, Ticket
from paceline.train.hooks import Gradients, Sequencer, Uses, replace_step
from paceline.train.layout import LEAST_BYTES, MOST_BYTES, Flat, Named, Piece, Slot, cut, flatten, groups_of
from paceline.train.strategies.base import Strategy, agree, average, nothing
from paceline.train.strategies.updates import clone, settings, spread_state, take_state, update


@dataclass(slots=True, eq=False)
class Part:
    """A piece at work: what arrives for it, the part that this rank updates, and the optimizer of that."""

    piece: Piece
    own: slice
    twin: Optimizer
    gradient: Tensor
    arrived: Tensor | None
    waiting: int = 0
    reduced: Ticket | None = None


class Deferred(Strategy):
    """The common part: pieces, orders, waiting."""

    #: ranks share the update out
    shares: ClassVar[bool]

    def __init__(self, *, least_bytes: int = LEAST_BYTES, most_bytes: int = MOST_BYTES, clip_norm: float | None = None) -> None:
        super().__init__()
        self.least_bytes, self.most_bytes, self.clip_norm = least_bytes, most_bytes, clip_norm
        self.parts: list[Part] = []
        self._pending: dict[int, list[Ticket]] = {}

    # -- the first step --------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._seen: list[nn.Parameter] = []
        self._uses = Uses(self.model, [p for _, p in self.parameters], self._needed)
        self._uses.watch()
        self._gradients = Gradients([p for _, p in self.parameters], self._ready, self._done)
        self._plain_step = replace_step(self.optimizer, lambda _, closure=None: self._step(closure))

    def _ready(self, parameter: nn.Parameter) -> None:
        if not self.parts:
            self._seen.append(parameter)
            return
        flat, slot = self._slots[id(parameter)]
        assert parameter.grad is not None
        for part in self._by_parameter[id(parameter)]:
            if part.reduced is not None:  # of a backward pass that no step followed: its gradient is dropped
                part.reduced.wait()
                part.reduced = None
        flat.gradient(slot).copy_(parameter.grad)
        parameter.grad = None
        self._arrived.add(id(parameter))
        for part in self._by_parameter[id(parameter)]:
            part.waiting -= 1
            if not part.waiting:
                for free in self._sequencer.ready(part):
                    self._send(free)

    def _done(self) -> None:
        if not self.parts:
            gradients = [p.grad if p.grad is not None else p.new_zeros(p.shape) for _, p in self.parameters]
            self.engine.submit("all gradients", average(gradients, self.world)).wait()
            for (_, parameter), gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
        else:
            for flat, slot in self._slots.values():
                if id(slot.parameter) not in self._arrived:  # not used in this pass
                    flat.gradient(slot).zero_()
            for part in self._sequencer.flush():
                self._send(part)
            self._restart()
        self._average_buffers()

    def _restart(self) -> None:
        self._arrived: set[int] = set()
        for part in self.parts:
            part.waiting = len(part.piece.slots)

    # -- building --------------------------------------------------------------------------------------

    def _build(self) -> None:
        """After the first step: orders agreed on, parameters moved into flat memory, optimizer state shared out."""
        index = {id(p): i for i, (_, p) in enumerate(self.parameters)}
        rest = [i for i in range(len(self.parameters)) if self.parameters[i][1] not in set(self._uses.order)]
        used, ready = agree(([index[id(p)] for p in self._uses.order] + rest, [index[id(p)] for p in self._seen]))
        moved = self._moved([self.parameters[i] for i in used])
        self._flats = flatten(moved, groups_of(self.optimizer), self.world)
        full = self.optimizer.state
        self.parts = [self._part(piece) for flat in self._flats for piece in cut(flat, self.world, self.least_bytes, self.most_bytes)]
        for part in self.parts:
            take_state(part.twin, full, part.piece.slots, part.own.start, part.own.stop)
        for name_parameter in moved:
            self.optimizer.state.pop(name_parameter[1], None)
            name_parameter[1].grad = None
        self._slots: dict[int, tuple[Flat, Slot]] = {id(slot.parameter): (flat, slot) for flat in self._flats for slot in flat.slots}
        self._by_parameter: dict[int, list[Part]] = {}
        for part in self.parts:
            for slot in part.piece.slots:
                self._by_parameter.setdefault(id(slot.parameter), []).append(part)
        rank_of = {id(self.parameters[i][1]): place for place, i in enumerate(ready)}
        # a piece is ready with the last of its gradients
        self._sequencer = Sequencer(self._order(sorted(self.parts, key=lambda part: max(rank_of.get(id(s.parameter), math.inf) for s in part.piece.slots))))
        self._restart()

    def _moved(self, parameters: list[Named]) -> list[Named]:
        """Of the parameters in the order of their use, those that travel in pieces."""
        return parameters

    def _order(self, ready: list[Part]) -> list[Part]:
        """The order in which gradients travel, given the order in which they become ready."""
        return ready

    def _part(self, piece: Piece) -> Part:
        own = piece.shard(self.rank, self.world) if self.shares else slice(piece.start, piece.stop)
        values = piece.flat.data[own]
        arrived = torch.empty_like(piece.grad) if self.shares and self.world > 1 else None
        gradient = torch.empty_like(values) if self.shares and self.world > 1 else piece.grad
        return Part(piece, own, clone(self.optimizer, piece.flat.group, values), gradient, arrived)

    # -- every step ------------------------------------------------------------------------------------

    def _send(self, part: Part) -> None:
        part.reduced = self.engine.submit(part.piece.name, self._reduce(part))

    def _reduce(self, part: Part) -> Job:
        """A job: the mean gradient of the own part."""
        if self.world == 1:
            return
        if part.arrived is None:
            yield Collective("sum", [part.piece.grad])
            part.piece.grad.div_(self.world)
        else:
            yield Collective("exchange", [part.piece.grad], [part.arrived])
            rows = part.arrived.view(self.world, -1)
            total = torch.add(rows[0], rows[1], out=part.gradient)
            for row in rows[2:]:
                total.add_(row)
            total.div_(self.world)

    def _step(self, closure: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.parts:
            self._plain_step()
            with torch.no_grad():
                self._build()
            return loss
        self.synchronize()
        now = settings(self.optimizer)
        after = self._agreement()
        for part in self.parts:
            if part.reduced is None:
                continue
            ticket = self.engine.submit(part.piece.name, self._update(part, now), channel="parameters", after=[part.reduced, *after])
            part.reduced = None
            for slot in part.piece.slots:
                self._pending.setdefault(id(slot.parameter), []).append(ticket)
        return loss

    def _update(self, part: Part, now: list[dict[str, Any]]) -> Job:
        """A job: the own part updated, then everyone's."""
        gradient = part.gradient if self._scale is None else part.gradient.mul_(self._scale)
        update(part.twin, now[part.piece.flat.group], gradient)
        if self.shares and self.world > 1:
            yield Collective("gather", [part.piece.flat.data[part.own]], [part.piece.data])

    _scale: float | None = None

    def _agreement(self) -> list[Ticket]:
        """Where all gradients are clipped by their common norm, a job that finds it; updates wait for it."""
        if self.clip_norm is None:
            return []
        reduced = [part.reduced for part in self.parts if part.reduced is not None]

        def job() -> Job:
            assert self.clip_norm is not None
            squares = torch.stack([part.gradient.float().square().sum() for part in self.parts]).sum().view(1)
            if self.shares and self.world > 1:
                yield Collective("sum", [squares])
            else:
                yield from nothing()
            self._scale = min(1.0, self.clip_norm / (float(squares.sqrt()) + 1e-6))

        return [self.engine.submit("norm of all gradients", job(), after=reduced)]

    def _needed(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            for ticket in self._pending.pop(id(parameter), ()):
                ticket.wait()

    def synchronize(self) -> None:
        self._needed([p for _, p in self.parameters])

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with self._gradients.paused():
            yield

    def detach(self) -> None:
        self.synchronize()
        self._gradients.remove()
        self._uses.remove()

    # -- the optimizer's state -------------------------------------------------------------------------

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state as if one process had it all: what `optimizer.state_dict()` would give without this strategy."""
        self.synchronize()
        full: dict[Any, dict[str, Any]] = {p: dict(s) for p, s in self.optimizer.state.items()}
        for part in self.parts:
            entries = next(iter(part.twin.state.values()), {})
            count = part.own.stop - part.own.start
            split = {name: value for name, value in entries.items() if isinstance(value, Tensor) and value.numel() == count and value.dim() == 1}
            if self.shares and self.world > 1 and split:
                gathered = self.engine.submit(f"state of {part.piece.name}", _gather(list(split.values()))).wait()
                whole = {name: torch.cat([rows[i] for rows in gathered]) for i, name in enumerate(split)}
            else:
                whole = split
            spread_state(entries, whole, part.piece.slots, part.piece.start, full)
        kept, self.optimizer.state = self.optimizer.state, full  # type: ignore[assignment]
        try:
            return self.optimizer.state_dict()
        finally:
            self.optimizer.state = kept

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Takes the state that `optimizer_state`, or the optimizer itself, once gave; of any world size."""
        self.synchronize()
        self.optimizer.load_state_dict(state)
        for part in self.parts:
            part.twin.state.clear()
            take_state(part.twin, self.optimizer.state, part.piece.slots, part.own.start, part.own.stop)
        for part in self.parts:
            for slot in part.piece.slots:
                self.optimizer.state.pop(slot.parameter, None)


def _gather(tensors: list[Tensor]) -> Job:
    return (yield Collective("gather", tensors))


class Overlap(Deferred):
    """Overlapped gradient averaging (Lee et al. 2018), message fusion added."""

    name = "overlap"
    paper = "Lee et al., MLHPC 2018"
    shares = True


class Priority(Deferred):
    """All-reduce in pieces; bottom layers, which the next forward pass needs first, overtake where they can."""

    name = "priority"
    paper = "Jayarajan et al., SysML 2019; Peng et al., SOSP 2019"
    shares = False
