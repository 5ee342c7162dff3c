"""What strategies that average gradients share: compressors, momentum that they take over, passes and steps.

Every parameter has its own compressor and state; messages of what travels together are put together, so that
a bucket costs as few collectives as one gradient.

A pass may add to gradients that are means already (two passes before a step, outside `no_sync`). Compressors
must not see these again: momentum would be applied to momentum. So they are set apart before the pass adds to
them, and its own mean is added to them at its end.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.cost.compression import assign
from paceline.errors import SpecError
from paceline.spec import compression as spec
from paceline.train.comm import Job, Ticket
from paceline.train.compress import Compressor, make
from paceline.train.compress.messages import together
from paceline.train.compress.momentum import take_momentum
from paceline.train.strategies.base import State, Strategy, Tensors

#: where a state keeps the momentum of uncompressed parameters
_VELOCITY = "velocity"


class Means:
    """Which part of each gradient is a mean over ranks already, of parameters that are `watched`: their means
    must not be averaged again.
    """

    def __init__(self, watched: Iterable[nn.Parameter]) -> None:
        self.watched = list(watched)
        #: the mean that was in a gradient before the pass; None: all of the gradient
        self.held: dict[nn.Parameter, Tensor | None] = {}
        #: parameters whose pass has begun; None where none runs
        self._begun: set[nn.Parameter] | None = None

    def begin(self) -> bool:
        """Begins a pass; False where one runs already."""
        if self._begun is not None:
            return False
        self._begun = set()
        return True

    @property
    def kept(self) -> bool:
        """Whether there are gradients that means are in."""
        return any(parameter.grad is not None for parameter in self.held)

    def keep(self, parameter: nn.Parameter) -> Tensor | None:
        """The mean in its gradient, which a pass will add to; None where there is none."""
        if parameter.grad is None:
            self.held.pop(parameter, None)
        elif parameter in self.held and self.held[parameter] is None:
            self.held[parameter] = parameter.grad.clone()
        return self.held.get(parameter)

    def untouched(self, parameter: nn.Parameter) -> bool:
        """Whether the pass that runs has not come to its gradient; from now on it has."""
        if self._begun is None or parameter in self._begun:
            return False
        self._begun.add(parameter)
        return True

    def end(self) -> None:
        """Ends a pass: gradients are means."""
        self.held = dict.fromkeys(self.watched)
        self._begun = None


class Averager(Strategy):
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
        seed: int = 0,
        fused: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        super().__init__()
        self.scheme = spec.parse(scheme) if isinstance(scheme, str) else scheme
        self.by_name, self.seed, self.fused, self.scaler = by_name, seed, fused, scaler
        #: gradients on their way
        self._tickets: list[Ticket] = []
        #: whether compressors have begun a step
        self._in_step = False

    def _begin(self) -> None:
        chosen = self._choose()
        self._momentum = take_momentum(chosen, self.optimizer)
        self._undo.callback(self._momentum.restore, self.optimizer.param_groups)
        options: dict[str, Any] = {"rank": self.rank, "world": self.world, "seed": self.seed}
        self._made = {
            scheme: make(scheme, fused=self.fused, **options) for scheme in dict.fromkeys(chosen.values())
        }
        self.compressors = {name: self._made[scheme] for name, scheme in chosen.items()}
        # in float32, the mean of a mean is the mean
        self._means = Means(p for p in self.names if self._momentum.momentum or not self._plain(p))
        if self.scaler is None and self._keeps:
            self._hear_of_scaler()
        self._listen()
        self._undo.callback(self._gradients.remove)

    def _choose(self) -> dict[str, spec.Scheme]:
        """The scheme of each parameter."""
        if self.by_name is not None:
            return {name: self.by_name[name] for name, _ in self.parameters}
        return dict(assign(self.scheme, [(name, tuple(p.shape)) for name, p in self.parameters]))

    @abstractmethod
    def _listen(self) -> None:
        """Has gradients come here as they become ready."""

    @property
    def _keeps(self) -> bool:
        """Whether something of gradients is kept for later steps, in their units."""
        local = any(compressor.local_state for compressor in self._made.values())
        return local or self._momentum.momentum > 0

    @property
    @abstractmethod
    def _paused(self) -> bool:
        """Whether the pass that runs only adds up."""

    def _plain(self, parameter: nn.Parameter) -> bool:
        """Whether its gradient goes as it is."""
        return isinstance(self.compressors[self.names[parameter]].scheme, spec.Float32)

    # -- passes and steps ------------------------------------------------------------------------------

    def _before_adding(self, parameter: nn.Parameter) -> None:
        """Before a pass adds to the gradient of a watched parameter."""
        if self._paused:
            self._means.keep(parameter)
            return
        self._gradients.begin()
        self._begin_pass()
        self._set_apart(parameter, parameter.grad)

    def _set_apart(self, parameter: nn.Parameter, gradient: Tensor | None) -> bool:
        """Leaves in a gradient what is no mean yet; whether the pass had not come to it before."""
        if not self._means.untouched(parameter):
            return False
        mean = self._means.keep(parameter)
        if mean is not None and gradient is not None:
            gradient.sub_(mean)
        return True

    def _begin_pass(self) -> None:
        """Its gradients are added to those of this step, if these are still there, or begin a step.

        They are gone where the last pass was thrown away, or where a scaler has skipped its step: it lowers
        its scale then, and they are in other units.
        """
        if not self._means.begin():
            return
        if self._in_step and self._means.kept and self._first.loss_scale == self._scale():
            for compressor in self._made.values():
                compressor.next_pass()
        else:
            self._close(applied=False)
            self._open()

    def _open(self) -> None:
        self._in_step = True
        for compressor in self._made.values():
            compressor.begin_step(loss_scale=None if self.scaler is None else self._scale())

    def _close(self, applied: bool) -> None:
        if self._in_step:
            self._in_step = False
            for compressor in self._made.values():
                compressor.end_step(applied=applied or self.scaler is None)

    @property
    def _first(self) -> Compressor:
        """Any of the compressors: their steps begin and end together."""
        return next(iter(self._made.values()))

    def _scale(self) -> float:
        return float(self.scaler.get_scale()) if self.scaler is not None else 1.0

    def _submit(self, parameters: Iterable[nn.Parameter], job: Job, **options: Any) -> None:
        """Sends gradients of these parameters on their way."""
        names = [self.names[parameter] for parameter in parameters]
        title = names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"
        self._tickets.append(self.engine.submit(title, job, **options))

    def _wait(self) -> None:
        """Returns when all that was sent in the pass has come."""
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            ticket.wait()

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        result = self._plain_step(*args, **kwargs)
        self._close(applied=True)
        self._means.held.clear()
        return result

    def scaled_by(self, scaler: Any) -> None:
        """Says that losses are scaled, where nobody has said so: what compressors hold back is in the units
        of the loss.
        """
        if self.scaler is not None:
            return
        if self._momentum.velocity or any(compressor.state for compressor in self._made.values()):
            raise self._unknown_scale()
        self.scaler = scaler
        if self._in_step:
            self._open()

    def _scaled_step(self, *args: Any, **kwargs: Any) -> Any:
        raise self._unknown_scale()

    def _unknown_scale(self) -> SpecError:
        lossy = (scheme.name for scheme in self._made if not isinstance(scheme, spec.Float32))
        kinds = ", ".join(dict.fromkeys(lossy))
        return SpecError(
            f"{kinds} keeps part of the gradients for later steps and must know their scale; "
            "pass the scaler on: parallelize(..., scaler=scaler)"
        )

    # -- what is sent ----------------------------------------------------------------------------------

    def _mean(self, gradients: Tensors, plain: Tensor | None) -> Job:
        """The mean over ranks of gradients, in place where they are compressed; of the others, which lie in
        `plain` then, as views of it.
        """
        views = dict(_laid({p: g for p, g in gradients.items() if self._plain(p)}, plain))
        exchanges: list[Generator[Any, Any, None]] = []
        for parameter, gradient in gradients.items():
            if parameter not in views:
                self._decay(parameter, gradient)
                name = self.names[parameter]
                exchanges.append(self.compressors[name].exchange(name, gradient, gradient))
        if self.world > 1 or exchanges:
            yield from together(exchanges, plain)
        if plain is not None:
            plain.div_(self.world)
            if bool(torch.isfinite(plain).all()):  # else the step will be skipped
                self._accelerate(views)
        return views

    def _accelerate(self, views: Tensors) -> None:
        """Momentum that was taken over, of gradients that go as they are."""
        if not self._momentum.momentum:
            return
        for parameter, view in views.items():
            self._decay(parameter, view)
            more = self._first.passes > 0
            self._momentum.accelerate(self.names[parameter], view, self._scale(), more=more)

    def _decay(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Weight decay that was taken over; like momentum, it is of steps, not of passes."""
        if self._momentum.momentum and self._first.passes == 0:
            self._momentum.decay(parameter, gradient, self._scale())

    def wire_bytes(self) -> int:
        """What this rank contributes in a step, by the schemes' own count, without what is agreed on
        first.
        """
        return sum(self.compressors[name].wire_bytes(tuple(p.shape)) for name, p in self.parameters)

    # -- states ----------------------------------------------------------------------------------------

    def optimizer_state(self) -> State:
        state = super().optimizer_state()
        self._momentum.restore(state["param_groups"])
        return state

    def load_optimizer_state(self, state: State) -> None:
        super().load_optimizer_state(state)
        self._momentum.strip(self.optimizer.param_groups)

    def state_dict(self) -> State:
        held = {str(scheme): compressor.state_dict() for scheme, compressor in self._made.items()}
        return {**held, _VELOCITY: _copied(self._momentum.velocity)}

    def load_state_dict(self, state: State) -> None:
        for scheme, compressor in self._made.items():
            if str(scheme) in state:
                compressor.load_state_dict(state[str(scheme)])
        if self._momentum.momentum:
            self._momentum.velocity = _copied(state.get(_VELOCITY, {}))

    def reshard(self, states: Sequence[State]) -> State:
        """The state of this rank, from those of all ranks of a run of another size."""
        shared = {
            str(scheme): type(compressor).reshard(
                [state[str(scheme)] for state in states], rank=self.rank, world=self.world
            )
            for scheme, compressor in self._made.items()
            if str(scheme) in states[0]
        }
        return {**shared, _VELOCITY: states[0].get(_VELOCITY, {})}


def _laid(gradients: Tensors, plain: Tensor | None) -> Iterable[tuple[nn.Parameter, Tensor]]:
    """Gradients one behind another in `plain`, as views of it; none where there is no such memory."""
    if plain is None:
        return
    places = plain.split([gradient.numel() for gradient in gradients.values()])
    for (parameter, gradient), place in zip(gradients.items(), places, strict=True):
        view = place.view(gradient.shape)
        if view.data_ptr() != gradient.data_ptr():
            view.copy_(gradient)
        yield parameter, view


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
