"""The longest chain of operations of a captured step, over the data that its operators read and write.

An operator waits for the last writers of what it reads; what no operator writes is there from the start. The
update waits for all gradients. A tensor counts as a whole: who reads a part of it waits for all of its
writers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cost.operator_depth import operator_work_depth
from paceline.cost.work_depth import WorkDepth
from paceline.spec.workload import PHASES, Op, Segment, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class CostedOp:
    """An operator of a step with its cost."""

    op: Op
    cost: WorkDepth


def nodes(workload: Workload, phases: Sequence[str] = PHASES) -> list[CostedOp]:
    """Every operator of these phases, in the order in which they run."""
    return [node for index in workload.order for node in _segment(workload.segments[index], phases)]


def _segment(segment: Segment, phases: Sequence[str]) -> list[CostedOp]:
    return [CostedOp(op=op, cost=operator_work_depth(op)) for op in segment.ops if op.phase in phases]


def folded(workload: Workload) -> bool:
    """Whether repeated blocks were captured once: then their tensors do not name what they depend on."""
    return len(set(workload.order)) < len(workload.order)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The longest chain: its depth in operations, and the operators on it in order."""

    depth: float
    operators: tuple[CostedOp, ...]


def longest(steps: Sequence[CostedOp]) -> Chain:
    """The longest chain among operators that are in the order in which they run."""
    finish: list[float] = []
    before: list[int] = []
    writer: dict[int, int] = {}
    last = -1
    barrier = -1
    for number, node in enumerate(steps):
        waits = [writer[tensor] for tensor in node.op.sources if tensor in writer]
        if node.op.phase == "optimizer":
            barrier = last if barrier < 0 and last >= 0 else barrier
            waits += [barrier] if barrier >= 0 else []
        after = max(waits, key=lambda one: finish[one], default=-1)
        finish.append(node.cost.depth + (finish[after] if after >= 0 else 0.0))
        before.append(after)
        for tensor in node.op.results:
            # an earlier writer of another part may end later
            known = writer.get(tensor, -1)
            writer[tensor] = number if known < 0 or finish[number] >= finish[known] else known
        last = number if last < 0 or finish[number] >= finish[last] else last
    if last < 0:
        return Chain(depth=0.0, operators=())
    path = []
    at = last
    while at >= 0:
        path.append(steps[at])
        at = before[at]
    return Chain(depth=finish[last], operators=tuple(reversed(path)))


def one_after_another(workload: Workload, phases: Sequence[str]) -> Chain:
    """An upper bound for a folded workload: segments one after the other, each with its own longest chain."""
    depth = 0.0
    path: list[CostedOp] = []
    inside: dict[int, Chain] = {}
    for index in workload.order:
        if index not in inside:
            inside[index] = longest(_segment(workload.segments[index], phases))
        depth += inside[index].depth
        path += inside[index].operators
    return Chain(depth=depth, operators=tuple(path))
