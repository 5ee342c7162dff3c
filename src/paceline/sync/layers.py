"""A captured module by layers: which gradients are ready when, and which parameters are needed when."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from paceline.predict.parallel import Ranks
from paceline.spec.workload import ITEMSIZE, Parameter


@dataclass(frozen=True, slots=True)
class Layer:
    """Parameters of one module: after which operator their gradients are ready, and before which a forward
    pass needs them.
    """

    parameters: tuple[Parameter, ...]
    ready: int
    needed: int

    @property
    def name(self) -> str:
        """Of the module."""
        return module_of(self.parameters[0])

    @property
    def bytes(self) -> float:
        """Of its parameters, as they are kept."""
        return float(sum(p.numel * ITEMSIZE[p.dtype] for p in self.parameters))

    @property
    def matrix(self) -> Parameter | None:
        """The weight of a fully connected layer."""
        return next((p for p in self.parameters if len(p.shape) == 2), None)


def module_of(parameter: Parameter) -> str:
    """The module that holds a parameter."""
    return parameter.name.rpartition(".")[0]


@dataclass(frozen=True)
class Layers:
    """The layers of a captured module on its ranks."""

    ranks: Ranks

    @cached_property
    def listed(self) -> list[Layer]:
        """In the order in which their gradients are ready."""
        out: list[Layer] = []
        for parameter, ready in self.ranks.layout.ready():
            needed = self.ranks.layout.place(parameter, "forward", 0)
            if out and out[-1].name == module_of(parameter):
                last = out.pop()
                out.append(
                    Layer((*last.parameters, parameter), max(last.ready, ready), min(last.needed, needed))
                )
            else:
                out.append(Layer((parameter,), ready, needed))
        return out

    @cached_property
    def rows(self) -> dict[str, int]:
        """Rows of the activations that each fully connected layer multiplies: samples, or tokens."""
        workload = self.ranks.workload
        forward = [op for segment in workload.segments if segment.phase == "forward" for op in segment.ops]
        return {op.module: workload.units_per_step for op in forward if op.kind == "gemm" and op.flops}
