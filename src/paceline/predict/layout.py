"""Where things are in a captured step: which operators make a gradient and use a parameter, which blocks
there are, and where a pipeline cuts the model into chunks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from paceline.sim.cuts import backward_places, balanced, places
from paceline.spec.workload import Parameter, Segment, Workload

Array = NDArray[np.float64]
#: [first, last) operator
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are gathered together: their bytes, and the operators between which they are needed."""

    bytes: int
    #: [first, last) operator of the forward pass, and of the backward pass, recomputation included
    forward: tuple[int, int]
    backward: tuple[int, int]


class Layout:
    """Where in the written-out step each parameter is used and its gradient ready, and which blocks there
    are.

    Operators carry the path of their module. Folded blocks repeat the operators of one of them: its n-th
    visit stands for the n-th sibling that has no operators of its own, and the backward pass visits them last
    to first.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        sizes = [len(segment.ops) for segment in workload.segments]
        self.begins = np.concatenate([[0], np.cumsum([sizes[index] for index in workload.order])]).astype(int)
        last = [i for i, index in enumerate(workload.order) if workload.segments[index].phase == "optimizer"]
        #: the first operator of the update
        self.update = int(self.begins[last[0]]) if last else int(self.begins[-1])
        phases = np.array([segment.phase for segment in workload.segments])[np.array(workload.order)]
        #: of each operator, whether it belongs to the backward pass
        self.back = np.repeat(
            np.isin(phases, ("recompute", "backward")), [sizes[index] for index in workload.order]
        )
        self._visits: dict[tuple[str, str], list[list[int]]] = {}
        forward, backward = self._entries(("forward",)), self._entries(("recompute", "backward"))
        for path, entries in forward.items():
            self._visits[path, "forward"] = [[entry] for entry in entries] if path else [entries]
            groups = np.array_split(np.array(backward.get(path, [])), len(entries) if path else 1)
            self._visits[path, "backward"] = [
                group.tolist() for group in (reversed(groups) if path else groups)
            ]
        #: of each visit, its entries in the forward pass and in the backward pass
        self.visits = [
            (entries, self._visits[path, "backward"][i])
            for (path, phase), found in self._visits.items()
            if phase == "forward"
            for i, entries in enumerate(found)
        ]
        self._operators = [_by_module(segment) for segment in workload.segments]
        self._home = dict(self._homes())

    def _entries(self, phases: Sequence[str]) -> dict[str, list[int]]:
        out: dict[str, list[int]] = defaultdict(list)
        for entry, index in enumerate(self.workload.order):
            segment = self.workload.segments[index]
            if segment.phase in phases and segment.ops:
                out[segment.path].append(entry)
        return out

    def _homes(self) -> Iterator[tuple[str, tuple[str, int]]]:
        """Path of each block -> the block whose operators stand for it, and the number of the visit."""
        own = [path for path, phase in self._visits if path and phase == "forward"]
        tables: dict[str, dict[str, dict[str, tuple[int, ...]]]] = defaultdict(lambda: defaultdict(dict))
        parents = {path.rpartition(".")[0] for path in own}
        for parameter in self.workload.parameters:
            for parent in parents:
                rest = parameter.name.removeprefix(f"{parent}." if parent else "")
                if rest != parameter.name or not parent:
                    child, _, name = rest.partition(".")
                    tables[parent][f"{parent}.{child}" if parent else child][name] = parameter.shape
        for children in tables.values():
            pattern: dict[str, list[str]] = {}
            for child, table in children.items():
                key = str(sorted(table.items()))
                if child in own:
                    pattern[key] = [child]
                elif key in pattern and len(pattern[key]) < len(self._visits[pattern[key][0], "forward"]):
                    pattern[key].append(child)
                else:
                    continue
                yield child, (pattern[key][0], len(pattern[key]) - 1)

    def _find(self, name: str) -> tuple[str, int, str]:
        """The block, its visit and the module path within the captured operators, of a parameter."""
        module = name.rpartition(".")[0]
        parts = module.split(".")
        for i in range(len(parts), 0, -1):
            block = ".".join(parts[:i])
            if block in self._home:
                path, visit = self._home[block]
                return path, visit, path + module[len(block) :]
        return "", 0, module

    def place(self, parameter: Parameter, phase: str, otherwise: int) -> int:
        """After which operator a gradient is ready (backward), or before which a parameter is needed
        (forward).
        """
        path, visit, module = self._find(parameter.name)
        visits = self._visits.get((path, phase), [])
        entries = visits[visit] if visit < len(visits) else []
        # what touches as many bytes; else anything of the module, or (where kernels were fused) of the one
        # around it
        for key in ((module, parameter.bytes), (module, 0), (module.rpartition(".")[0], 0)):
            found = [
                int(self.begins[entry]) + place
                for entry in entries
                for place in self._operators[self.workload.order[entry]].get(key, ())
            ]
            if found:
                return max(found) + 1 if phase == "backward" else min(found)
        return otherwise

    def ready(self) -> list[tuple[Parameter, int]]:
        """Trained parameters in the order in which their gradients become ready, each with the operator that
        may then start.
        """
        out: list[tuple[Parameter, int]] = []
        start = min(
            (
                entries[0][0]
                for (_, phase), entries in self._visits.items()
                if phase == "backward" and entries and entries[0]
            ),
            default=0,
        )
        at = int(self.begins[start])
        for parameter in sorted((p for p in self.workload.parameters if p.ready >= 0), key=lambda p: p.ready):
            at = self.place(parameter, "backward", at)
            out.append((parameter, min(at, self.update)))
        return out

    @cached_property
    def units(self) -> list[Unit]:
        """The blocks in the order in which they run; first of all what is in none of them, needed from start
        to end.
        """
        inside: dict[tuple[str, int], int] = defaultdict(int)
        for parameter in self.workload.parameters:
            path, visit, _ = self._find(parameter.name)
            inside[path, visit] += parameter.bytes
        spans = {}
        for path, visit in inside:
            ranges = [self._span(path, phase, visit) for phase in ("forward", "backward")]
            spans[path, visit] = ranges if path and all(ranges) else None
        root = sum(size for key, size in inside.items() if spans[key] is None)
        blocks = [Unit(inside[key], found[0], found[1]) for key, found in spans.items() if found is not None]  # type: ignore[arg-type]
        return [
            Unit(root, (0, self.update), (0, self.update)),
            *sorted(blocks, key=lambda unit: unit.forward),
        ]

    def _span(self, path: str, phase: str, visit: int) -> tuple[int, int] | None:
        visits = self._visits.get((path, phase), [])
        entries = visits[visit] if visit < len(visits) else []
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
    inside = fine >= 0
    weights = [np.bincount(fine[inside], values[inside], len(found) + 1) for values in (device, issue)]
    chosen = balanced(np.maximum(*weights), count - 1)
    chunks = np.searchsorted(np.array(chosen), fine, side="left")
    parts = np.diff([-1, *chosen, len(found)]).tolist()
    sends = [*(found[i].bytes for i in chosen), 0.0]
    return [
        Chunk(
            forward=_range(inside & ~layout.back & (chunks == number)),
            backward=_range(inside & layout.back & (chunks == number)),
            parts=parts[number],
            sends=sends[number],
        )
        for number in range(count)
    ]


def _range(chosen: NDArray[np.bool_]) -> Range:
    """The operators from the first to the last that is chosen; chunks run in one piece."""
    where = np.flatnonzero(chosen)
    return (int(where[0]), int(where[-1]) + 1) if len(where) else (0, 0)
