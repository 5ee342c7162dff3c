"""What lives when in one captured step: every storage, and the modules whose forward passes made them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.spec.workload import Op, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLife:
    """One storage of a step. Times count operators: it is there while the operators from `start` up to, but
    not including, `end` run.
    """

    tensor: int
    bytes: int
    #: of `spec.workload.MEMORY_KINDS`
    kind: str
    #: path of the module whose forward or backward pass made it
    module: str
    start: int
    end: int
    #: operators of the forward pass that had run when the last of them that touches it had
    used: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleUnit:
    """A module of the chain that a forward pass is, or operators between two of them (`path` is empty).

    Its forward pass is the operators from `start` up to, but not including, `end`.
    """

    path: str
    start: int
    end: int
    #: it can be a checkpoint: a module that runs once in the pass
    spannable: bool
    #: it takes what the unit before it returned as it is, with the same other arguments
    follows: bool
    #: it changes what it is given in place, so that no checkpoint can begin with it
    mutates: bool
    #: it has modules within
    composite: bool
    #: the storage that it returns, if it returns a tensor
    output: int | None


@dataclass(frozen=True, kw_only=True, eq=False)
class StepMemory:
    """Lifetimes of one step, with the workload that the same capture made; times as in `TensorLife`."""

    workload: Workload
    lives: tuple[TensorLife, ...]
    units: tuple[ModuleUnit, ...]
    #: operators of the forward pass
    forward: int
    #: operators of both passes
    operators: int

    def ops(self) -> Iterator[Op]:
        """Operators of both passes, in the order in which they run."""
        for index in self.workload.order[:-1]:
            yield from self.workload.segments[index].ops
