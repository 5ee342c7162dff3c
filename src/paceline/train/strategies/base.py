"""What a strategy is: how the ranks of a data-parallel group keep one model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import RunError, SpecError
from paceline.train.comm import Collective, Engine, Job, Ticket
from paceline.train.hooks import Gradients, trained

#: what checkpoints hold: tensors and plain data
State = dict[str, Any]
#: by parameter, its gradient, its mean...
Tensors = Mapping[nn.Parameter, Tensor]
#: by which torch's GradScaler knows optimizers whose `step` it calls also where gradients overflowed
_HEARS = "_step_supports_amp_scaling"


@dataclass(slots=True, eq=False)
class _Held:
    """An optimizer in the hands of a strategy: whose, and its own methods by name."""

    by: Strategy | None
    plain: dict[str, Callable[..., Any]]


class Strategy(ABC):
    """Attached to one model and its optimizer; the user's loop stays as it is.

    After `optimizer.step()` parameters may still be on their way: the next forward pass waits for each where
    it is used, and so does whoever reads one (see `pending`).
    """

    name: ClassVar[str]
    #: where it comes from
    paper: ClassVar[str]
    #: whether the result is that of one process with the whole batch, up to the order of sums
    exact: ClassVar[bool] = True
    #: whether it sends with an engine of ours
    own_engine: ClassVar[bool] = True
    #: where it hears of gradients, if it does
    _gradients: Gradients

    def __init__(self) -> None:
        self._attached = False
        #: whether torch's GradScaler calls this strategy also where gradients overflowed
        self.hears_of_scaler = False
        self._engine: Engine | None = None
        #: buffers on their way
        self._buffers_ticket: Ticket | None = None
        #: what `detach` undoes, the last first
        self._undo = ExitStack()

    @property
    def engine(self) -> Engine:
        """What it sends with."""
        if self._engine is None:
            raise SpecError(f"{self.name!r} does not send with an engine of ours; there is none to look into")
        return self._engine

    def attach(
        self, model: nn.Module, optimizer: Optimizer, engine: Engine | None, *, alike: bool = False
    ) -> None:
        """Takes hold of a model: all ranks begin with the parameters and buffers of rank 0, which are sent
        round unless they are `alike` already.
        """
        if self._attached:
            raise RunError(f"this {self.name} strategy already serves a model; make another one")
        self._attached = True
        self.model, self.optimizer, self._engine = model, optimizer, engine
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.parameters = trained(model)
        self.names = {parameter: name for name, parameter in self.parameters}
        self.device = self.parameters[0][1].device
        self._refuse_strangers()
        if not alike:
            share_from_first(model)
        self._buffers = [b for b in model.buffers() if b.is_floating_point()]
        self._undo.callback(model.register_forward_pre_hook(self._before_forward).remove)
        self._undo.callback(model.register_state_dict_pre_hook(self._before_state_dict).remove)
        self._hold_optimizer()
        try:
            self._begin()
        except Exception:
            self._undo.close()
            raise

    def _refuse_strangers(self) -> None:
        """Raises where the optimizer trains a parameter that this strategy does not keep the same on all
        ranks.
        """
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        strangers = dict.fromkeys(p for p in held if p.requires_grad and p not in self.names)
        if not strangers:
            return
        for name, parameter in self.model.named_parameters():
            if parameter in strangers:
                raise RunError(
                    f"{name!r} needs a gradient now, but did not when the model was parallelized; call"
                    " paceline.train.close(model) and parallelize again"
                )
        shape = tuple(next(iter(strangers)).shape)
        raise SpecError(
            f"the optimizer trains a parameter of shape {shape} that is not the model's"
            " and would differ between ranks; put it into the module that is parallelized, or into an"
            " optimizer of its own"
        )

    def __deepcopy__(self, memo: Any) -> Strategy:
        """Hooks of a model go with its copies; these are not trained by the strategy."""
        return self

    def _hold_optimizer(self) -> None:
        """Steps of the optimizer, and calls for its state, come to this strategy from now on.

        The object stays, so that schedulers and scalers keep working.
        """
        held = getattr(self.optimizer, "_paceline", None)
        if held is None:
            held = _Held(self, {name: getattr(self.optimizer, name) for name in HELD})
            self.optimizer._paceline = held  # type: ignore[attr-defined]
            for name, call in HELD.items():
                setattr(self.optimizer, name, MethodType(call, self.optimizer))
        held.by = self
        self._undo.callback(self._let_optimizer_go)
        self._plain_step: Callable[..., Any] = held.plain["step"]
        self._plain_state: Callable[[], State] = held.plain["state_dict"]
        self._plain_load: Callable[[State], None] = held.plain["load_state_dict"]

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        """What `optimizer.step` does now, whoever calls it."""
        self._refuse_strangers()
        scaled = self.hears_of_scaler and getattr(self.optimizer, "found_inf", None) is not None
        return (self._scaled_step if scaled else self._step)(*args, **kwargs)

    @abstractmethod
    def _step(self, *args: Any, **kwargs: Any) -> Any:
        """A step, where the loss is not scaled."""

    def _hear_of_scaler(self) -> None:
        """Has torch's GradScaler call `optimizer.step` also where gradients overflowed: `_scaled_step` is
        what comes of it then.
        """
        self.hears_of_scaler = True
        self._heard_before = getattr(self.optimizer, _HEARS, None)
        setattr(self.optimizer, _HEARS, True)
        if self._heard_before is None:
            self._undo.callback(delattr, self.optimizer, _HEARS)
        else:
            self._undo.callback(setattr, self.optimizer, _HEARS, self._heard_before)

    def _scaled_step(self, *args: Any, **kwargs: Any) -> Any:
        """What `optimizer.step` does where torch's GradScaler calls it, of those who hear of that."""
        return self._step(*args, **kwargs)

    def _plain_scaled_step(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own step for those who hear of the scaler: unscaled, and left out where gradients
        overflowed.
        """
        if self._heard_before:  # it does so by itself
            return self._plain_step(*args, **kwargs)
        told = {name: self.optimizer.__dict__.pop(name) for name in ("found_inf", "grad_scale")}
        try:
            if told["grad_scale"] is not None:
                for group in self.optimizer.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            parameter.grad.div_(told["grad_scale"].to(parameter.grad.device))
            return None if bool(told["found_inf"]) else self._plain_step(*args, **kwargs)
        finally:
            self.optimizer.__dict__.update(told)  # the scaler takes them away

    def _begin(self) -> None:  # noqa: B027
        """Registers what the strategy needs."""

    def synchronize(self) -> None:  # noqa: B027
        """Returns when all parameters are what the last step made them; all ranks call it together."""

    def finish(self) -> None:
        """Before the end: also brings what was put off into the model. All ranks call it."""
        self.synchronize()

    def _arrive(self) -> None:
        """Returns when what is on its way here is there; no other rank needs to call it."""
        self.synchronize()

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients of backward passes within add up locally; the next one outside brings them together."""
        return nullcontext()

    def scaled_by(self, scaler: Any) -> None:  # noqa: B027
        """Says that losses were multiplied by the scale of a `paceline.train.Scaler`, before the step."""

    def skipped(self) -> None:  # noqa: B027
        """Says that this rank leaves a step out, since its gradients overflowed."""

    def detach(self) -> None:
        """Lets go of the model and the optimizer, which work as before; what is on its way is not
        waited for.
        """
        self._undo.close()

    def _let_optimizer_go(self) -> None:
        held = self.optimizer._paceline  # type: ignore[attr-defined]
        if held.by is self:
            held.by = None

    def state_dict(self) -> State:
        """What the strategy itself remembers between steps (not the optimizer's state)."""
        return {}

    def load_state_dict(self, state: State) -> None:  # noqa: B027
        """Takes up where `state_dict` stopped."""

    def optimizer_state(self) -> State:
        """The optimizer's state as if one process had it all; all ranks take part."""
        return self._plain_state()

    def asked_state(self) -> State:
        """What `optimizer.state_dict()` gives: the same, on any rank that asks, with the others or alone."""
        return self.optimizer_state()

    def load_optimizer_state(self, state: State) -> None:
        """Takes what `optimizer_state`, or the optimizer itself, once gave; of any world size."""
        self._plain_load(state)

    # -- buffers (running statistics of batch normalisation) -----------------------------------------

    def _average_buffers(self) -> None:
        """Sends running statistics on their way; each rank saw other samples."""
        if self._buffers and self.world > 1:
            self._buffers_ticket = self.engine.submit("buffers", average(self._buffers, self.world))

    def _average_gradients(self, name: str) -> None:
        """Brings gradients together after a pass, all in one."""
        gradients = []
        for parameter in self.names:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        self.engine.submit(name, average(gradients, self.world)).wait()

    def _before_forward(self, *_: Any) -> None:
        gradients = getattr(self, "_gradients", None)
        if gradients is not None and gradients.broken and torch.is_grad_enabled():
            raise RunError(
                f"rank {self.rank} of {self.world}: the last backward pass did not come to its end, so that"
                " ranks may have sent different gradients; call paceline.train.close(model), load a"
                " checkpoint and parallelize again"
            )
        if self._buffers_ticket is not None:
            self._buffers_ticket.wait()
            self._buffers_ticket = None

    def _before_state_dict(self, *_: Any) -> None:
        self._arrive()
        self._before_forward()


def _handed_on(name: str, method: str) -> Callable[..., Any]:
    """A method of an optimizer that calls one of the strategy which holds it; its own, where none does."""

    def call(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        held = optimizer._paceline
        known = held.plain[name] if held.by is None else getattr(held.by, method)
        return known(*args, **kwargs)

    return call


#: methods of an optimizer that a strategy takes over, and what stands in their place on the instance
HELD: dict[str, Callable[..., Any]] = {
    "step": _handed_on("step", "_called"),
    "state_dict": _handed_on("state_dict", "asked_state"),
    "load_state_dict": _handed_on("load_state_dict", "load_optimizer_state"),
}


def average(tensors: list[Tensor], world: int) -> Job:
    """A job: each tensor becomes its mean over ranks; one message per dtype."""
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        members = [t for t in tensors if t.dtype == dtype]
        joined = torch.cat([t.detach().reshape(-1) for t in members])
        yield Collective("sum", [joined])
        joined /= world
        for tensor, mean in zip(members, joined.split([t.numel() for t in members]), strict=True):
            tensor.detach().copy_(mean.view(tensor.shape))


def share_from_first(model: nn.Module) -> None:
    """All ranks take the parameters and buffers of rank 0."""
    if dist.get_world_size() > 1:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), src=0)
