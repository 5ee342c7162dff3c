"""Makes a module follow a recomputation policy: what `paceline.train` runs, and what a capture predicts from.

Each span is a checkpoint of torch's (non-reentrant): within it nothing is kept but what enters it, and its
modules run again when the backward pass asks for what they saved. Gradients have the same bits: random
generators and autocast are as in the first run, and normalisation layers update their statistics once.
Spans may lie within one another: the inner ones are checkpoints of the outer one's second run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from paceline.capture import _torch
from paceline.capture.host_store import HostStore
from paceline.errors import PlanError, nearest
from paceline.spec.recomputation import KEEPABLE, RecomputePolicy

Context = AbstractContextManager[Any]
#: buffers in which normalisation layers keep statistics
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanSettings:
    """How spans run: contexts round the first and the second run (given what the span keeps), and whether
    torch keeps random states and compares the two runs; a capture needs neither.
    """

    around: Callable[[Sequence[str]], tuple[Context, Context]] | None = None
    exact: bool = True

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of torch's checkpoint that say so."""
        check = "default" if self.exact else "none"
        return {"preserve_rng_state": self.exact, "determinism_check": check}


USUAL = SpanSettings()


def apply(model: nn.Module, policy: RecomputePolicy, settings: SpanSettings = USUAL) -> HostStore:
    """Makes the model follow the policy; it is changed in place. The store counts what is offloaded."""
    modules = dict(model.named_modules())
    spans = [([_module(modules, path) for path in span.modules], span.keep) for span in policy.spans]
    checkpoints(model, spans, settings)
    store = HostStore()
    for path in policy.offload:
        _offload(_module(modules, path), store)
    return store


def checkpoints(
    model: nn.Module,
    spans: Sequence[tuple[Sequence[nn.Module], Sequence[str]]],
    settings: SpanSettings = USUAL,
) -> None:
    """Makes spans of modules of a model, each with the kinds of operators that it keeps, checkpoints."""
    shared = _Shared()
    # the innermost first, so that the outer ones open before and close after them
    for members, keep in sorted(spans, key=lambda span: _size(span[0])):
        if len(members) == 1:
            _alone(members[0], keep, settings)
        else:
            ChainedSpan(members=tuple(members), keep=tuple(keep), settings=settings, shared=shared).attach()
    if any(len(members) > 1 for members, _ in spans):
        model.register_forward_hook(lambda *_: shared.abandon(0), always_call=True)


