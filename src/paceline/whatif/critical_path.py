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

    def later(one: int, other: int) -> int:
        """The one of two operators that ends later; -1 is none of them."""
        return one if other < 0 or (one >= 0 and finish[one] >= finish[other]) else other

    last = barrier = -1
    for number, node in enumerate(steps):
        update = node.op.phase == "optimizer"
        after = barrier if update else -1
        for tensor in node.op.sources:
            after = later(writer.get(tensor, -1), after)
        before.append(after)
        finish.append(node.cost.depth + (finish[after] if after >= 0 else 0.0))
        for tensor in node.op.results:
            # an earlier writer of another part of the tensor may end later
            writer[tensor] = later(number, writer.get(tensor, -1))
        last = later(number, last)
        barrier = barrier if update else last
    return Chain(depth=finish[last] if steps else 0.0, operators=_back(steps, before, last))


def _back(steps: Sequence[CostedOp], before: Sequence[int], last: int) -> tuple[CostedOp, ...]:
    """The chain that ends with an operator, from its start."""
    path = []
    while last >= 0:
        path.append(steps[last])
        last = before[last]
    return tuple(reversed(path))


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
