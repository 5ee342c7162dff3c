"""Where strategies take hold of a model: gradients as they become ready, parameters as they are used."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from paceline.errors import RunError
from paceline.train._torch import after_backward, in_backward, within_node

Key = TypeVar("Key", bound=Hashable)


class Sequencer(Generic[Key]):
    """Lets things go in one fixed order, however they become ready: the same order on all ranks."""

    def __init__(self, order: Sequence[Key]) -> None:
        self.order = tuple(order)
        self._ready: set[Key] = set()
        self._next = 0

    def ready(self, key: Key) -> Iterator[Key]:
        """Marks one as ready; yields those that may go now."""
        self._ready.add(key)
        while self._next < len(self.order) and self.order[self._next] in self._ready:
            self._next += 1
            yield self.order[self._next - 1]

    def flush(self) -> Iterator[Key]:
        """Yields those that have not gone, ready or not, and starts over."""
        rest = self.order[self._next :]
        self._next = 0
        self._ready.clear()
        yield from rest


class Gradients:
    """Calls `ready(parameter)` as back-propagation completes each gradient, and `done()` when it is through.

    `before(parameter)` is called for parameters that are `watched`, before a pass adds to their `grad`, also
    where it is paused.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        ready: Callable[[nn.Parameter], None],
        done: Callable[[], None],
        *,
        watched: Iterable[nn.Parameter] = (),
        before: Callable[[nn.Parameter], None] | None = None,
    ) -> None:
        self.enabled = True
        self._running = False
        self._ready, self._done = ready, done
        self._handles = [p.register_post_accumulate_grad_hook(self._hook) for p in parameters]
        #: where torch adds gradients up: a parameter itself does not keep its place
        self._places: list[Any] = []
        if before is not None:
            self._watch(watched, before)

    def _watch(self, parameters: Iterable[nn.Parameter], before: Callable[[nn.Parameter], None]) -> None:
        for parameter in parameters:
            place = get_gradient_edge(parameter).node

            def call(_: Any, told: nn.Parameter = parameter) -> None:
                before(told)

            self._places.append(place)
            self._handles.append(place.register_prehook(call))

    def begin(self) -> None:
        """Says that a backward pass runs; for those who see one without a gradient of a parameter."""
        if not self._running:
            self._running = True
            after_backward(self._end)

    def _hook(self, parameter: Tensor) -> None:
        if self.enabled:
            self.begin()
            self._ready(parameter)  # type: ignore[arg-type]

    def _end(self) -> None:
        if within_node():
            raise RunError(
                "the backward pass ended within another one, before all gradients were ready; checkpoint"
                " activations with use_reentrant=False (recompute= of a plan does)"
            )
        self._running = False
        self._done()

    @property
    def broken(self) -> bool:
        """Whether a backward pass has begun that was never completed: something in it raised an error."""
        return self._running and not in_backward()

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backward passes within only add up, as in `no_sync` of DDP."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before


class Uses:
    """Which module first uses which parameter, as the passes show it that are watched; then,
    `needed(parameters)` before that module runs.

    A module's own parameters are awaited before it runs, and so are those that it was seen to use of others
    (tied weights, attention that reads its projection's weight). Where a module's parts run but not the
    module itself (a method other than `forward` calls them), nothing tells when its own parameters are used:
    `outside` are those.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Iterable[nn.Parameter],
        needed: Callable[[Iterable[nn.Parameter]], None],
    ) -> None:
        self._known = {id(p): p for p in parameters}
        self._needed = needed
        self._stack: list[nn.Module] = []
        self.by_module: dict[nn.Module, dict[int, nn.Parameter]] = {
            module: {id(p): p for p in module.parameters(recurse=False) if id(p) in self._known}
            for module in model.modules()
        }
        #: parameters in the order of their first use, as far as seen
        self.order: list[nn.Parameter] = []
        #: rows of the input in each call of a module that was watched; 0 where it has none
        self.calls: dict[nn.Module, list[int]] = {}
        self._mode: _Watch | None = None
        self._model = model
        self._handles = [
            h
            for module in model.modules()
            for h in (
                module.register_forward_pre_hook(self._enter),
                module.register_forward_hook(self._leave, always_call=True),
            )
        ]

    def watch(self) -> None:
        """Look at forward passes closely, until `seen`."""
        self._mode = _Watch(self._used)

    def seen(self) -> None:
        """Enough has been looked at."""
        self._mode = None

    def outside(self) -> list[str]:
        """Names of parameters whose use could not be seen."""
        bypassed = [
            module
            for module, own in self.by_module.items()
            if own and module not in self.calls and any(part in self.calls for part in module.modules())
        ]
        found = {id(p) for module in bypassed for p in module.parameters(recurse=False)}
        return [name for name, p in self._model.named_parameters() if id(p) in found & self._known.keys()]

    def reads(self) -> dict[str, tuple[str, ...]]:
        """By names: modules that were seen to use parameters which are not their own, and these."""
        names = {id(p): name for name, p in self._model.named_parameters()}
        own = {module: {id(p) for p in module.parameters(recurse=False)} for module in self.by_module}
        found = {
            name: tuple(names[key] for key in self.by_module[module] if key not in own[module])
            for name, module in self._model.named_modules()
        }
        return {name: read for name, read in found.items() if read}

    def know(self, reads: Mapping[str, Sequence[str]]) -> None:
        """What `reads` once said, in place of a pass that is looked at."""
        self.seen()
        parameters, modules = dict(self._model.named_parameters()), dict(self._model.named_modules())
        for name, read in reads.items():
            self.by_module[modules[name]].update({id(parameters[one]): parameters[one] for one in read})

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        wanted = self.by_module.get(module)
        if wanted is None:  # of a copy of the model, which has a copy of the hook
            return
        if self._mode is not None and torch.is_grad_enabled():
            if not self._stack:
                self._mode.__enter__()  # type: ignore[no-untyped-call]
            self._stack.append(module)
            self.calls.setdefault(module, []).append(_rows(inputs))
        if wanted:
            self._needed(wanted.values())

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        if self._stack and self._stack[-1] is module:
            self._stack.pop()
            if not self._stack and self._mode is not None:
                self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _used(self, tensor: Tensor) -> None:
        parameter = self._known.get(id(tensor))
        if parameter is not None and self._stack:
            if all(parameter is not p for p in self.order):
                self.order.append(parameter)
            self.by_module[self._stack[-1]][id(parameter)] = parameter

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()


def _rows(inputs: tuple[Any, ...]) -> int:
    """Vectors in the first input, if that is a tensor."""
    found = inputs[0] if inputs else None
    return found.shape[:-1].numel() if isinstance(found, Tensor) and found.dim() else 0


class _Watch(TorchFunctionMode):
    """Sees every tensor that a function of torch is given."""

    def __init__(self, used: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._used = used

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument in (*args, *(kwargs or {}).values()):
            if isinstance(argument, Tensor):
                self._used(argument)
            elif isinstance(argument, (list, tuple)):
                for inner in argument:
                    if isinstance(inner, Tensor):
                        self._used(inner)
        return func(*args, **(kwargs or {}))


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's module: DDP wraps it."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters that get gradients, by name, each once, in the order in which the model lists them."""
    return [(name, p) for name, p in unwrapped(model).named_parameters() if p.requires_grad]
