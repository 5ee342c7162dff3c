"""A captured step as a chain of modules with seconds and bytes, for schedules of recomputation."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from paceline.cost.recompute_schedules import ChainLink
from paceline.predict.step import Conditions, Timed
from paceline.spec.device import Device
from paceline.spec.recomputation import kind_of
from paceline.spec.step_memory import ModuleUnit, StepMemory, TensorLife
from paceline.spec.workload import Op

#: kinds of operators that take long for what they write
DEAR = ("products", "convolutions", "attention", "recurrent")
_PASSING = ("temporary", "workspace")


@dataclass(frozen=True)
class StepChain:
    """A step's lifetimes with seconds of its operators on a device."""

    memory: StepMemory
    #: seconds of each operator of both passes
    seconds: NDArray[np.float64]

    @staticmethod
    def of(memory: StepMemory, device: Device, conditions: Conditions) -> StepChain:
        """Seconds as `predict` has them."""
        step = Timed.of(memory.workload, device, conditions).step
        # the cores of a CPU that issue are those that compute
        each = step.device + step.issue if device.kind == "cpu" else step.device
        return StepChain(memory, each[: memory.operators])

    @property
    def units(self) -> tuple[ModuleUnit, ...]:
        return self.memory.units

    @cached_property
    def ops(self) -> list[Op]:
        return list(self.memory.ops())

    def forward_s(self, unit: ModuleUnit) -> float:
        """Seconds of a unit's forward pass."""
        return float(self.seconds[unit.start : unit.end].sum())

    @cached_property
    def born_in(self) -> list[list[TensorLife]]:
        """Storages that each unit makes in its forward pass."""
        starts = [unit.start for unit in self.units]
        found: list[list[TensorLife]] = [[] for _ in self.units]
        for life in self.memory.lives:
            if life.start < self.memory.forward and starts:
                found[max(0, int(np.searchsorted(starts, life.start, side="right")) - 1)].append(life)
        return found

    def saved(self, number: int) -> list[TensorLife]:
        """What a unit keeps for the backward pass."""
        return [life for life in self.born_in[number] if life.kind == "activations"]

    def unit_of(self, module: str) -> int | None:
        """The unit that a module is, or is in."""
        path = module
        while path:
            if path in self._by_path:
                return self._by_path[path]
            path = path.rpartition(".")[0]
        return None

    @cached_property
    def _by_path(self) -> dict[str, int]:
        return {unit.path: number for number, unit in enumerate(self.units) if unit.path}

    @cached_property
    def passing(self) -> NDArray[np.int64]:
        """Live bytes of what does not stay, at each operator."""
        return live([life for life in self.memory.lives if life.kind in _PASSING], self.memory.operators)

    @cached_property
    def links(self) -> tuple[ChainLink, ...]:
        """The chain as schedules have it. Backward passes take the same under all of them: their seconds are
        left out.
        """
        sizes = {life.tensor: life.bytes for life in self.memory.lives}
        gradients, behind = self._gradients(), self._behind()
        return tuple(
            self._link(number, sizes, gradients[number], behind[number]) for number in range(len(self.units))
        )

    def _link(self, number: int, sizes: dict[int, int], gradients: int, behind: int) -> ChainLink:
        unit = self.units[number]
        saved = sum(life.bytes for life in self.saved(number))
        dear, cheap_s = self._selective(unit)
        output = sizes.get(unit.output, 0) if unit.output is not None else 0
        return ChainLink(
            forward_s=self.forward_s(unit),
            backward_s=0.0,
            saved=saved,
            output=output,
            bare=self._bare(number),
            forward_extra=int(self.passing[unit.start : unit.end].max(initial=0)),
            backward_extra=behind,
            gradients=gradients,
            selective=dear + output if unit.spannable and not unit.mutates and dear else math.inf,
            selective_s=cheap_s,
            spannable=unit.spannable,
            opens=not unit.mutates,
            follows=unit.follows,
        )

    def _bare(self, number: int) -> int:
        """The most that is live in a unit's forward pass where nothing is kept."""
        unit = self.units[number]
        events: dict[int, int] = defaultdict(int)
        for life in self.born_in[number]:
            events[life.start] += life.bytes
            if life.tensor != unit.output:
                events[max(life.used, life.start + 1)] -= life.bytes
        return max(np.cumsum([events[at] for at in sorted(events)]), default=0)

    def _selective(self, unit: ModuleUnit) -> tuple[int, float]:
        """Bytes of the results of dear operators of a unit, and seconds of the others."""
        dear, cheap_s = 0, 0.0
        for number in range(unit.start, unit.end):
            op = self.ops[number]
            if kind_of(op.name) in DEAR:
                dear += op.bytes_written
            else:
                cheap_s += float(self.seconds[number])
        return dear, cheap_s

    def _gradients(self) -> list[int]:
        """Bytes of gradients of the parameters of each unit."""
        found = [0] * len(self.units)
        for life in self.memory.lives:
            number = self.unit_of(life.module)
            if life.kind == "gradients" and number is not None:
                found[number] += life.bytes
        return found

    def _behind(self) -> list[int]:
        """The most of what does not stay in the backward pass of each unit."""
        found = [0] * len(self.units)
        # what is in no module runs backward beside the unit before it; first of all the loss
        number = len(self.units) - 1
        for position in range(self.memory.forward, self.memory.operators):
            known = self.unit_of(self.ops[position].module)
            number = number if known is None else known
            found[number] = max(found[number], int(self.passing[position]))
        return found


def live(lives: Sequence[TensorLife], operators: int) -> NDArray[np.int64]:
    """Live bytes at each operator."""
    change = np.zeros(operators + 1, dtype=np.int64)
    for life in lives:
        change[life.start] += life.bytes
        change[min(life.end, operators)] -= life.bytes
    found: NDArray[np.int64] = np.cumsum(change)[:operators]
    return found
