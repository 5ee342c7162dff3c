"""Averaging during the backward pass, plain or compressed: gradients are the mean over ranks when
`backward()` returns, as with DDP.

Gradients travel in buckets, in the order in which they become ready (rank 0's, seen in the first step).
Within a bucket every parameter has its own compressor and state; their messages are put together, so that a
bucket costs as few collectives as one gradient.

A pass may add to gradients that are means already (two passes before a step, outside `no_sync`). Compressors
must not see these again: momentum would be applied to momentum. So they are set apart before the pass adds to
them, and its own mean is added to them at its end.

Cost of a step: F + max(B, encode + wire + decode of what is ready) with the bytes of
`paceline.cost.compression`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.cost.compression import assign, wire_bytes
from paceline.errors import SpecError
from paceline.sim.program import buckets
from paceline.spec import compression as spec
from paceline.spec.defaults import ENGINE
from paceline.train.comm import Collective, Job, Ticket
from paceline.train.compress import Compressor, Round, make
from paceline.train.hooks import Gradients, Sequencer
from paceline.train.strategies.base import Strategy, agree
from paceline.train.strategies.probe import cores

#: where a state keeps the momentum of uncompressed parameters, and the order in which parameters lie in
#: buckets
_VELOCITY, _ORDER = "velocity", "order"
#: of gradients put into one bucket, and of the first, which starts communication early
BUCKET_BYTES, FIRST_BYTES = ENGINE.bucket_bytes, ENGINE.first_bucket_bytes
#: bytes of a gradient that count for a byte of it on the wire, at most, where encoders share the core of the
#: passes: a full bucket then sends 250 kB, for whose bytes a core works about as long as for the message
#: itself (0.2 ms; 0.55 to 0.8 ns a byte, by `probe` on emulated links)
_ALONE = 16


@dataclass(slots=True, eq=False)
class Bucket:
    """Parameters whose gradients travel together."""

    names: list[str]
    parameters: list[nn.Parameter]
    #: of parameters that go as they are
    plain: Tensor | None = None
    waiting: int = 0


class Averaging(Strategy):
    """`scheme` for every parameter (float32 for small ones, and for the last layer where the scheme says so),
    or by name.
    """

    name = "averaging"
    paper = "per scheme: paceline.spec.compression"

    def __init__(
        self,
        scheme: spec.Scheme | str = "fp32",
        *,
        by_name: Mapping[str, spec.Scheme] | None = None,
        bucket_bytes: float | None = None,
        first_bytes: float | None = None,
        seed: int = 0,
        fused: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        super().__init__()
        if bucket_bytes is not None and bucket_bytes <= 0:
            raise SpecError(f"bucket_bytes must be positive, got {bucket_bytes:g}")
        self.scheme = spec.parse(scheme) if isinstance(scheme, str) else scheme
        self.by_name, self.seed, self.fused, self.scaler = by_name, seed, fused, scaler
        self._asked = bucket_bytes is not None
        self.bucket_bytes = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
        self.first_bytes = min(FIRST_BYTES, self.bucket_bytes) if first_bytes is None else first_bytes

    def _begin(self) -> None:
        listed = [(name, tuple(p.shape)) for name, p in self.parameters]
        chosen = dict(
            assign(self.scheme, listed)
            if self.by_name is None
            else {name: self.by_name[name] for name, _ in listed}
        )
        self._before = _settings(self.optimizer)
        self._taken = take_momentum(chosen, self.optimizer)
        made = {
            s: make(s, rank=self.rank, world=self.world, seed=self.seed, fused=self.fused)
            for s in dict.fromkeys(chosen.values())
        }
        self.compressors = {name: made[s] for name, s in chosen.items()}
        #: of parameters that go as they are while others' momentum is the compressor's
        self._velocity: dict[str, Tensor] = {}
        self._distinct: list[Compressor] = list({id(c): c for c in self.compressors.values()}.values())
        self._names = {id(p): name for name, p in self.parameters}
        self._index = {id(p): i for i, (_, p) in enumerate(self.parameters)}
        self._tickets: list[Ticket] = []
        self._in_step, self._agreed = False, False
        #: by id of a parameter: the part of its gradient that is a mean already; None for all of it
        self._means: dict[int, Tensor | None] = {}
        #: ids of parameters whose means are set apart in the pass that runs, None where none does
        self._apart: set[int] | None = None
        self._alone = not self._asked and agree(cores(self.parameters[0][1].device)[0] == 1)
        if self.scaler is None and (self._taken is not None or any(c.local_state for c in self._distinct)):
            self._hear_of_scaler()
        self._listen()

    def _listen(self) -> None:
        """Has gradients come here as they become ready."""
        self._arrange(range(len(self.parameters) - 1, -1, -1))
        self._gradients = Gradients(
            [p for _, p in self.parameters],
            self._ready,
            self._done,
            watched=self._watched(),
            before=self._before_adding,
        )

    def _watched(self) -> list[nn.Parameter]:
        """Parameters whose means must not be averaged again; in float32, the mean of a mean is the mean."""
        return [p for name, p in self.parameters if self._taken is not None or not self._plain(name)]

    def _arrange(self, order: Sequence[int]) -> None:
        """Buckets in the order given (places in `self.parameters`)."""
        listed = [self.parameters[i] for i in order]
        self._buckets: list[Bucket] = []
        sizes = [
            counted(p.numel() * p.element_size(), self.compressors[name].scheme, tuple(p.shape), self._alone)
            for name, p in listed
        ]
        for members in buckets(sizes, self.bucket_bytes, self.first_bytes):
            chosen = [listed[i] for i in members]
            bucket = Bucket([name for name, _ in chosen], [p for _, p in chosen], waiting=len(chosen))
            plain = sum(p.numel() for name, p in chosen if self._plain(name))
            if plain:
                bucket.plain = chosen[0][1].new_empty(plain)
            self._buckets.append(bucket)
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._sequencer = Sequencer(self._buckets)
        self._seen: list[int] = []

    def _plain(self, name: str) -> bool:
        return isinstance(self.compressors[name].scheme, spec.Float32)

    # -- every step ------------------------------------------------------------------------------------

    @property
    def _paused(self) -> bool:
        """Whether the pass that runs only adds up."""
        return not self._gradients.enabled

    def _before_adding(self, parameter: nn.Parameter) -> None:
        """Before a pass adds to the gradient of a watched parameter."""
        if not self._paused:
            self._gradients.begin()
            self._begin_pass()
            self._set_apart(parameter)
        elif parameter.grad is None:
            self._means.pop(id(parameter), None)
        elif id(parameter) in self._means and self._means[id(parameter)] is None:
            self._means[id(parameter)] = parameter.grad.clone()

    def _begin_pass(self) -> None:
        """Its gradients are added to those of this step, if these are still there, or begin a step.

        They are gone where the last pass was thrown away, or where a scaler has skipped its step.
        """
        if self._apart is not None:
            return
        self._apart = set()
        if self._in_step and self._adds():
            for compressor in self._distinct:
                compressor.next_pass()
        else:
            self._close(applied=False)
            self._open()

    def _adds(self) -> bool:
        """Whether gradients of the last pass are still there, in the same units.

        Other units mean that the step was skipped: a scaler lowers its scale then.
        """
        kept = any(id(p) in self._means and p.grad is not None for _, p in self.parameters)
        return kept and self._distinct[0].loss_scale == self._scale()

    def _set_apart(self, parameter: nn.Parameter) -> None:
        """Leaves in `grad` what is no mean yet."""
        key = id(parameter)
        if self._apart is None or key in self._apart:
            return
        self._apart.add(key)
        if key not in self._means:
            return
        mean = self._means[key]
        if parameter.grad is None:
            del self._means[key]
        elif mean is not None:  # and what passes within `no_sync` added
            parameter.grad.sub_(mean)
        else:
            self._means[key] = self._kept(parameter)
            parameter.grad = None

    def _kept(self, parameter: nn.Parameter) -> Tensor:
        """A gradient in memory of its own: others lie in their bucket, which is filled again."""
        assert parameter.grad is not None
        return parameter.grad.clone() if self._plain(self._names[id(parameter)]) else parameter.grad

    def _put_together(self) -> None:
        """Means of this pass and of those before it, in one."""
        for parameter in self._watched():
            mean = self._means.get(id(parameter))
            if mean is not None and parameter.grad is not None:
                parameter.grad = mean.add_(parameter.grad)
            self._means[id(parameter)] = None
        self._apart = None

    def _ready(self, parameter: nn.Parameter) -> None:
        self._begin_pass()
        self._seen.append(self._index[id(parameter)])
        bucket = self._bucket_of[id(parameter)]
        bucket.waiting -= 1
        if not bucket.waiting:
            for free in self._sequencer.ready(bucket):
                self._send(free)

    def _open(self) -> None:
        self._in_step = True
        for compressor in self._distinct:
            compressor.begin_step(loss_scale=None if self.scaler is None else self._scale())

    def scaled_by(self, scaler: Any) -> None:
        """Says that losses are scaled, where nobody has said so: what compressors hold back is in the units
        of the loss.
        """
        if self.scaler is not None:
            return
        if self._velocity or any(compressor.state for compressor in self._distinct):
            raise self._unknown_scale()
        self.scaler = scaler
        if self._in_step:
            self._open()

    def _scaled_step(self, *args: Any, **kwargs: Any) -> Any:
        raise self._unknown_scale()

    def _unknown_scale(self) -> SpecError:
        return SpecError(
            f"{self.scheme.name} keeps part of the gradients for later steps and must know their scale; "
            "pass the scaler on: parallelize(..., scaler=scaler)"
        )

    def _close(self, applied: bool) -> None:
        if self._in_step:
            self._in_step = False
            for compressor in self._distinct:
                compressor.end_step(applied=applied or self.scaler is None)

    def _send(self, bucket: Bucket) -> None:
        for parameter in bucket.parameters:
            self._set_apart(parameter)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        name = bucket.names[0] if len(bucket.names) == 1 else f"{bucket.names[0]}..{bucket.names[-1]}"
        self._tickets.append(self.engine.submit(name, self._job(bucket)))

    def _done(self) -> None:
        for bucket in self._sequencer.flush():
            self._send(bucket)
        for bucket in self._buckets:
            bucket.waiting = len(bucket.parameters)
        self._average_buffers()
        for ticket in self._tickets:
            ticket.wait()
        self._tickets.clear()
        self._put_together()
        if not self._agreed:  # the order in which gradients became ready, from the first step on
            self._agreed = True
            seen = agree(list(dict.fromkeys(self._seen)))
            self._arrange([*seen, *(i for i in range(len(self.parameters)) if i not in set(seen))])
        self._seen = []

    def _job(self, bucket: Bucket) -> Job:
        """The mean over ranks of every gradient of a bucket, in place."""
        gradients = [parameter.grad for parameter in bucket.parameters]
        views = yield from self._mean(bucket.parameters, gradients, bucket.plain)
        for parameter, view in views:
            parameter.grad = view

    def _mean(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None], plain: Tensor | None
    ) -> Job:
        """The mean over ranks of gradients, in place where they are compressed; of the others, which lie in
        `plain` then, as views of it.
        """
        rounds: list[Generator[Round, Any, None]] = []
        views: list[tuple[nn.Parameter, Tensor]] = []
        at = 0
        for parameter, gradient in zip(parameters, gradients, strict=True):
            assert gradient is not None
            name = self._names[id(parameter)]
            if self._plain(name) and plain is not None:
                view = plain[at : at + gradient.numel()].view(gradient.shape)
                if view.data_ptr() != gradient.data_ptr():
                    view.copy_(gradient)
                views.append((parameter, view))
                at += gradient.numel()
            else:
                if self._taken is not None and self._first:
                    self._taken.decay(parameter, gradient, self._scale())
                rounds.append(self.compressors[name].exchange(name, gradient, gradient))
        if self.world > 1 or rounds:
            yield from _together(rounds, plain)
        if plain is not None:
            plain.div_(self.world)
            # otherwise the step will be skipped
            if self._taken is not None and bool(torch.isfinite(plain).all()):
                for parameter, view in views:
                    name = self._names[id(parameter)]
                    if self._first:
                        self._taken.decay(parameter, view, self._scale())
                    self._taken.accelerate(self._velocity, name, view, self._scale(), more=not self._first)
        return views

    @property
    def _first(self) -> bool:
        """Whether no pass of this step went before: momentum and weight decay are of steps, not of passes."""
        return self._distinct[0].passes == 0

    def _scale(self) -> float:
        return float(self.scaler.get_scale()) if self.scaler is not None else 1.0

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        result = self._plain_step(*args, **kwargs)
        self._close(applied=True)
        self._means.clear()
        return result

    def synchronize(self) -> None:
        """Nothing is ever on its way after a backward pass."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with self._gradients.paused():
            yield

    def detach(self) -> None:
        self._gradients.remove()
        if self._taken is not None:
            for group, before in zip(self.optimizer.param_groups, self._before, strict=True):
                group.update(before)
        super().detach()

    def optimizer_state(self) -> dict[str, Any]:
        state = super().optimizer_state()
        if self._taken is not None:  # as the user set it: other strategies may take it up
            for group, before in zip(state["param_groups"], self._before, strict=True):
                group.update(before)
        return state

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        super().load_optimizer_state(state)
        if self._taken is not None:
            _strip(self.optimizer)

    def wire_bytes(self) -> int:
        """What this rank contributes in a step, by the schemes' own count, without what is agreed on
        first.
        """
        return sum(self.compressors[name].wire_bytes(tuple(p.shape)) for name, p in self.parameters)

    def state_dict(self) -> dict[str, Any]:
        held = {str(compressor.scheme): compressor.state_dict() for compressor in self._distinct}
        order = {_ORDER: [name for bucket in self._buckets for name in bucket.names]} if self._agreed else {}
        return {**held, **order, _VELOCITY: {name: tensor.clone() for name, tensor in self._velocity.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for compressor in self._distinct:
            if str(compressor.scheme) in state:
                compressor.load_state_dict(state[str(compressor.scheme)])
        self._velocity = {name: tensor.clone() for name, tensor in state.get(_VELOCITY, {}).items()}
        place = {name: i for i, (name, _) in enumerate(self.parameters)}
        # the same buckets from the first step on: where a sum begins depends on its place in one
        if sorted(state.get(_ORDER, ())) == sorted(place):
            self._arrange([place[name] for name in state[_ORDER]])
            self._agreed = True

    def reshard(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The state of this rank, from those of all ranks of a run of another size."""
        return {
            str(c.scheme): (
                type(c).reshard([state[str(c.scheme)] for state in states], rank=self.rank, world=self.world)
            )
            for c in self._distinct
            if str(c.scheme) in states[0]
        } | {_VELOCITY: states[0].get(_VELOCITY, {})}


def counted(size: float, scheme: spec.Scheme, shape: tuple[int, ...], alone: bool) -> float:
    """Bytes that a gradient of `size` counts for in a bucket. On the only core of a rank (`alone`) nothing is
    gained by encoding early, and messages take time from the passes: there, what hardly sends anything hardly
    counts."""
    return min(size, _ALONE * wire_bytes(scheme, shape)) if alone else size


def _together(rounds: list[Generator[Round, Any, None]], plain: Tensor | None) -> Job:
    """Drives exchanges in step with each other; what they send at the same stage goes in one message per
    kind.
    """
    asked: list[Round | None] = [next(one) for one in rounds]
    while plain is not None or any(request is not None for request in asked):
        by_op: dict[str, list[int]] = {}
        for i, request in enumerate(asked):
            if request is not None:
                by_op.setdefault(request.op, []).append(i)
        messages = [_merge(op, [asked[i] for i in members]) for op, members in sorted(by_op.items())]
        reduction = [Collective("sum", [plain])] if plain is not None else []
        plain = None
        came = yield [*reduction, *(message.collective for message in messages)]
        for (_, members), message, result in zip(
            sorted(by_op.items()), messages, came[len(reduction) :], strict=True
        ):
            for i, arrived in zip(members, message.split(result), strict=True):
                try:
                    asked[i] = rounds[i].send(arrived)
                except StopIteration:
                    asked[i] = None


@dataclass(slots=True)
class _Message:
    """Payloads of several exchanges in one tensor per dtype (reductions) or one of bytes (gathers), and the
    way back.
    """

    collective: Collective
    payloads: list[list[Tensor]]

    def split(self, result: Any) -> list[list[list[Tensor]]]:
        """What each exchange is sent: a list of tensors per rank, or one list after a reduction."""
        if self.collective.op != "gather":
            return [[payload] for payload in self._reduced()]
        ranks = [self._apart(rows[0]) for rows in result]
        return [[rank[i] for rank in ranks] for i in range(len(self.payloads))]

    def _reduced(self) -> list[list[Tensor]]:
        flat = {tensor.dtype: tensor for tensor in self.collective.tensors}
        at = dict.fromkeys(flat, 0)
        out = []
        for payload in self.payloads:
            part = []
            for tensor in payload:
                start = at[tensor.dtype]
                part.append(flat[tensor.dtype][start : start + tensor.numel()].view(tensor.shape))
                at[tensor.dtype] = start + tensor.numel()
            out.append(part)
        return out

    def _apart(self, row: Tensor) -> list[list[Tensor]]:
        if row.data_ptr() % 8:
            row = row.clone()
        at = 0
        found: dict[tuple[int, int], Tensor] = {}
        for i, j in _by_size(self.payloads):
            tensor = self.payloads[i][j]
            count = tensor.numel() * tensor.element_size()
            found[i, j] = row[at : at + count].view(tensor.dtype).view(tensor.shape)
            at += count
        return [[found[i, j] for j in range(len(payload))] for i, payload in enumerate(self.payloads)]


def _by_size(payloads: list[list[Tensor]]) -> list[tuple[int, int]]:
    """Tensors with long elements first: each begins at a multiple of its element then, without padding."""
    return sorted(
        ((i, j) for i, payload in enumerate(payloads) for j in range(len(payload))),
        key=lambda ij: -payloads[ij[0]][ij[1]].element_size(),
    )


def _merge(op: str, requests: Sequence[Round | None]) -> _Message:
    payloads = [list(request.payload) for request in requests if request is not None]
    if op == "gather":
        parts = [payloads[i][j].contiguous().view(-1).view(torch.uint8) for i, j in _by_size(payloads)]
        return _Message(Collective("gather", [torch.cat(parts)]), payloads)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for payload in payloads:
        for tensor in payload:
            by_dtype.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
    return _Message(Collective(op, [torch.cat(parts) for parts in by_dtype.values()]), payloads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What Deep Gradient Compression takes over from an optimizer of torch's kind, whose momentum is over
    gradient and weight decay together.
    """

    momentum: float
    nesterov: bool
    #: by id of a parameter
    decays: Mapping[int, float]

    def decay(self, parameter: nn.Parameter, gradient: Tensor, scale: float = 1.0) -> None:
        """Adds weight decay to a gradient that is `scale` times the true one. Before selection: what masking
        withholds of an element's momentum, it then withholds of the gradient and of the decay alike, and they
        balance where they did."""
        factor = self.decays.get(id(parameter), 0.0)
        if factor:
            gradient.add_(parameter.detach(), alpha=factor * scale)

    def accelerate(
        self,
        velocity: dict[str, Tensor],
        name: str,
        gradient: Tensor,
        scale: float = 1.0,
        *,
        more: bool = False,
    ) -> None:
        """Momentum for a gradient that is not compressed; `velocity` is kept in true units.

        `more`: the gradient is added to one of the same step, which was accelerated already.
        """
        held = velocity.get(name)
        if held is None:
            held = velocity[name] = torch.zeros_like(gradient)
        if more:
            held.add_(gradient, alpha=1 / scale)
            if self.nesterov:
                gradient.mul_(1 + self.momentum)
            return
        held.mul_(self.momentum).add_(gradient, alpha=1 / scale)
        if self.nesterov:
            gradient.add_(held, alpha=self.momentum * scale)
        else:
            gradient.copy_(held).mul_(scale)


def take_momentum(chosen: dict[str, spec.Scheme], optimizer: torch.optim.Optimizer) -> Taken | None:
    """Momentum correction: Deep Gradient Compression applies the optimizer's momentum before it selects. It
    takes it over, in `chosen` and from the optimizer; None where there is nothing to take."""
    if not any(isinstance(scheme, spec.DGC) and scheme.momentum for scheme in chosen.values()):
        return None
    used = {
        (float(group.get("momentum", 0.0)), bool(group.get("nesterov"))) for group in optimizer.param_groups
    }
    if len(used) > 1:
        raise SpecError(
            "dgc takes over the optimizer's momentum, which must be the same in all groups; got"
            f" {sorted(used)}"
        )
    momentum, nesterov = used.pop()
    for name, scheme in chosen.items():
        if isinstance(scheme, spec.DGC):
            chosen[name] = replace(scheme, momentum=momentum, nesterov=nesterov)
    if not momentum:
        return None
    decays = {}
    for group in optimizer.param_groups:
        sign = -1.0 if group.get("maximize") else 1.0
        decays.update({id(p): sign * float(group.get("weight_decay", 0.0)) for p in group["params"]})
    _strip(optimizer)
    return Taken(momentum=momentum, nesterov=nesterov, decays=decays)


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Of each group, what `_strip` changes."""
    return [
        {key: value for key, value in group.items() if key in ("momentum", "nesterov", "weight_decay")}
        for group in optimizer.param_groups
    ]


def _strip(optimizer: torch.optim.Optimizer) -> None:
    """Takes momentum and weight decay away."""
    for group in optimizer.param_groups:
        group.update(
            momentum=0.0, nesterov=False, **({"weight_decay": 0.0} if "weight_decay" in group else {})
        )