def _module(modules: Mapping[str, nn.Module], path: str) -> nn.Module:
    if path in modules:
        return modules[path]
    close = nearest(path, modules, 1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise PlanError(f"the recomputation policy names {path!r}, which the model does not have{hint}")


def _size(members: Sequence[nn.Module]) -> int:
    return sum(1 for member in members for _ in member.modules())


def _alone(module: nn.Module, keep: Sequence[str], settings: SpanSettings) -> None:
    """A span of one module: its forward method becomes a checkpoint."""
    inner = module.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return checkpoint(
            inner,
            *args,
            use_reentrant=False,
            context_fn=lambda: _contexts((self,), keep, settings),
            **settings.options,
            **kwargs,
        )

    module.forward = MethodType(forward, module)


# -- modules that run one after the other ----------------------------------------------------------


@dataclass(slots=True)
class _OpenSpan:
    """A span between its first module and its last one, with torch's checkpoint that is under way."""

    owner: ChainedSpan
    checkpoint: Any


@dataclass(slots=True)
class _Shared:
    """What the chained spans of a model know of each other."""

    #: spans between their first and their last module, the innermost last
    running: list[_OpenSpan] = field(default_factory=list)
    #: spans in their second run
    again: list[ChainedSpan] = field(default_factory=list)

    def abandon(self, depth: int) -> None:
        """Ends spans that were begun beyond a depth and that an exception left open."""
        while len(self.running) > depth:
            self.running.pop().checkpoint.close()


@dataclass(slots=True, kw_only=True, eq=False)
class ChainedSpan:
    """Several modules as one checkpoint, wherever the code that calls them one after the other stands.

    The checkpoint begins before the first and ends after the last; the modules run as always. For the second
    run they are called in a row, each with the result of the one before it in place of its first argument.
    """

    members: tuple[nn.Module, ...]
    keep: tuple[str, ...]
    settings: SpanSettings
    shared: _Shared
    #: the storage, shape and version of what the last member returned
    _passed_on: tuple[Any, ...] | None = field(default=None, repr=False)
    #: what else the first member was called with, and the others have to be
    _rest: tuple[Any, ...] = field(default=(), repr=False)

    def attach(self) -> None:
        """Hooks on the members."""
        first, last = self.members[0], self.members[-1]
        first.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True)
        for member in self.members[1:]:
            member.register_forward_pre_hook(self._follow, prepend=True, with_kwargs=True)
        for member in self.members[:-1]:
            member.register_forward_hook(self._note)
        last.register_forward_hook(self._end)

    @property
    def _active(self) -> bool:
        # in its own second run, and in that of a span within it, it is no checkpoint
        covered = self.shared.again and set(self.shared.again[-1].members) <= set(self.members)
        return not covered and torch.is_grad_enabled()

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._active:
            return
        begun = _torch.checkpoint_begun(
            self._run_again,
            lambda: _contexts(self.members, self.keep, self.settings),
            self.settings.options,
            args,
            kwargs,
        )
        self.shared.running.append(_OpenSpan(self, begun))
        self._rest = _identities(args[1:], kwargs)

    def _note(self, _: nn.Module, __: Any, output: Any) -> None:
        if self._active:
            self._passed_on = _identity(output)

    def _follow(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._active:
            return
        direct = args and self._passed_on is not None and _identity(args[0]) == self._passed_on
        if not direct or _identities(args[1:], kwargs) != self._rest:
            raise PlanError(
                "a recomputation policy takes modules together that do not run one directly after the other,"
                f" with the same other arguments: {self._names()}; make the policy again, for this model as"
                " it is"
            )

    def _end(self, *_: Any) -> None:
        if not self._active:
            return
        opened = self.shared.running.pop() if self.shared.running else None
        if opened is None or opened.owner is not self:
            raise PlanError(
                f"modules of a recomputation policy ran in another order: {self._names()}; make the policy"
                " again, for this model as it is"
            )
        next(opened.checkpoint, None)

    def _names(self) -> str:
        return ", ".join(type(member).__name__ for member in self.members)

    def _run_again(self, x: Any, *args: Any, **kwargs: Any) -> None:
        depth = len(self.shared.running)
        self.shared.again.append(self)
        try:
            for member in self.members:
                x = member(x, *args, **kwargs)
        finally:
            self.shared.again.remove(self)
            # torch ends a second run by an exception as soon as all that was asked for is there
            self.shared.abandon(depth)


def _identity(value: Any) -> tuple[Any, ...] | None:
    """Equal for two tensors that are the same values in the same place, whatever object holds them."""
    if not isinstance(value, torch.Tensor):
        return None
    return _torch.storage_key(value), tuple(value.shape), value._version


def _identities(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The same of other arguments; what is no tensor is compared as it is, or as the object that it is."""
    values = (*args, *(value for _, value in sorted(kwargs.items())))
    plain = (int, float, str, bool, type(None))
    found = []
    for value in values:
        known = _identity(value)
        found.append(known or (value if isinstance(value, plain) else id(value)))
    return (*found, *sorted(kwargs))


# -- what runs round a span ------------------------------------------------------------------------


def _contexts(
    members: Sequence[nn.Module], keep: Sequence[str], settings: SpanSettings
) -> tuple[Context, Context]:
    """Contexts of the first and of the second run of a span."""
    first: list[Context] = [_BuffersUnchanged(members)]
    # copies of statistics are made outside the mode that hands out kept results
    again: list[Context] = [_StatisticsKept(members)]
    if settings.around is not None:
        outer = settings.around(keep)
        first.append(outer[0])
        again.insert(0, outer[1])
    if keep:
        selective = create_selective_checkpoint_contexts(_policy(keep))
        first.append(selective[0])
        again.append(selective[1])
    return _Together(first), _Together(again)


def _policy(keep: Sequence[str]) -> Callable[..., CheckpointPolicy]:
    kept = frozenset(name for kind in keep for name in KEEPABLE[kind])

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = op._schema.name.partition("::")[2]
        return CheckpointPolicy.MUST_SAVE if name in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


class _Together:
    """Several contexts as one, which may be entered again."""

    def __init__(self, parts: Sequence[Context]) -> None:
        self._parts = parts
        self._stack = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part)
            self._stack = stack.pop_all()

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)


def _statistics(members: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    for member in members:
        for module in member.modules():
            if module.training and module._buffers.get("running_mean") is not None:
                yield from ((module, name) for name in _STATISTICS if module._buffers.get(name) is not None)


class _StatisticsKept:
    """Within it, normalisation layers update copies of their statistics: the first run has updated them."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        self._members = members
        self._before: list[tuple[nn.Module, str, torch.Tensor]] = []

    def __enter__(self) -> None:
        for module, name in _statistics(self._members):
            buffer = module._buffers[name]
            assert buffer is not None
            self._before.append((module, name, buffer))
            module._buffers[name] = buffer.clone()

    def __exit__(self, *_: Any) -> None:
        for module, name, buffer in self._before:
            module._buffers[name] = buffer
        self._before.clear()


class _BuffersUnchanged:
    """Refuses modules that change buffers which a second run would read, such as vectors of power iterations:
    it would compute something else.
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        known = set(_statistics(members))
        self._watched = [
            (module, name, buffer, buffer._version)
            for member in members
            for module in member.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and (module, name) not in known
        ]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None:
            return
        for module, name, buffer, version in self._watched:
            if module._buffers.get(name) is not buffer or buffer._version != version:
                raise PlanError(
                    f"{type(module).__name__} changes its buffer {name!r} as it runs, so that a second run"
                    " would compute something else; leave it out of the recomputation policy"
                )


# -- offload ---------------------------------------------------------------------------------------


def _offload(module: nn.Module, store: HostStore) -> None:
    """Sends what a module saves for its backward pass to host memory."""
    inner = module.forward

    def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        with store.saving():
            return inner(*args, **kwargs)

    module.forward = MethodType(forward, module)
