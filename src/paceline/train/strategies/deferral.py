"""The common part of strategies whose updates hide under the next forward pass: pieces, orders, waiting (see
`deferred`, `lazy`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn, optim

from paceline.errors import RunError, SpecError
from paceline.train.comm import Collective, Job, Ticket
from paceline.train.hooks import Gradients, Sequencer, Uses
from paceline.train.layout import (
    LEAST_BYTES,
    MOST_BYTES,
    Flat,
    Named,
    Slot,
    cut,
    flatten,
    group_of,
    groups_of,
    piece_bytes,
)
from paceline.train.optim.layerwise import Layerwise
from paceline.train.strategies.arrangement import Arrangement
from paceline.train.strategies.awaited import Awaited
from paceline.train.strategies.base import Strategy, agree, average
from paceline.train.strategies.factors import FactorPart
from paceline.train.strategies.parts import Part, PiecePart
from paceline.train.strategies.pending import await_with, here
from paceline.train.strategies.probe import Machine, probe
from paceline.train.strategies.shards import Shards
from paceline.train.strategies.updates import settings

#: optimizers that treat every element of a parameter by itself, or each layer as `Layerwise` does: pieces of
#: parameters can be updated apart
_APART = (
    optim.ASGD,
    optim.SGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    Layerwise,
)


def apart(optimizer: optim.Optimizer) -> bool:
    """Whether pieces of parameters can be updated apart, as far as is known."""
    return isinstance(optimizer, _APART)


class Deferred(Strategy):
    """`clip_norm` clips all gradients by their common norm before the update.

    Neighbours of up to `least_bytes` travel together, parameters of more than `most_bytes` in parts; by
    default as the link asks for. What it sends per second is measured once, unless `link_Bps` says it.
    Optimizers must treat every element by itself, as most of torch's do; of one that is not known to,
    `elementwise=True` says so.
    """

    #: ranks share the update out
    shares: ClassVar[bool]

    def __init__(
        self,
        *,
        least_bytes: int | None = None,
        most_bytes: int | None = None,
        clip_norm: float | None = None,
        link_Bps: float | None = None,
        elementwise: bool = False,
    ) -> None:
        super().__init__()
        if link_Bps is not None and not link_Bps > 0:
            raise SpecError(f"link_Bps must be positive, got {link_Bps:g}")
        if clip_norm is not None and not clip_norm > 0:
            raise SpecError(f"clip_norm must be positive, got {clip_norm:g}")
        if not 0 < (least_bytes or 1) <= (most_bytes or MOST_BYTES):
            raise SpecError(
                f"least_bytes and most_bytes must be positive and in order, got {least_bytes} and"
                f" {most_bytes}"
            )
        self.least_bytes, self.most_bytes, self.clip_norm, self.link_Bps = (
            least_bytes,
            most_bytes,
            clip_norm,
            link_Bps,
        )
        self.elementwise = elementwise
        self._machine: Machine | None = None
        self.parts: list[Part] = []
        self._arrangement: Arrangement | None = None
        self._pending: dict[int, list[Ticket]] = {}
        self._scale: float | None = None
        #: where ranks share state out
        self._shards: Shards | None = None
        #: by id of a parameter, what stands in its `grad` after a pass
        self._awaited: dict[int, Awaited] = {}
        #: whether the gradients of the last pass have been brought here whole, for somebody who reads them
        self._brought = False
        #: parameters that are used where nothing tells of it
        self._outside: list[nn.Parameter] = []
        #: gradients are multiplied by this before the update: the reverse of a loss scale
        self.unscale: float | None = None

    # -- the first step --------------------------------------------------------------------------------

    def _begin(self) -> None:
        if not (self.elementwise or apart(self.optimizer)):
            raise SpecError(
                f"{self.name!r} updates pieces of parameters apart, and {type(self.optimizer).__name__} is"
                " not known to treat every element by itself; use allreduce, or say elementwise=True if it"
                " does"
            )
        groups = groups_of(self.optimizer)
        for name, parameter in self.parameters:
            group_of(name, parameter, groups)
        self._seen: list[tuple[nn.Parameter, float]] = []
        self._uses = Uses(self.model, [p for _, p in self.parameters], self._needed)
        self._uses.watch()
        self._gradients = Gradients([p for _, p in self.parameters], self._ready, self._done)
        self._zeroing = [
            _Told(self.optimizer, "zero_grad", self._zero),
            _Told(self.model, "zero_grad", self._zero),
        ]

    def _zero(self) -> None:
        """Gradients are thrown away, also where they would be set to zero in place: none is fetched."""
        for _, parameter in self.parameters:
            if self._kept([parameter]):
                self._take(parameter)

    def _kept(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether gradients of the pass before are still those of some of these parameters."""
        return any(p.grad is not None and p.grad is self._awaited.get(id(p)) for p in parameters)

    def _take(self, parameter: nn.Parameter) -> Tensor | None:
        """What passes have added to a gradient since the last that was reduced; it is taken out of there."""
        gradient, place = parameter.grad, self._awaited.get(id(parameter))
        if place is not None and gradient is place:
            gradient, place.added = place.added, None
        parameter.grad = None
        return gradient

    def _ready(self, parameter: nn.Parameter) -> None:
        if not self.parts:
            self._seen.append((parameter, time.perf_counter()))
            return
        if id(parameter) not in self._slots:
            raise RunError(
                f"{self._by_parameter[id(parameter)][0].name!r} has a gradient that does not come from its"
                " layer (a term of the loss on its weight, or another use of it); use fc='gradient'"
            )
        flat, slot = self._slots[id(parameter)]
        parts = self._by_parameter[id(parameter)]
        for part in parts:
            self._drop(part)
        gradient = self._take(parameter)
        assert gradient is not None
        self._put(flat, slot, gradient)
        self._arrived.add(id(parameter))
        for part in parts:
            self._count(part)

    def _put(self, flat: Flat, slot: Slot, gradient: Tensor) -> None:
        """A gradient into its place."""
        flat.gradient(slot).copy_(gradient)

    def _put_nothing(self, flat: Flat, slot: Slot) -> None:
        """In place of the gradient of a parameter that was not used."""
        flat.gradient(slot).zero_()

    def _drop(self, part: Part) -> None:
        """Before a gradient is overwritten: what uses it must be through. That of a pass which no step
        followed is added to the new one, as long as the user has not thrown it away."""
        if part.reduced is not None:
            part.reduced.wait()
            part.reduced = None
            if self._kept(part.parameters):
                if self._brought:
                    part.take_back()
                part.hold()
        self._needed(part.parameters)  # a pass that did not use them has not waited for their update

    def _count(self, part: Part) -> None:
        part.waiting -= 1
        if not part.waiting:
            for free in self._sequencer.ready(part):
                self._send(free)

    def _send(self, part: Part) -> None:
        part.reduced = self.engine.submit(part.name, part.mean(), bare=part.bare)

    def _done(self) -> None:
        if not self.parts:
            self._show()
            gradients = [p.grad if p.grad is not None else p.new_zeros(p.shape) for _, p in self.parameters]
            self.engine.submit("all gradients", average(gradients, self.world)).wait()
            for (_, parameter), gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
        else:
            for flat, slot in self._slots.values():
                if id(slot.parameter) not in self._arrived:  # not used in this pass
                    for part in self._by_parameter[id(slot.parameter)]:
                        self._drop(part)
                    before = self._take(slot.parameter)
                    if before is None:
                        self._put_nothing(flat, slot)
                    else:  # but in one before it, within `no_sync`
                        self._put(flat, slot, before)
            for part in self._sequencer.flush():
                self._drop(part)
                self._send(part)
            self._restart()
            self._hand_out()
        self._average_buffers()

    def _hand_out(self) -> None:
        """After a pass: in place of every gradient, what fetches it."""
        self._brought = False
        for _, parameter in self.parameters:
            if id(parameter) not in self._awaited:
                self._awaited[id(parameter)] = Awaited(parameter, partial(self._whole_gradient, parameter))
            parameter.grad = self._awaited[id(parameter)]
        if self._shards is not None:
            self._shards.position += 1

    def _show(self) -> None:
        """In the first step, which is a plain one: has gradients be in `p.grad`, where they were hidden."""

    def _whole_gradient(self, parameter: nn.Parameter) -> Tensor:
        """The mean gradient of a parameter; all ranks take part the first time after a pass."""
        if not self._brought:
            with torch.no_grad():
                self._bring()
            self._brought = True
        if id(parameter) in self._slots:
            flat, slot = self._slots[id(parameter)]
            return flat.gradient(slot)
        (part,) = (part for part in self._by_parameter[id(parameter)] if isinstance(part, FactorPart))
        return part.whole(parameter)

    def _bring(self) -> None:
        """Returns when all gradients are here, whole."""
        for part in self.parts:
            if part.reduced is not None:
                part.reduced.wait()
        self.synchronize()  # after a step: what it makes of gradients is done
        asked = [request for part in self.parts if (request := part.reading()) is not None]
        if not asked or self._shards is None:
            return

        def job() -> Job:
            yield asked

        self._shards.together(self.engine.submit("gradients that are read", job(), channel="reads"))

    def _changed(self) -> None:
        """Before a step: what the user has made of gradients since the pass is what counts."""
        for part in self.parts:
            if part.reduced is not None and all(p.grad is None for p in part.parameters):
                part.reduced = None  # thrown away
        for _, parameter in self.parameters:
            used = any(part.reduced is not None for part in self._by_parameter[id(parameter)])
            if used and not self._kept([parameter]):
                own = parameter.grad
                whole = self._whole_gradient(parameter)
                whole.zero_() if own is None else whole.copy_(own)
        if self._brought:
            for part in self.parts:
                if part.reduced is not None:
                    part.take_back()

    def _restart(self) -> None:
        self._arrived: set[int] = set()
        for part in self.parts:
            part.waiting = 1 if isinstance(part, FactorPart) else len(part.parameters)

    # -- building --------------------------------------------------------------------------------------

    def _build(self) -> None:
        """After the first step: orders agreed on, everything put in its place."""
        self._uses.seen()
        index = {id(p): i for i, (_, p) in enumerate(self.parameters)}
        known = {id(p) for p in self._uses.order}
        unused = [i for i, (_, p) in enumerate(self.parameters) if id(p) not in known]
        used, ready, outside = agree(
            (
                [*(index[id(p)] for p in self._uses.order), *unused],
                [(index[id(p)], at) for p, at in self._seen],
                tuple(self._uses.outside()),
            )
        )
        order = [self.parameters[i] for i in used]
        factors = self._factors()
        sizes = self._place(order, factors)
        at = {id(self.parameters[i][1]): seconds for i, seconds in ready}
        last = max(at.values())
        # a part is ready with the last of its gradients
        when = {id(part): max(at.get(id(p), last) for p in part.parameters) for part in self.parts}
        self._sequencer = Sequencer(self._order(sorted(self.parts, key=lambda part: when[id(part)]), when))
        self._arrangement = Arrangement(
            world=self.world,
            asked=self._asked(),
            used=tuple(name for name, _ in order),
            reads=self._uses.reads(),
            factors=factors,
            piece_bytes=sizes,
            order=tuple(part.name for part in self._sequencer.order),
            outside=outside,
        )
        self._await(outside)
        self._restart()

    def _await(self, names: Sequence[str]) -> None:
        """Has these parameters be there when a step returns."""
        parameters = dict(self.parameters)
        self._outside = [parameters[name] for name in names]

    def _rebuild(self, known: Arrangement) -> None:
        """The same without a first step, as it was found before."""
        parameters = dict(self.parameters)
        self._uses.know(known.reads)
        self._place([(name, parameters[name]) for name in known.used], known.factors, known.piece_bytes)
        turn = {name: i for i, name in enumerate(known.order)}
        self._sequencer = Sequencer(sorted(self.parts, key=lambda part: turn.get(part.name, len(turn))))
        self._arrangement = known
        self._await(known.outside)
        self._restart()

    def _place(
        self, order: list[Named], factors: Mapping[str, tuple[str, int]], sizes: tuple[int, int] | None = None
    ) -> tuple[int, int]:
        """Parameters moved into flat memory in the order of their use, optimizer state shared out; the bytes
        of pieces, if not given.
        """
        parts, rest = self._special(order, factors)
        self._flats = flatten(rest, groups_of(self.optimizer), self.world)
        least, most = self._sizes() if sizes is None else sizes
        for flat in self._flats:
            pieces = cut(flat, self.world, least, most)
            parts += [
                PiecePart(piece, self.optimizer, self.rank, self.world, self.shares) for piece in pieces
            ]
        place = {id(p): at for at, (_, p) in enumerate(order)}
        # as the forward pass needs them
        self.parts = sorted(parts, key=lambda part: min(place[id(p)] for p in part.parameters))
        self._slots: dict[int, tuple[Flat, Slot]] = {
            id(slot.parameter): (flat, slot) for flat in self._flats for slot in flat.slots
        }
        self._by_parameter: dict[int, list[Part]] = {}
        for part in self.parts:
            part.take(self.optimizer.state)
            for parameter in part.parameters:
                self._by_parameter.setdefault(id(parameter), []).append(part)
        for _, parameter in self.parameters:
            self.optimizer.state.pop(parameter, None)
        if self.shares and self.world > 1:
            self._shards = self.engine.attendant = Shards(self.engine, self.parts)
        return least, most

    def _asked(self) -> dict[str, Any]:
        """What of the user's decides on the arrangement."""
        return {"least_bytes": self.least_bytes, "most_bytes": self.most_bytes, "link_Bps": self.link_Bps}

    def _fits(self, known: Arrangement) -> bool:
        """Whether an arrangement is for this model, asked for as now, on as many ranks."""
        return (
            known.world == self.world
            and known.asked == self._asked()
            and sorted(known.used) == sorted(name for name, _ in self.parameters)
            and set(known.reads) <= {name for name, _ in self.model.named_modules()}
        )

    def _here(self) -> Machine:
        """The link and the device, measured once."""
        if self._machine is None:
            self._machine = probe(self.engine, self.parameters[0][1].device, self.link_Bps)
        return self._machine

    def _sizes(self) -> tuple[int, int]:
        """Bytes of pieces, at least and at most."""
        least, most = LEAST_BYTES, MOST_BYTES
        if (
            self.most_bytes is None
            and self.world > 1
            and sum(flat.data.numel() * flat.data.element_size() for flat in self._flats) > MOST_BYTES
        ):
            least, most = piece_bytes(self._here().link_Bps, self.world)
        most = self.most_bytes or most
        return min(most, self.least_bytes or least), most

    def _factors(self) -> dict[str, tuple[str, int]]:
        """By the name of a layer, what it exchanges in place of its gradient, and its rows in a step; agreed
        on.
        """
        return {}

    def _special(
        self, parameters: list[Named], factors: Mapping[str, tuple[str, int]]
    ) -> tuple[list[Part], list[Named]]:
        """Parts of parameters that do not travel as pieces, and the parameters that do."""
        return [], parameters

    def _order(self, ready: Sequence[Part], when: Mapping[int, float]) -> Sequence[Part]:
        """The order in which gradients travel, given the order in which they become ready, and when (seconds,
        by the id of the part).
        """
        return ready

    # -- every step ------------------------------------------------------------------------------------

    def scaled_by(self, scaler: Any) -> None:
        """Says that losses were multiplied by the scale of a `paceline.train.Scaler`."""
        self.unscale = 1 / scaler.get_scale()

    def _step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.parts:
            self._show()
            if self.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_([p for _, p in self.parameters], self.clip_norm)
            self._plain_step()
            self.unscale = None
            with torch.no_grad():
                self._build()
            return loss
        self.synchronize()
        self._changed()
        if self._shards is not None:
            self._shards.position += 1
        self._apply()
        self._needed(self._outside)
        return loss

    def _apply(self) -> None:
        """Submits the updates that the reduced gradients are for."""
        now = settings(self.optimizer)
        unscale, self.unscale = self.unscale, None
        self._scale = unscale
        ready = [part for part in self.parts if part.reduced is not None]
        norm = self._norm(ready, 1.0 if unscale is None else unscale)
        if isinstance(self.optimizer, Layerwise):
            norm = [self._layer_norms(ready, now, norm)]
        for part in ready:
            assert part.reduced is not None
            ticket = self.engine.submit(
                part.name, self._update(part, now), channel="parameters", after=[part.reduced, *norm]
            )
            part.reduced = None
            for parameter in part.parameters:
                self._pending.setdefault(id(parameter), []).append(ticket)
                await_with(parameter, partial(self._needed, [parameter]))

    def _update(self, part: Part, now: list[dict[str, Any]]) -> Job:
        part.updates += 1
        yield from part.update(now, self._scale)

    def _norm(self, parts: list[Part], unscale: float) -> list[Ticket]:
        """Where gradients are clipped, a job that finds their common norm; updates wait for it."""
        if self.clip_norm is None or not parts:
            return []
        limit = self.clip_norm

        def job() -> Job:
            square = torch.stack([part.square() for part in parts]).sum().view(1)
            if self.world > 1:
                yield Collective("sum", [square])
            self._scale = unscale * min(1.0, limit / (unscale * float(square.sqrt()) + 1e-6))

        return [
            self.engine.submit(
                "norm of all gradients",
                job(),
                after=[part.reduced for part in parts if part.reduced is not None],
            )
        ]

    def _layer_norms(self, parts: list[Part], now: list[dict[str, Any]], after: list[Ticket]) -> Ticket:
        """For layer-wise optimizers, a job that finds both norms of every parameter; updates wait for it."""
        # such optimizers have no others: `_choose` sees to it
        pieces = [part for part in parts if isinstance(part, PiecePart)]

        def job() -> Job:
            squares = [part.measure(now, self._scale) for part in pieces]
            place = {id(p): i for i, (_, p) in enumerate(self.parameters)}
            total = squares[0].new_zeros(len(place), 2)
            for part, found in zip(pieces, squares, strict=True):
                total.index_add_(
                    0, torch.tensor([place[id(p)] for p in part.parameters], device=total.device), found
                )
            if self.shares and self.world > 1:
                yield Collective("sum", [total])
            for part in pieces:
                part.norms = total[[place[id(p)] for p in part.parameters]].sqrt()

        reduced = [part.reduced for part in parts if part.reduced is not None]
        return self.engine.submit("norms of layers", job(), after=[*reduced, *after])

    def _needed(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if id(parameter) in self._pending:
                try:
                    for ticket in self._pending[id(parameter)]:
                        ticket.wait()
                finally:
                    self._pending.pop(id(parameter), None)
                    here(parameter)

    def synchronize(self) -> None:
        self._needed([p for _, p in self.parameters])

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with self._gradients.paused():
            yield

    def detach(self) -> None:
        try:
            if self.parts and not self.engine.failed:
                self._plain_load(self.optimizer_state())  # all of it on all ranks, as it was before
        finally:
            self.engine.attendant = None
            for part in self.parts:
                part.release()
            for _, parameter in self.parameters:
                here(parameter)
            for told in self._zeroing:
                told.remove()
            self._zero()
            self._gradients.remove()
            self._uses.remove()
            super().detach()

    # -- the optimizer's state -------------------------------------------------------------------------

    def optimizer_state(self) -> dict[str, Any]:
        self.synchronize()
        return self._whole((part, part.gathered(self.engine)) for part in self.parts)

    def asked_state(self) -> dict[str, Any]:
        """The same, also where this rank asks alone: see `shards`."""
        if self._shards is None:
            return self.optimizer_state()
        self.synchronize()
        return self._whole(self._shards.fetch())

    def _whole(self, parts: Iterable[tuple[Part, Sequence[Sequence[Tensor]]]]) -> dict[str, Any]:
        """As the optimizer gives its state, with what ranks keep of each part."""
        full: dict[Any, dict[str, Any]] = {p: dict(s) for p, s in self.optimizer.state.items()}
        for part, rows in parts:
            part.spread(rows, full)
        kept, self.optimizer.state = self.optimizer.state, full  # type: ignore[assignment]
        try:
            return self._plain_state()
        finally:
            self.optimizer.state = kept

    def state_dict(self) -> dict[str, Any]:
        return {} if self._arrangement is None else self._arrangement.kept()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After parameters and the optimizer's state: an arrangement that fits is taken up, in place of a
        first step that looks for one.
        """
        known = Arrangement.of(state)
        if not self.parts and known is not None and self._fits(known):
            with torch.no_grad():
                self._rebuild(known)

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        self.synchronize()
        self._plain_load(state)
        for part in self.parts:
            part.take(self.optimizer.state)
        if self.parts:
            self.optimizer.state.clear()


class _Told:
    """Tells of calls of a method of one object, not of its copies, which does what it did."""

    def __init__(self, owner: Any, name: str, tell: Callable[[], None]) -> None:
        self._owner, self._name = owner, name

        def call(this: Any, *args: Any, **kwargs: Any) -> Any:
            if this is owner:
                tell()
            return getattr(type(this), name)(this, *args, **kwargs)

        setattr(owner, name, MethodType(call, owner))

    def remove(self) -> None:
        """Takes it back."""
        self._owner.__dict__.pop(self._name, None)
