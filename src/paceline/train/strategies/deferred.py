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

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from paceline.errors import RunError, SpecError
from paceline.train.comm import Collective, Job, Ticket
from paceline.train.hooks import Gradients, Sequencer, Uses
from paceline.train.layout import LEAST_BYTES, MOST_BYTES, Flat, Named, Slot, cut, flatten, group_of, groups_of, piece_bytes
from paceline.train.optim.layerwise import Layerwise
from paceline.train.strategies.base import Strategy, agree, average
from paceline.train.strategies.factors import MODES, FactorPart, Shape
from paceline.train.strategies.parts import Part, PiecePart
from paceline.train.strategies.probe import Machine, probe
from paceline.train.strategies.updates import settings

#: by which torch knows optimizers that unscale gradients themselves
_SCALES_ITSELF = "_step_supports_amp_scaling"


class Deferred(Strategy):
    """The common part: pieces, orders, waiting. `clip_norm` clips all gradients by their common norm before the update.

    Neighbours of up to `least_bytes` travel together, parameters of more than `most_bytes` in parts; by default as the link asks for. What it
    sends per second is measured once, unless `link_Bps` says it.
    """

    #: ranks share the update out
    shares: ClassVar[bool]

    def __init__(
        self, *, least_bytes: int | None = None, most_bytes: int | None = None, clip_norm: float | None = None,
        link_Bps: float | None = None,  # noqa: N803
    ) -> None:
        super().__init__()
        if link_Bps is not None and not link_Bps > 0:
            raise SpecError(f"link_Bps must be positive, got {link_Bps:g}")
        if clip_norm is not None and not clip_norm > 0:
            raise SpecError(f"clip_norm must be positive, got {clip_norm:g}")
        if not 0 < (least_bytes or 1) <= (most_bytes or MOST_BYTES):
            raise SpecError(f"least_bytes and most_bytes must be positive and in order, got {least_bytes} and {most_bytes}")
        self.least_bytes, self.most_bytes, self.clip_norm, self.link_Bps = least_bytes, most_bytes, clip_norm, link_Bps
        self._machine: Machine | None = None
        self.parts: list[Part] = []
        self._pending: dict[int, list[Ticket]] = {}
        self._scale: float | None = None
        #: gradients are multiplied by this before the update: the reverse of a loss scale
        self.unscale: float | None = None

    # -- the first step --------------------------------------------------------------------------------

    def _begin(self) -> None:
        groups = groups_of(self.optimizer)
        for name, parameter in self.parameters:
            group_of(name, parameter, groups)
        self._seen: list[tuple[nn.Parameter, float]] = []
        # torch's GradScaler hands such optimizers the scale, by which `_step` sees that it is in use
        self._scales_itself = getattr(self.optimizer, _SCALES_ITSELF, False)
        setattr(self.optimizer, _SCALES_ITSELF, True)
        self._uses = Uses(self.model, [p for _, p in self.parameters], self._needed)
        self._uses.watch()
        self._gradients = Gradients([p for _, p in self.parameters], self._ready, self._done)

    def _ready(self, parameter: nn.Parameter) -> None:
        if not self.parts:
            self._seen.append((parameter, time.perf_counter()))
            return
        flat, slot = self._slots[id(parameter)]
        assert parameter.grad is not None
        parts = self._by_parameter[id(parameter)]
        for part in parts:
            self._drop(part)
        self._put(flat, slot)
        self._arrived.add(id(parameter))
        for part in parts:
            self._count(part)

    def _put(self, flat: Flat, slot: Slot) -> None:
        """A gradient into its place."""
        assert slot.parameter.grad is not None
        flat.gradient(slot).copy_(slot.parameter.grad)
        slot.parameter.grad = None

    def _put_nothing(self, flat: Flat, slot: Slot) -> None:
        """In place of the gradient of a parameter that was not used."""
        flat.gradient(slot).zero_()

    def _drop(self, part: Part) -> None:
        """A gradient of a backward pass that no step followed is overwritten, once it is through."""
        if part.reduced is not None:
            part.reduced.wait()
            part.reduced = None

    def _count(self, part: Part) -> None:
        part.waiting -= 1
        if not part.waiting:
            for free in self._sequencer.ready(part):
                self._send(free)

    def _send(self, part: Part) -> None:
        part.reduced = self.engine.submit(part.name, part.reduce(), bare=part.bare)

    def _done(self) -> None:
        if not self.parts:
            gradients = [p.grad if p.grad is not None else p.new_zeros(p.shape) for _, p in self.parameters]
            self.engine.submit("all gradients", average(gradients, self.world)).wait()
            for (_, parameter), gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
        else:
            for flat, slot in self._slots.values():
                if id(slot.parameter) not in self._arrived:  # not used in this pass
                    for part in self._by_parameter[id(slot.parameter)]:
                        self._drop(part)
                    if slot.parameter.grad is None:
                        self._put_nothing(flat, slot)
                    else:  # but in one before it, within `no_sync`
                        self._put(flat, slot)
            for part in self._sequencer.flush():
                self._send(part)
            self._restart()
        self._average_buffers()

    def _restart(self) -> None:
        self._arrived: set[int] = set()
        for part in self.parts:
            part.waiting = 1 if isinstance(part, FactorPart) else len(part.parameters)

    # -- building --------------------------------------------------------------------------------------

    def _build(self) -> None:
        """After the first step: orders agreed on, parameters moved into flat memory, optimizer state shared out."""
        index = {id(p): i for i, (_, p) in enumerate(self.parameters)}
        known = {id(p) for p in self._uses.order}
        unused = [i for i, (_, p) in enumerate(self.parameters) if id(p) not in known]
        used, ready = agree(([*(index[id(p)] for p in self._uses.order), *unused], [(index[id(p)], at) for p, at in self._seen]))
        parts, rest = self._special([self.parameters[i] for i in used])
        self._flats = flatten(rest, groups_of(self.optimizer), self.world)
        least, most = self._sizes()
        for flat in self._flats:
            pieces = cut(flat, self.world, least, most)
            parts += [PiecePart(piece, self.optimizer, self.rank, self.world, self.shares) for piece in pieces]
        place = {id(self.parameters[i][1]): at for at, i in enumerate(used)}
        self.parts = sorted(parts, key=lambda part: min(place[id(p)] for p in part.parameters))  # as the forward pass needs them
        self._slots: dict[int, tuple[Flat, Slot]] = {id(slot.parameter): (flat, slot) for flat in self._flats for slot in flat.slots}
        self._by_parameter: dict[int, list[Part]] = {}
        for part in self.parts:
            part.take(self.optimizer.state)
            for parameter in part.parameters:
                self._by_parameter.setdefault(id(parameter), []).append(part)
        for _, parameter in self.parameters:
            self.optimizer.state.pop(parameter, None)
            parameter.grad = None
        at = {id(self.parameters[i][1]): seconds for i, seconds in ready}
        last = max(at.values())
        # a part is ready with the last of its gradients
        when = {id(part): max(at.get(id(p), last) for p in part.parameters) for part in self.parts}
        self._sequencer = Sequencer(self._order(sorted(self.parts, key=lambda part: when[id(part)]), when))
        self._restart()

    def _here(self) -> Machine:
        """The link and the device, measured once."""
        if self._machine is None:
            self._machine = probe(self.engine, self.parameters[0][1].device, self.link_Bps)
        return self._machine

    def _sizes(self) -> tuple[int, int]:
        """Bytes of pieces, at least and at most."""
        least, most = LEAST_BYTES, MOST_BYTES
        if self.most_bytes is None and self.world > 1 and sum(flat.data.numel() * flat.data.element_size() for flat in self._flats) > MOST_BYTES:
            least, most = piece_bytes(self._here().link_Bps, self.world)
        most = self.most_bytes or most
        return min(most, self.least_bytes or least), most

    def _special(self, parameters: list[Named]) -> tuple[list[Part], list[Named]]:
        """Parts of parameters that do not travel as pieces, and the parameters that do."""
        return [], parameters

    def _order(self, ready: Sequence[Part], when: Mapping[int, float]) -> Sequence[Part]:
        """The order in which gradients travel, given the order in which they become ready, and when (seconds, by the id of the part)."""
        return ready

    # -- every step ------------------------------------------------------------------------------------

    def _step(self, closure: Any = None) -> Any:
        if getattr(self.optimizer, "found_inf", None) is not None:
            raise RunError(f"torch's GradScaler finds no gradients under {self.name!r}, which keeps them; use paceline.train.Scaler in its place")
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
        self._scale = self.unscale
        ready = [part for part in self.parts if part.reduced is not None]
        norm = self._norm(ready)
        if isinstance(self.optimizer, Layerwise):
            norm = [self._layer_norms(ready, now, norm)]
        for part in ready:
            assert part.reduced is not None
            ticket = self.engine.submit(part.name, self._update(part, now), channel="parameters", after=[part.reduced, *norm])
            part.reduced = None
            for parameter in part.parameters:
                self._pending.setdefault(id(parameter), []).append(ticket)
        return loss

    def _update(self, part: Part, now: list[dict[str, Any]]) -> Job:
        yield from part.update(now, self._scale)

    def _norm(self, parts: list[Part]) -> list[Ticket]:
        """Where gradients are clipped, a job that finds their common norm; updates wait for it."""
        if self.clip_norm is None or not parts:
            return []
        limit = self.clip_norm

        def job() -> Job:
            square = torch.stack([part.square() for part in parts]).sum().view(1)
            if self.world > 1:
                yield Collective("sum", [square])
            before = 1.0 if self.unscale is None else self.unscale
            self._scale = before * min(1.0, limit / (before * float(square.sqrt()) + 1e-6))

        return [self.engine.submit("norm of all gradients", job(), after=[part.reduced for part in parts if part.reduced is not None])]

    def _layer_norms(self, parts: list[Part], now: list[dict[str, Any]], after: list[Ticket]) -> Ticket:
        """For layer-wise optimizers, a job that finds both norms of every parameter; updates wait for it."""
        pieces = [part for part in parts if isinstance(part, PiecePart)]  # such optimizers have no others: `_choose` sees to it

        def job() -> Job:
            squares = [part.measure(now, self._scale) for part in pieces]
            place = {id(p): i for i, (_, p) in enumerate(self.parameters)}
            total = squares[0].new_zeros(len(place), 2)
            for part, found in zip(pieces, squares, strict=True):
                total.index_add_(0, torch.tensor([place[id(p)] for p in part.parameters], device=total.device), found)
            if self.shares and self.world > 1:
                yield Collective("sum", [total])
            for part in pieces:
                part.norms = total[[place[id(p)] for p in part.parameters]].sqrt()

        reduced = [part.reduced for part in parts if part.reduced is not None]
        return self.engine.submit("norms of layers", job(), after=[*reduced, *after])

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
        try:
            if self.parts and not self.engine.failed:
                self.optimizer.load_state_dict(self.optimizer_state())  # all of it on all ranks, as it was before
        finally:
            for part in self.parts:
                part.release()
            self._gradients.remove()
            self._uses.remove()
            setattr(self.optimizer, _SCALES_ITSELF, self._scales_itself)
            super().detach()

    # -- the optimizer's state -------------------------------------------------------------------------

    def optimizer_state(self) -> dict[str, Any]:
        self.synchronize()
        full: dict[Any, dict[str, Any]] = {p: dict(s) for p, s in self.optimizer.state.items()}
        for part in self.parts:
            part.spread(self.engine, full)
        kept, self.optimizer.state = self.optimizer.state, full  # type: ignore[assignment]
        try:
            return self.optimizer.state_dict()
        finally:
            self.optimizer.state = kept

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        self.synchronize()
        self.optimizer.load_state_dict(state)
        for part in self.parts:
            part.take(self.optimizer.state)
        if self.parts:
            self.optimizer.state.clear()


