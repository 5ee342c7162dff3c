"""Where things are in a captured step: which operators make a gradient and use a parameter, which blocks
there are, and where a pipeline cuts the model into chunks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
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


class Unit(NamedTuple):
    """Parameters that are gathered together: their bytes, and the operators between which they are needed."""

    bytes: int
    #: of the forward pass, and of the backward pass, recomputation included
    forward: Range
    backward: Range


class Visit(NamedTuple):
    """One run of a block: its entries in the workload's order, forward, and backward with what runs again."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


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
    def begins(self) -> list[int]:
        """The first operator of each entry; behind the last, how many there are."""
        return list(accumulate((len(entry.ops) for entry in self.entries), initial=0))

    @cached_property
    def update(self) -> int:
        """The first operator of the update."""
        phases = [entry.phase for entry in self.entries]
        return self.begins[phases.index("optimizer") if "optimizer" in phases else -1]

    @cached_property
    def back(self) -> NDArray[np.bool_]:
        """Of each operator, whether it belongs to the backward pass."""
        return np.repeat([entry.phase in BACKWARD for entry in self.entries], np.diff(self.begins))

    @cached_property
    def blocks(self) -> dict[str, list[Visit]]:
        """The visits of each block by its path; of what is in no block (""), one."""
        done: dict[str, list[int]] = defaultdict(list)
        undone: dict[str, list[int]] = defaultdict(list)
        for number, entry in enumerate(self.entries):
            if entry.ops and entry.phase != "optimizer":
                (undone if entry.phase in BACKWARD else done)[entry.path].append(number)
        out = {"": [Visit(tuple(done.pop("", ())), tuple(undone[""]))]}
        for path, entries in done.items():
            backward = np.array_split(undone[path], len(entries))[::-1]
            out[path] = [Visit((n,), tuple(undo.tolist())) for n, undo in zip(entries, backward, strict=True)]
        return out

    @property
    def visits(self) -> list[Visit]:
        return [visit for visits in self.blocks.values() for visit in visits]

    @cached_property
    def _stands_for(self) -> dict[str, tuple[str, Visit]]:
        """Path of each block -> the block whose operators stand for it, and the visit; siblings with the same
        parameters are alike.
        """
        out = {"": ("", self.blocks[""][0])}
        for parent in dict.fromkeys(path.rpartition(".")[0] for path in self.blocks if path):
            #: by parameters, the block that was written out, and visits that stand for none yet
            alike: dict[str, tuple[str, list[Visit]]] = {}
            for child, table in self._children(f"{parent}." if parent else "").items():
                key = str(sorted(table))
                if child in self.blocks:
                    alike[key] = child, list(self.blocks[child])
                written, visits = alike.get(key, ("", []))
                if visits:
                    out[child] = written, visits.pop(0)
        return out

    def _children(self, prefix: str) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
        """Modules below a prefix, with names and shapes of their parameters."""
        out: dict[str, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
        for parameter in self.workload.parameters:
            if parameter.name.startswith(prefix):
                child, _, name = parameter.name.removeprefix(prefix).partition(".")
                out[prefix + child].append((name, parameter.shape))
        return out

    def _find(self, parameter: Parameter) -> tuple[Visit, str]:
        """The visit of a parameter's block, and its module's path within the captured operators."""
        block = module = parameter.name.rpartition(".")[0]
        while block not in self._stands_for:
            block = block.rpartition(".")[0]
        path, visit = self._stands_for[block]
        return visit, path + module[len(block) :]

    @cached_property
    def _operators(self) -> list[dict[tuple[str, int], list[int]]]:
        """Operators of each segment by module."""
        return [_by_module(segment) for segment in self.workload.segments]

    def needed(self, parameter: Parameter) -> int:
        """Before which operator of the forward pass a parameter is needed."""
        return min(self._uses(parameter, back=False), default=0)

    def complete(self, parameter: Parameter, otherwise: int = 0) -> int:
        """After which operator of the backward pass a gradient is ready."""
        return max(self._uses(parameter, back=True), default=otherwise - 1) + 1

    def _uses(self, parameter: Parameter, back: bool) -> list[int]:
        """The operators of one pass that use a parameter."""
        visit, module = self._find(parameter)
        inside = [(self.begins[n], self._operators[self.workload.order[n]]) for n in visit[back]]
        # what touches as many bytes; else anything of the module, or (where kernels were fused) of the one
        # around it
        for key in ((module, parameter.bytes), (module, 0), (module.rpartition(".")[0], 0)):
            found = [begin + place for begin, operators in inside for place in operators.get(key, ())]
            if found:
                return found
        return []

    def ready(self) -> list[tuple[Parameter, int]]:
        """Trained parameters in the order in which their gradients become ready, each with the operator that
        may then start.
        """
        trained = [parameter for parameter in self.workload.parameters if parameter.ready >= 0]
        at, out = int(self.back.argmax()), []
        for parameter in sorted(trained, key=lambda parameter: parameter.ready):
            at = self.complete(parameter, at)
            out.append((parameter, min(at, self.update)))
        return out

    @cached_property
    def units(self) -> list[Unit]:
        """The blocks in the order in which they run."""
        inside: dict[Visit, int] = defaultdict(int)
        for parameter in self.workload.parameters:
            inside[self._find(parameter)[0]] += parameter.bytes
        inside.pop(self.blocks[""][0], None)
        units = [Unit(size, *map(self._span, visit)) for visit, size in inside.items() if all(visit)]
        return sorted(units, key=lambda unit: unit.forward)

    def _span(self, entries: Sequence[int]) -> Range:
        """The operators of some entries, from the first to the last."""
        return self.begins[entries[0]], self.begins[entries[-1] + 1]


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


def whole(layout: Layout) -> Chunk:
    """All of the model."""
    middle = int(layout.back.argmax()) if layout.back.any() else layout.update
    return Chunk(forward=(0, middle), backward=(middle, layout.update), parts=len(layout.units))


def cut(layout: Layout, issue: Array, device: Array, count: int) -> list[Chunk]:
    """So many chunks from first to last that take about as long as one another, forward and backward
    together, by the seconds of each operator on host and device.
    """
    found, out = places(layout.workload), list[Chunk]()
    fine = backward_places(layout.workload, [place.operator for place in found], layout.visits)
    passes = fine >= 0
    weights = [np.bincount(fine[passes], each[passes], len(found) + 1) for each in (device, issue)]
    sends = [*(place.bytes for place in found), 0.0]
    for first, last in pairwise([-1, *balanced(np.maximum(*weights), count - 1), len(found)]):
        mine = (first < fine) & (fine <= last)
        chunk = Chunk(
            forward=_range(mine & ~layout.back),
            backward=_range(mine & layout.back),
            parts=last - first,
            sends=sends[last],
        )
        out.append(chunk)
    return out


def _range(chosen: NDArray[np.bool_]) -> Range:
    """The operators from the first to the last that is chosen; chunks run in one piece."""
    where = np.flatnonzero(chosen)
    return (int(where[0]), int(where[-1]) + 1) if len(where) else (0, 0)
