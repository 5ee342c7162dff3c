"""Where things are in a captured step: which operators make a gradient and use a parameter, which blocks
there are, and where a pipeline cuts the model into chunks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.sim.cuts import backward_places, balanced, places
from paceline.spec.workload import Parameter, Segment, Workload

Array = NDArray[np.float64]
#: [first, last) operator
Range = tuple[int, int]
#: phases of segments that belong to the backward pass
BACKWARD = ("recompute", "backward")


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are gathered together: their bytes, and the operators between which they are needed."""

    bytes: int
    #: [first, last) operator of the forward pass, and of the backward pass, recomputation included
    forward: Range
    backward: Range


class Visit(NamedTuple):
    """One run of a block: its entries in the workload's order, forward, and backward with what runs again."""

    forward: list[int]
    backward: list[int]


@dataclass(frozen=True)
class Layout:
    """Where in the written-out step each parameter is used and its gradient ready, and which blocks there
    are.

    Operators carry the path of their module. Folded blocks repeat the operators of one of them: its n-th
    visit stands for the n-th sibling that has no operators of its own, and the backward pass visits them last
    to first.
    """

    workload: Workload

    @cached_property
    def entries(self) -> list[Segment]:
        """The segments that run, in order."""
        return [self.workload.segments[index] for index in self.workload.order]

    @cached_property
    def begins(self) -> NDArray[np.int64]:
        """The first operator of each entry; behind the last, how many there are."""
        return np.cumsum([0, *(len(entry.ops) for entry in self.entries)])

    @cached_property
    def update(self) -> int:
        """The first operator of the update."""
        phases = [entry.phase for entry in self.entries]
        return int(self.begins[phases.index("optimizer") if "optimizer" in phases else -1])

    @cached_property
    def back(self) -> NDArray[np.bool_]:
        """Of each operator, whether it belongs to the backward pass."""
        return np.repeat([entry.phase in BACKWARD for entry in self.entries], np.diff(self.begins))

    @cached_property
    def blocks(self) -> dict[str, list[Visit]]:
        """The visits of each block by its path; of what is in no block (""), one."""
        backward, out = self._by_path(BACKWARD), {}
        for path, entries in self._by_path(("forward",)).items():
            runs = [[entry] for entry in entries] if path else [entries]
            undone = np.array_split(backward[path], len(runs))[::-1]
            out[path] = [Visit(run, undo.tolist()) for run, undo in zip(runs, undone, strict=True)]
        return out

    @property
    def visits(self) -> list[Visit]:
        return [visit for visits in self.blocks.values() for visit in visits]

    def _by_path(self, phases: Sequence[str]) -> dict[str, list[int]]:
        """Entries of some phases by the path of their block."""
        out: dict[str, list[int]] = defaultdict(list)
        for number, entry in enumerate(self.entries):
            if entry.phase in phases and entry.ops:
                out[entry.path].append(number)
        return out

    @cached_property
    def _stands_for(self) -> dict[str, tuple[str, int]]:
        """Path of each block -> the block whose operators stand for it, and the number of the visit."""
        parents = dict.fromkeys(path.rpartition(".")[0] for path in self.blocks if path)
        return {child: found for parent in parents for child, found in self._siblings(parent)}

    def _siblings(self, parent: str) -> Iterator[tuple[str, tuple[str, int]]]:
        """The same of the children of one module: those with the same parameters are alike."""
        #: the block that was written out, and how many stand in for it
        alike: dict[str, tuple[str, int]] = {}
        for child, table in self._children(f"{parent}." if parent else "").items():
            key = str(sorted(table))
            written, count = (child, 0) if child in self.blocks else alike.get(key, ("", 0))
            if written and count < len(self.blocks[written]):
                yield child, (written, count)
                alike[key] = written, count + 1

    def _children(self, prefix: str) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
        """Modules below a prefix, with names and shapes of their parameters."""
        out: dict[str, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
        for parameter in self.workload.parameters:
            if parameter.name.startswith(prefix):
                child, _, name = parameter.name.removeprefix(prefix).partition(".")
                out[prefix + child].append((name, parameter.shape))
        return out

    def _find(self, name: str) -> tuple[str, int, str]:
        """The block, its visit and the module path within the captured operators, of a parameter."""
        module = name.rpartition(".")[0]
        parts = module.split(".")
        for block in (".".join(parts[:n]) for n in range(len(parts), 0, -1)):
            if block in self._stands_for:
                path, visit = self._stands_for[block]
                return path, visit, path + module[len(block) :]
        return "", 0, module

    @cached_property
    def _operators(self) -> list[dict[tuple[str, int], list[int]]]:
        """Operators of each segment by module."""
        return [_by_module(segment) for segment in self.workload.segments]

    def _visit(self, path: str, number: int) -> Visit:
        """A visit of a block; an empty one where it runs fewer times."""
        visits = self.blocks.get(path, [])
        return visits[number] if number < len(visits) else Visit([], [])

    def needed(self, parameter: Parameter) -> int:
        """Before which operator of the forward pass a parameter is needed."""
        return min(self._uses(parameter, back=False), default=0)

    def complete(self, parameter: Parameter, otherwise: int = 0) -> int:
        """After which operator of the backward pass a gradient is ready."""
        return max(self._uses(parameter, back=True), default=otherwise - 1) + 1

    def _uses(self, parameter: Parameter, back: bool) -> list[int]:
        """The operators of one pass that use a parameter."""
        path, number, module = self._find(parameter.name)
        entries, order = self._visit(path, number)[back], self.workload.order
        # what touches as many bytes; else anything of the module, or (where kernels were fused) of the one
        # around it
        for key in ((module, parameter.bytes), (module, 0), (module.rpartition(".")[0], 0)):
            places = ((entry, self._operators[order[entry]].get(key, ())) for entry in entries)
            found = [int(self.begins[entry]) + place for entry, inside in places for place in inside]
            if found:
                return found
        return []

    def ready(self) -> list[tuple[Parameter, int]]:
        """Trained parameters in the order in which their gradients become ready, each with the operator that
        may then start.
        """
        trained = [parameter for parameter in self.workload.parameters if parameter.ready >= 0]
        undone = [entry for visit in self.visits for entry in visit.backward]
        at, out = int(self.begins[min(undone, default=0)]), []
        for parameter in sorted(trained, key=lambda parameter: parameter.ready):
            at = self.complete(parameter, at)
            out.append((parameter, min(at, self.update)))
        return out

    @cached_property
    def units(self) -> list[Unit]:
        """The blocks in the order in which they run; first of all what is in none of them, needed from start
        to end.
        """
        inside: dict[tuple[str, int], int] = defaultdict(int)
        for parameter in self.workload.parameters:
            path, number, _ = self._find(parameter.name)
            inside[path, number] += parameter.bytes
        root, blocks = 0, []
        for (path, number), size in inside.items():
            forward, backward = map(self._span, self._visit(path, number))
            if path and forward and backward:
                blocks.append(Unit(size, forward, backward))
            else:
                root += size
        whole = (0, self.update)
        return [Unit(root, whole, whole), *sorted(blocks, key=lambda unit: unit.forward)]

    def _span(self, entries: Sequence[int]) -> Range | None:
        """The operators of some entries, from the first to the last."""
        return (int(self.begins[entries[0]]), int(self.begins[entries[-1] + 1])) if entries else None


def _by_module(segment: Segment) -> dict[tuple[str, int], list[int]]:
    """Operators of each module; and of those, with a size beside it, the ones that read or write so many
    bytes.
    """
    out: dict[tuple[str, int], list[int]] = defaultdict(list)
    for place, op in enumerate(segment.ops):
        out[op.module, 0].append(place)
        for access in op.writes if segment.phase != "forward" else op.reads:
            out[op.module, access.bytes].append(place)
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A part of the model, by the operators of its passes."""

    forward: Range
    backward: Range
    #: parts between places to cut at
    parts: int = 1
    #: bytes that pass on to the next chunk
    sends: float = 0.0

    def with_rest(self, size: int, blocks: Sequence[Unit]) -> list[Unit]:
        """What of its parameters, of so many bytes, is in none of its blocks; then these."""
        rest = max(0, size - sum(unit.bytes for unit in blocks))
        return [Unit(rest, self.forward, self.backward), *blocks]


def whole(layout: Layout) -> Chunk:
    """All of the model."""
    middle = int(layout.back.argmax()) if layout.back.any() else layout.update
    return Chunk(forward=(0, middle), backward=(middle, layout.update), parts=len(layout.units) - 1)


def cut(layout: Layout, issue: Array, device: Array, count: int) -> list[Chunk]:
    """So many chunks from first to last that take about as long as one another, forward and backward
    together, by the seconds of each operator on host and device.
    """
    found = places(layout.workload)
    fine = backward_places(layout.workload, [place.operator for place in found], layout.visits)
    passes, parts = np.flatnonzero(fine >= 0), len(found) + 1
    weights = [np.bincount(fine[passes], each[passes], parts) for each in (device, issue)]
    edges = pairwise([-1, *balanced(np.maximum(*weights), count - 1), len(found)])
    sends = [*(place.bytes for place in found), 0.0]
    return [
        Chunk(
            forward=_range((first < fine) & (fine <= last) & ~layout.back),
            backward=_range((first < fine) & (fine <= last) & layout.back),
            parts=last - first,
            sends=sends[last],
        )
        for first, last in edges
    ]


def _range(chosen: NDArray[np.bool_]) -> Range:
    """The operators from the first to the last that is chosen; chunks run in one piece."""
    where = np.flatnonzero(chosen)
    return (int(where[0]), int(where[-1]) + 1) if len(where) else (0, 0)
