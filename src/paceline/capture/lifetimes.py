"""Lifetimes of every storage of a step, and the chain of modules that its forward pass is, from the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.capture import traced
from paceline.capture.assemble import memory_kinds
from paceline.capture.record import LogEntry, ModuleEdge
from paceline.errors import CaptureError
from paceline.spec.step_memory import ModuleUnit, StepMemory, TensorLife


def step_memory(model: Any, **options: Any) -> StepMemory:
    """Capture one step of a model block by block, and say what lives when; `options` are those of
    `capture`.
    """
    step = traced(model, **{**options, "fold": False})
    events, backward = step.recorder.events, step.backward_start
    forward = sum(event.op is not None for event in events[:backward])
    operators = sum(event.op is not None for event in events)
    units = list(_units(_calls(events[:backward], forward), forward))
    return StepMemory(
        workload=step.workload,
        lives=tuple(_lives(events, backward, operators)),
        units=tuple(units),
        forward=forward,
        operators=operators,
    )


def _lives(events: Sequence[LogEntry], backward: int, operators: int) -> Iterator[TensorLife]:
    kinds = memory_kinds(list(events), backward)
    modules = _makers(events)
    born: dict[int, int] = {}
    ended: dict[int, int] = {}
    used: dict[int, int] = {}
    ran = 0
    for position, event in enumerate(events):
        if event.op is not None:
            ran += 1
            if position < backward:
                used |= {access.tensor: ran for access in (*event.op.reads, *event.op.writes)}
        elif event.what == "alloc":
            born[event.tensor] = ran
        elif event.what == "free":
            ended[event.tensor] = ran
    for tensor, start in born.items():
        kind, size = kinds[tensor]
        yield TensorLife(
            tensor=tensor,
            bytes=size,
            kind=kind,
            module=modules.get(tensor, ""),
            start=start,
            end=ended.get(tensor, operators),
            used=used.get(tensor, start),
        )


def _makers(events: Sequence[LogEntry]) -> dict[int, str]:
    """The module of each allocated storage: that of the operator that is logged next."""
    found: dict[int, str] = {}
    module = ""
    for event in reversed(events):
        if event.op is not None:
            module = event.op.module
        elif event.what == "alloc":
            found[event.tensor] = module
    return found


# -- the chain of modules --------------------------------------------------------------------------


@dataclass(slots=True)
class _Call:
    """A call of a module: operators from `start` to `end`, what it was given and returned, calls within."""

    path: str
    start: int
    given: tuple[Any, ...] | None
    end: int = 0
    returned: tuple[Any, ...] | None = None
    rest: tuple[Any, ...] = ()
    mutates: bool = False
    inner: list[_Call] = field(default_factory=list)

    @property
    def pure(self) -> bool:
        """All its operators are those of modules within."""
        return bool(self.inner) and sum(call.end - call.start for call in self.inner) == self.end - self.start

    def repeats(self) -> bool:
        """Modules within it, in any depth, are members of one list of composite modules."""
        lists = Counter(call.path.rpartition(".")[0] for call in self.walk() if call.inner and _member(call))
        return any(count > 1 for count in lists.values())

    def walk(self) -> Iterator[_Call]:
        """Calls within it, in any depth."""
        for call in self.inner:
            yield call
            yield from call.walk()


def _member(call: _Call) -> bool:
    """Whether a module is a numbered member of a list or sequence."""
    return call.path.rpartition(".")[2].isdigit()


def _calls(events: Sequence[LogEntry], operators: int) -> _Call:
    """The call of the whole module with those within."""
    outside = _Call("", 0, None)
    open_calls = [outside]
    ran = 0
    for event in events:
        ran += event.op is not None
        edge = event.data
        if event.what == "module" and isinstance(edge, ModuleEdge):
            call = _Call(edge.path, ran, edge.given)
            open_calls[-1].inner.append(call)
            open_calls.append(call)
        elif event.what == "left" and isinstance(edge, ModuleEdge):
            call = open_calls.pop()
            call.end, call.returned, call.rest = ran, edge.returned, edge.rest
            call.mutates = edge.given != call.given
    outside.end = operators
    if not outside.inner:
        raise CaptureError("the model calls no module, so that there is nothing to recompute")
    return outside


def _units(outside: _Call, operators: int) -> Iterator[ModuleUnit]:
    counts = Counter(call.path for call in outside.walk())
    previous: _Call | None = None
    done = 0
    for call in _expanded(outside, root=True):
        if call.start > done:
            yield _between(done, call.start)
            previous = None
        linked = (
            previous is not None
            and call.given is not None
            and call.given == previous.returned
            and call.rest == previous.rest
        )
        yield ModuleUnit(
            path=call.path,
            start=call.start,
            end=call.end,
            spannable=counts[call.path] == 1 and bool(call.path),
            follows=linked,
            mutates=call.mutates,
            composite=bool(call.inner),
            output=call.returned[0] if call.returned is not None else None,
        )
        done, previous = call.end, call
    if operators > done:
        yield _between(done, operators)


def _between(start: int, end: int) -> ModuleUnit:
    """Operators outside of modules that can be checkpoints."""
    return ModuleUnit(
        path="",
        start=start,
        end=end,
        spannable=False,
        follows=False,
        mutates=False,
        composite=False,
        output=None,
    )


def _expanded(call: _Call, root: bool = False) -> Iterator[_Call]:
    """Calls within that are units: containers, and modules round a list of blocks, are taken apart."""
    for inner in call.inner:
        apart = inner.pure or (not _member(inner) and inner.repeats()) or (root and len(call.inner) <= 2)
        if apart and inner.inner:
            yield from _expanded(inner)
        else:
            yield inner
