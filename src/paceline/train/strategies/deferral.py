"""The common part of strategies whose updates hide under the next forward pass: pieces, orders, waiting (see
`overlap`, `priority`, `lazy`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn, optim

from paceline.errors import RunError, SpecError
from paceline.train.comm import Collective, Job, Ticket, agree, single
from paceline.train.hooks import Gradients, Sequencer, Uses
from paceline.train.layout import (
    LEAST_BYTES,
    MOST_BYTES,
    Flat,
    Slot,
    cut,
    flatten,
    group_of,
    groups_of,
    piece_bytes,
)
from paceline.train.optim.layerwise import Layerwise
from paceline.train.probe import Machine, probe
from paceline.train.strategies.arrangement import Arrangement, Factors
from paceline.train.strategies.awaited import Awaited
from paceline.train.strategies.base import State, Strategy
from paceline.train.strategies.parts import DeferredPart, PiecePart
from paceline.train.strategies.pending import await_with, here
from paceline.train.strategies.portion import States, Update, settings
from paceline.train.strategies.shards import Shards

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


@dataclass(slots=True, eq=False)
class Entry:
    """A parameter in the hands of a deferred strategy."""

    parameter: nn.Parameter
    #: what it travels in
    parts: list[DeferredPart] = field(default_factory=list)
    #: where its gradient lies
    place: tuple[Flat, Slot] | None = None
    #: what stands in its `grad` after a pass
    stand_in: Awaited | None = None
    #: updates of it that are on their way
    updates: list[Ticket] = field(default_factory=list)

    @property
    def gradient(self) -> Tensor:
        """Its gradient among those that travel with it."""
        assert self.place is not None
        flat, slot = self.place
        return flat.gradient(slot)

    @property
    def kept(self) -> bool:
        """Whether its gradient is still that of the last pass, and nobody has thrown it away."""
        return self.stand_in is not None and self.parameter.grad is self.stand_in

    def take(self) -> Tensor | None:
        """What passes have added to its gradient since it was last reduced; it is taken out of there."""
        gradient = self.parameter.grad
        if self.stand_in is not None and self.kept:
            gradient, self.stand_in.added = self.stand_in.added, None
        self.parameter.grad = None
        return gradient

    def hand_out(self, fetch: Callable[[Entry], Tensor]) -> None:
        """Puts what fetches the gradient in its place."""
        if self.stand_in is None:
            self.stand_in = Awaited(self.parameter, partial(fetch, self))
        self.parameter.grad = self.stand_in

    def expect(self, update: Ticket) -> None:
        """From now on, whoever reads the parameter waits for an update."""
        self.updates.append(update)
        await_with(self.parameter, self.arrive)

    def arrive(self) -> None:
        """Returns when no update is on its way any more."""
        if not self.updates:
            return
        try:
            for update in self.updates:
                update.wait()
        finally:
            self.updates.clear()
            here(self.parameter)


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
        for name, value in {"link_Bps": link_Bps, "clip_norm": clip_norm}.items():
            if value is not None and not value > 0:
                raise SpecError(f"{name} must be positive, got {value:g}")
        if not 0 < (least_bytes or 1) <= (most_bytes or MOST_BYTES):
            raise SpecError(
                f"least_bytes and most_bytes must be positive and in order, got {least_bytes} and"
                f" {most_bytes}"
            )
        self.least_bytes, self.most_bytes = least_bytes, most_bytes
        self.clip_norm, self.link_Bps, self.elementwise = clip_norm, link_Bps, elementwise
        #: what travels, as the forward pass needs it; nothing before the end of the first step
        self.parts: list[DeferredPart] = []
        self._arrangement: Arrangement | None = None
        #: where ranks share state out
        self._shards: Shards | None = None
        #: whether the gradients of the last pass have been brought here whole, for somebody who reads them
        self._brought = False
        #: parameters that are used where nothing tells of it
        self._outside: list[nn.Parameter] = []
        #: gradients are multiplied by this before the update: the reverse of a loss scale
        self.unscale: float | None = None

    @property
    def _shared(self) -> bool:
        """Whether ranks share updates out: there are others, and the strategy does."""
        return self.shares and self.world > 1

    # -- the first step --------------------------------------------------------------------------------

    def _begin(self) -> None:
        if not (self.elementwise or isinstance(self.optimizer, _APART)):
            raise SpecError(
                f"{self.name!r} updates pieces of parameters apart, and {type(self.optimizer).__name__} is"
                " not known to treat every element by itself; use allreduce, or say elementwise=True if it"
                " does"
            )
        groups = groups_of(self.optimizer)
        for name, parameter in self.parameters:
            group_of(name, parameter, groups)
        self._entries = {parameter: Entry(parameter) for parameter in self.names}
        #: when gradients became ready in the first step
        self._seen: dict[nn.Parameter, float] = {}
        self._uses = Uses(self.model, self._entries, self._needed)
        self._uses.watch()
        self._gradients = Gradients(self._entries, self._ready, self._done)
        self._undo.callback(self._uses.remove)
        self._undo.callback(self._gradients.remove)
        self._undo.callback(self._zero)
        for owner in (self.optimizer, self.model):
            self._undo.callback(_tell_of(owner, "zero_grad", self._zero))
        self._undo.callback(self._give_back)

    def _zero(self) -> None:
        """Gradients are thrown away, also where they would be set to zero in place: none is fetched."""
        for entry in self._entries.values():
            if entry.kept:
                entry.take()

    def _ready(self, parameter: nn.Parameter) -> None:
        if not self.parts:
            self._seen[parameter] = time.perf_counter()
            return
        entry = self._entries[parameter]
        if not isinstance(entry.parts[0], PiecePart):
            raise RunError(
                f"{entry.parts[0].name!r} has a gradient that does not come from its"
                " layer (a term of the loss on its weight, or another use of it); use fc='gradient'"
            )
        self._fill(entry)
        for part in entry.parts:
            part.waiting.discard(parameter)
            if not part.waiting:
                self._complete(part)

    def _fill(self, entry: Entry) -> None:
        """Puts what passes have added to a gradient into its place."""
        for part in entry.parts:
            self._drop(part)
        added = entry.take()
        if not self._adds(entry.parameter):
            entry.gradient.zero_() if added is None else entry.gradient.copy_(added)
        elif added is not None:
            entry.gradient.add_(added)

    def _adds(self, parameter: nn.Parameter) -> bool:
        """Whether gradients are added to those of steps before."""
        return False

    def _drop(self, part: DeferredPart) -> None:
        """Before a gradient is overwritten: what uses it must be through. That of a pass which no step
        followed is added to the new one, as long as the user has not thrown it away."""
        if part.reduced is not None:
            part.reduced.wait()
            part.reduced = None
            if any(self._entries[parameter].kept for parameter in part.parameters):
                if self._brought:
                    part.take_back()
                part.hold()
        self._needed(part.parameters)  # a pass that did not use them has not waited for their update

    def _layer_ready(self, part: DeferredPart) -> None:
        """A layer has seen to its gradients itself."""
        self._drop(part)
        part.waiting.clear()
        self._complete(part)

    def _complete(self, part: DeferredPart) -> None:
        for free in self._sequencer.ready(part):
            self._send(free)

    def _send(self, part: DeferredPart) -> None:
        part.reduced = self.engine.submit(part.name, part.mean(), bare=part.bare)

    def _done(self) -> None:
        if self.parts:
            for entry in self._entries.values():  # not used in this pass; but maybe in one within `no_sync`
                if isinstance(part := entry.parts[0], PiecePart) and entry.parameter in part.waiting:
                    self._fill(entry)
            for part in self._sequencer.flush():
                self._drop(part)
                self._send(part)
            for part in self.parts:
                part.waiting = set(part.parameters)
            self._hand_out()
        else:
            self._show()
            self._average_gradients("all gradients")
        self._average_buffers()

    def _hand_out(self) -> None:
        """After a pass: in place of every gradient, what fetches it."""
        self._brought = False
        for entry in self._entries.values():
            entry.hand_out(self._whole_gradient)
        if self._shards is not None:
            self._shards.position += 1

    def _show(self) -> None:
        """In the first step, which is a plain one: has gradients be in `p.grad`, where they were hidden."""

    def _whole_gradient(self, entry: Entry) -> Tensor:
        """The mean gradient of a parameter; all ranks take part the first time after a pass."""
        if not self._brought:
            with torch.no_grad():
                self._bring()
            self._brought = True
        return entry.gradient

    def _bring(self) -> None:
        """Returns when all gradients are here, whole."""
        for ticket in self._reduced().values():
            ticket.wait()
        self.synchronize()  # after a step: what it makes of gradients is done
        asked = [part.reading() for part in self.parts if part.shared]
        if asked and self._shards is not None:
            read = self.engine.submit("gradients that are read", single(asked), channel="reads")
            self._shards.together(read)

    def _changed(self) -> None:
        """Before a step: what the user has made of gradients since the pass is what counts."""
        for part in self.parts:
            if all(parameter.grad is None for parameter in part.parameters):
                part.reduced = None  # thrown away
        for parameter, entry in self._entries.items():
            if not entry.kept and any(part.reduced is not None for part in entry.parts):
                own, whole = parameter.grad, self._whole_gradient(entry)
                whole.zero_() if own is None else whole.copy_(own)
        if self._brought:
            for part in self._reduced():
                part.take_back()

    def _reduced(self) -> dict[DeferredPart, Ticket]:
        """Parts with a gradient for the next update, and what becomes of it."""
        return {part: part.reduced for part in self.parts if part.reduced is not None}

    # -- building --------------------------------------------------------------------------------------

    def _build(self) -> None:
        """After the first step: orders agreed on, everything put in its place."""
        self._uses.seen()
        order = dict.fromkeys([*self._uses.order, *self.names])
        used, seen, outside = agree(
            (
                tuple(self.names[parameter] for parameter in order),
                {self.names[parameter]: seconds for parameter, seconds in self._seen.items()},
                tuple(self._uses.outside()),
            )
        )
        factors = self._factors()
        known = Arrangement(
            asked=self._asked(),
            used=used,
            reads=self._uses.reads(),
            factors=factors,
            piece_bytes=self._sizes(factors),
            order=(),
            outside=outside,
        )
        self._place(known)
        self._take_up(replace(known, order=self._names_in_order(seen)))

    def _names_in_order(self, seen: Mapping[str, float]) -> tuple[str, ...]:
        """Parts in the order in which their gradients travel; `seen`: when gradients were ready in the first
        step. A part is ready with the last of its own.
        """
        last = max(seen.values())
        when = {part: max(seen.get(self.names[p], last) for p in part.parameters) for part in self.parts}
        ready = sorted(self.parts, key=when.__getitem__)
        return tuple(part.name for part in self._order(ready, when))

    def _take_up(self, known: Arrangement) -> None:
        """With everything in its place: what goes in which order."""
        turn = {name: i for i, name in enumerate(known.order)}
        self._sequencer = Sequencer(sorted(self.parts, key=lambda part: turn.get(part.name, len(turn))))
        self._arrangement = known
        # to be there when a step returns
        self._outside = [parameter for parameter, name in self.names.items() if name in known.outside]

    def _place(self, known: Arrangement) -> None:
        """Parameters moved into flat memory in the order of their use, optimizer state shared out."""
        parameters = dict(self.parameters)
        place = {parameters[name]: i for i, name in enumerate(known.used)}
        # as the forward pass needs them
        self.parts = sorted(self._cut(known, place), key=lambda part: min(place[p] for p in part.parameters))
        for part in self.parts:
            part.take(self.optimizer.state)
            for flat, slot in part.slots:
                entry = self._entries[slot.parameter]
                entry.place = flat, slot
                entry.parts.append(part)
        for parameter in self._entries:
            self.optimizer.state.pop(parameter, None)
        if self._shared:
            self._shards = self.engine.attendant = Shards(self.engine, self.parts)

    def _cut(self, known: Arrangement, used: Iterable[nn.Parameter]) -> Iterator[DeferredPart]:
        """All parts: layers that exchange factors, and flat memory with the other parameters in pieces."""
        special = self._special(known.factors)
        yield from special
        taken = {parameter for part in special for parameter in part.parameters}
        rest = [(self.names[p], p) for p in used if p not in taken]
        for flat in flatten(rest, groups_of(self.optimizer), self.world):
            for piece in cut(flat, self.world, *known.piece_bytes):
                yield PiecePart(piece, self.optimizer, self.engine, shared=self._shared)

    def _asked(self) -> dict[str, Any]:
        """What decides on the arrangement: ranks, options and the model."""
        return {
            "world": self.world,
            "least_bytes": self.least_bytes,
            "most_bytes": self.most_bytes,
            "link_Bps": self.link_Bps,
            "parameters": list(self.names.values()),
            "modules": [name for name, _ in self.model.named_modules()],
        }

    @cached_property
    def _here(self) -> Machine:
        """The link and the device, measured once."""
        return probe(self.engine, self.device, self.link_Bps)

    def _sizes(self, factors: Factors) -> tuple[int, int]:
        """Bytes of pieces, at least and at most; layers that exchange `factors` are in none."""
        least, most = LEAST_BYTES, MOST_BYTES
        total = sum(p.nbytes for name, p in self.parameters if name.rpartition(".")[0] not in factors)
        if self.most_bytes is None and self.world > 1 and total > MOST_BYTES:
            least, most = piece_bytes(self._here.link_Bps, self.world)
        most = self.most_bytes or most
        return min(most, self.least_bytes or least), most

    def _factors(self) -> Factors:
        """By the name of a layer, what it exchanges in place of its gradient, and its rows in a step; agreed
        on.
        """
        return {}

    def _special(self, factors: Factors) -> Sequence[DeferredPart]:
        """Parts of parameters that do not travel as pieces."""
        return ()

    def _order(
        self, ready: Sequence[DeferredPart], when: Mapping[DeferredPart, float]
    ) -> Sequence[DeferredPart]:
        """The order in which gradients travel, given the order in which they become ready, and when
        (seconds).
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
            self._first_step()
            return loss
        self.synchronize()
        self._changed()
        if self._shards is not None:
            self._shards.position += 1
        self._apply()
        self._needed(self._outside)
        return loss

    def _first_step(self) -> None:
        self._show()
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(self._entries), self.clip_norm)
        self._plain_step()
        self.unscale = None
        with torch.no_grad():
            self._build()

    def _apply(self) -> None:
        """Submits the updates that the reduced gradients are for."""
        reduced = self._reduced()
        parts, sums = list(reduced), list(reduced.values())
        update = Update(now=settings(self.optimizer), scale=self.unscale)
        self.unscale = None
        norms: list[Ticket] = []
        if self.clip_norm is not None and parts:
            clipped = self._clip(parts, self.clip_norm, update)
            norms.append(self.engine.submit("norm of all gradients", clipped, after=sums))
        if isinstance(self.optimizer, Layerwise):
            measured = self._layer_norms(parts, update)
            norms.append(self.engine.submit("norms of layers", measured, after=[*sums, *norms]))
        for part, ticket in reduced.items():
            after = [ticket, *norms]
            done = self.engine.submit(part.name, part.update(update), channel="parameters", after=after)
            part.reduced = None
            for parameter in part.parameters:
                self._entries[parameter].expect(done)

    def _clip(self, parts: Sequence[DeferredPart], limit: float, update: Update) -> Job:
        """Finds the common norm of all gradients, and the scale that it leaves them; updates wait for it."""
        square = torch.stack([part.square() for part in parts]).sum().view(1)
        if self.world > 1:
            yield Collective("sum", [square])
        unscale = 1.0 if update.scale is None else update.scale
        update.scale = unscale * min(1.0, limit / (unscale * float(square.sqrt()) + 1e-6))

    def _layer_norms(self, parts: Sequence[DeferredPart], update: Update) -> Job:
        """For layer-wise optimizers: both norms of every parameter; updates wait for them."""
        place = {parameter: i for i, parameter in enumerate(self._entries)}
        total = torch.zeros(len(place), 2, device=self.device)
        for part in parts:
            for parameter, squares in part.measure(update):
                total[place[parameter]] += squares
        if self._shared:
            yield Collective("sum", [total])
        update.norms = dict(zip(place, total.sqrt(), strict=True))

    def _needed(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter in self._entries:  # others are those of a copy of the model
                self._entries[parameter].arrive()

    def synchronize(self) -> None:
        self._needed(self._entries)

    def no_sync(self) -> AbstractContextManager[None]:
        return self._gradients.paused()

    def _give_back(self) -> None:
        """Has all of the optimizer's state on all ranks, as it was before."""
        try:
            if self.parts and not self.engine.failed:
                self._plain_load(self.optimizer_state())
        finally:
            self.engine.attendant = None
            for parameter in self._entries:
                here(parameter)

    # -- the optimizer's state -------------------------------------------------------------------------

    def optimizer_state(self) -> State:
        self.synchronize()
        return self._whole((part, part.gathered()) for part in self.parts)

    def asked_state(self) -> State:
        """The same, also where this rank asks alone: see `shards`."""
        if self._shards is None:
            return self.optimizer_state()
        self.synchronize()
        return self._whole(self._shards.fetch())

    def _whole(self, parts: Iterable[tuple[DeferredPart, Sequence[Sequence[Tensor]]]]) -> State:
        """As the optimizer gives its state, with what ranks keep of each part."""
        full: States = {p: dict(s) for p, s in self.optimizer.state.items()}
        for part, rows in parts:
            part.spread(rows, full)
        kept, self.optimizer.state = self.optimizer.state, full  # type: ignore[assignment]
        try:
            return self._plain_state()
        finally:
            self.optimizer.state = kept

    def state_dict(self) -> State:
        return {} if self._arrangement is None else self._arrangement.kept()

    def load_state_dict(self, state: State) -> None:
        """After parameters and the optimizer's state: an arrangement that fits is taken up, in place of a
        first step that looks for one.
        """
        known = Arrangement.of(state)
        if not self.parts and known is not None and known.asked == self._asked():
            self._uses.know(known.reads)
            with torch.no_grad():
                self._place(known)
            self._take_up(known)

    def load_optimizer_state(self, state: State) -> None:
        self.synchronize()
        self._plain_load(state)
        for part in self.parts:
            part.take(self.optimizer.state)
        if self.parts:
            self.optimizer.state.clear()


def _tell_of(owner: Any, name: str, tell: Callable[[], None]) -> Callable[[], Any]:
    """Tells of calls of a method of one object, not of its copies, which does what it did; how to undo it."""

    def call(this: Any, *args: Any, **kwargs: Any) -> Any:
        if this is owner:
            tell()
        return getattr(type(this), name)(this, *args, **kwargs)

    setattr(owner, name, MethodType(call, owner))
    return partial(owner.__dict__.pop, name, None)
