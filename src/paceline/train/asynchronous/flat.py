"""A model's parameters as one vector, in the order of the optimizer's groups, cut into even shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import SpecError
from paceline.train.asynchronous.shard import ParameterRun

#: keys of a parameter group that are not options
_OF_PARAMETERS = ("params", "param_names")


def plain(name: str, value: Any) -> Any:
    """An option of an optimizer as JSON has it; servers take nothing else."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(name, item) for item in value]
    raise SpecError(
        f"option {name!r} of the optimizer is of type {type(value).__name__}; "
        "servers take numbers, words and lists of them"
    )


class FlatVector:
    """Moves values between parameters and one fp32 vector."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = [[p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
        self.parameters: list[Tensor] = [p for group in self._groups for p in group]
        if not self.parameters:
            raise SpecError("an optimizer without parameters cannot be distributed")
        self._optimizer = optimizer
        groups = optimizer.param_groups
        self._names = [[name for name in group if name not in _OF_PARAMETERS] for group in groups]
        self.count = sum(p.numel() for p in self.parameters)

    def options(self) -> list[dict[str, Any]]:
        """Of each parameter group, those that it had at the start, as schedulers have them now."""
        return [
            {name: plain(name, group[name]) for name in names}
            for group, names in zip(self._optimizer.param_groups, self._names, strict=True)
        ]

    def values(self) -> Tensor:
        """Parameters now."""
        return torch.cat([p.detach().reshape(-1).float() for p in self.parameters])

    def gradients(self) -> Tensor:
        """Gradients now; zero where there is none, dense where they are sparse."""
        return torch.cat([_dense(p).reshape(-1).float() for p in self.parameters])

    def pieces(self, sizes: Sequence[int]) -> list[list[tuple[Tensor, int, int]]]:
        """For each shard of those sizes the parameters in it, and from which element to which of each."""
        out: list[list[tuple[Tensor, int, int]]] = [[] for _ in sizes]
        starts, offset = [sum(sizes[:i]) for i in range(len(sizes))], 0
        for p in self.parameters:
            for shard, (start, size) in zip(out, zip(starts, sizes, strict=True), strict=True):
                low, high = max(start, offset), min(start + size, offset + p.numel())
                if low < high:
                    shard.append((p, low - offset, high - offset))
            offset += p.numel()
        return out

    @staticmethod
    def gathered(pieces: Sequence[tuple[Tensor, int, int]]) -> Tensor:
        """Gradients of one shard now."""
        return torch.cat([_dense(p).reshape(-1)[low:high].float() for p, low, high in pieces])

    @torch.no_grad()
    def load(self, values: Tensor) -> None:
        """Sets the parameters."""
        for p, piece in zip(self.parameters, values.split([p.numel() for p in self.parameters]), strict=True):
            p.copy_(piece.view_as(p))

    @torch.no_grad()
    def move(self, by: Tensor) -> None:
        """Subtracts a vector from the parameters."""
        for p, piece in zip(self.parameters, by.split([p.numel() for p in self.parameters]), strict=True):
            p.sub_(piece.view_as(p))

    def shards(self, servers: int) -> list[tuple[int, tuple[ParameterRun, ...]]]:
        """For each server the elements it keeps and how they fall into parameter groups; sizes differ by one
        at most.
        """
        if not 1 <= servers <= self.count:
            raise SpecError(
                f"{self.count} parameters can be split over 1 to {self.count} servers, got {servers}"
            )
        sizes = [self.count // servers + (i < self.count % servers) for i in range(servers)]
        groups = [sum(p.numel() for p in group) for group in self._groups]
        return [(size, self._parts(groups, sum(sizes[:i]), size)) for i, size in enumerate(sizes)]

    def _parts(self, groups: Sequence[int], start: int, size: int) -> tuple[ParameterRun, ...]:
        parts, offset = [], 0
        for number, (count, options) in enumerate(zip(groups, self.options(), strict=True)):
            inside = min(offset + count, start + size) - max(offset, start)
            if inside > 0:
                parts.append(ParameterRun(count=inside, options=options, group=number))
            offset += count
        return tuple(parts)


def _dense(p: Tensor) -> Tensor:
    if p.grad is None:
        return torch.zeros_like(p)
    return p.grad.to_dense() if p.grad.is_sparse else p.grad