class Overlap(Deferred):
    """Overlapped gradient averaging, with message fusion.

    `fc` says what fully connected layers exchange: "gradient", "rows", "factors" (see `factors`), or "auto": what takes least time on the
    link and the device found here. Layers that are called once per pass and share no weight qualify.
    """

    name = "overlap"
    paper = "Lee et al., MLHPC 2018"
    shares = True

    def __init__(self, *, fc: str = "auto", **options: Any) -> None:
        super().__init__(**options)
        if fc not in ("auto", *MODES):
            raise SpecError(f"fc must be auto, {', '.join(MODES)}; got {fc!r}")
        self.fc = fc
        self._rows: dict[nn.Linear, list[int]] = {}

    def _begin(self) -> None:
        super()._begin()
        owners: dict[int, int] = {}
        for module in self.model.modules():
            for parameter in module.parameters(recurse=False):
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
        self._names = {m: n for n, m in self.model.named_modules()
                       if type(m) is nn.Linear and m.weight.requires_grad and owners[id(m.weight)] == 1 and m.weight.dtype == torch.float32}
        self._handles = [m.register_forward_pre_hook(self._count_rows) for m in self._names] if self.fc != "gradient" else []

    def _count_rows(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled() and isinstance(layer, nn.Linear):
            self._rows.setdefault(layer, []).append(inputs[0].numel() // layer.in_features)

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        super().detach()

    def _special(self, parameters: list[Named]) -> tuple[list[Part], list[Named]]:
        for handle in self._handles:
            handle.remove()
        users: dict[int, int] = {}
        for wanted in self._uses.by_module.values():
            for key in wanted:
                users[key] = users.get(key, 0) + 1
        # one call per backward pass, and nobody else reads the weight
        fit = [layer for layer, rows in self._rows.items() if len(rows) == 1 and users.get(id(layer.weight)) == 1]
        if self.world > 1 and self.fc != "gradient" and self._names:
            most = self.engine.submit("rows of layers", self._most_rows(fit)).wait()
            self._rows.update({layer: [rows] for layer, rows in most.items() if layer in fit})
        chosen = agree(self._choose(fit))
        groups = groups_of(self.optimizer)
        parts: list[Part] = [
            FactorPart(name, layer, chosen[name][0], chosen[name][1], self.optimizer, groups, self.rank, self.world, self._factors_ready,
                       lambda: not self._gradients.enabled)
            for layer, name in self._names.items() if name in chosen
        ]
        taken = {id(p) for part in parts for p in part.parameters}
        return parts, [(name, p) for name, p in parameters if id(p) not in taken]

    def _most_rows(self, fit: list[nn.Linear]) -> Job:
        """A job: rows of each layer on the rank that has most of them; batches need not be shared out evenly."""
        rows = torch.tensor([self._rows[layer][0] if layer in fit else 0 for layer in self._names], device=self.parameters[0][1].device)
        yield Collective("max", [rows])
        return dict(zip(self._names, rows.tolist(), strict=True))

    def _choose(self, layers: list[nn.Linear]) -> dict[str, tuple[str, int]]:
        """By name, what a layer exchanges (where not its gradient) and its rows per step."""
        if self.world == 1 or self.fc == "gradient" or isinstance(self.optimizer, Layerwise):
            return {}
        machine = self._here() if self.fc == "auto" else None
        found = {}
        for layer in layers:
            shape = Shape(n_in=layer.in_features, n_out=layer.out_features, rows=self._rows[layer][0])
            mode = shape.choose(self.world, machine.link_Bps, machine.flops) if machine is not None else self.fc
            if mode != "gradient" and not (mode == "rows" and shape.n_out % self.world):
                found[self._names[layer]] = (mode, shape.rows)
        return found

    def _factors_ready(self, part: FactorPart) -> None:
        self._gradients.begin()
        self._drop(part)
        self._count(part)


class Priority(Deferred):
    """All-reduce in pieces; bottom layers, which the next forward pass needs first, overtake where they can.

    Which can is found once, by playing the first backward pass on the link found here: whenever the link is free, of the pieces that are ready
    the one needed first goes. The order found holds for all ranks and steps.
    """

    name = "priority"
    paper = "Jayarajan et al., SysML 2019; Peng et al., SOSP 2019"
    shares = False

    def _order(self, ready: Sequence[Part], when: Mapping[int, float]) -> Sequence[Part]:
        if self.world == 1:
            return ready
        machine = self._here()
        need = {id(part): i for i, part in enumerate(self.parts)}
        waiting, order = list(ready), list[Part]()
        now = 0.0
        while waiting:
            now = max(now, when[id(waiting[0])])
            part = min((p for p in waiting if when[id(p)] <= now), key=lambda p: need[id(p)])
            waiting.remove(part)
            order.append(part)
            size = part.piece.bytes if isinstance(part, PiecePart) else 0
            now += machine.latency_s + 2 * (self.world - 1) / self.world * size / machine.reduce_Bps
        return order
