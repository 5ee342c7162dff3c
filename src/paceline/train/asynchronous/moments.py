"""The optimizer's state between whole parameters, as a worker saves and loads it, and the parts that servers
keep of it.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.train.asynchronous.shard import ParameterRun

#: by server, of each of its parts: entries of state by name
Kept = Sequence[Sequence[Mapping[str, Any]]]
Shards = Sequence[tuple[int, Sequence[ParameterRun]]]


@dataclass(frozen=True, slots=True)
class _Overlap:
    """Elements that a parameter and a part of a server have in common: from where in each, and how many."""

    parameter: Tensor
    low: int
    server: int
    part: int
    offset: int
    count: int

    @property
    def in_parameter(self) -> slice:
        return slice(self.low, self.low + self.count)

    @property
    def in_part(self) -> slice:
        return slice(self.offset, self.offset + self.count)


def _overlaps(parameters: Sequence[Tensor], shards: Shards) -> Iterator[_Overlap]:
    """In the order of the parameters, which parts follow one after another."""
    places = [
        (server, number, part.count)
        for server, (_, parts) in enumerate(shards)
        for number, part in enumerate(parts)
    ]
    server, number, left = places.pop(0)
    size = left
    for parameter in parameters:
        low = 0
        while low < parameter.numel():
            if not left:
                server, number, left = places.pop(0)
                size = left
            count = min(left, parameter.numel() - low)
            yield _Overlap(parameter, low, server, number, size - left, count)
            low += count
            left -= count


def whole(parameters: Sequence[Tensor], shards: Shards, kept: Kept) -> dict[Any, dict[str, Any]]:
    """State by parameter, from what servers keep."""
    state: dict[Any, dict[str, Any]] = {}
    for one in _overlaps(parameters, shards):
        size = shards[one.server][1][one.part].count
        for name, value in kept[one.server][one.part].items():
            entries = state.setdefault(one.parameter, {})
            if isinstance(value, Tensor) and value.shape == (size,):
                if name not in entries:
                    entries[name] = torch.zeros_like(one.parameter, dtype=value.dtype, requires_grad=False)
                entries[name].view(-1)[one.in_parameter] = value[one.in_part]
            else:
                entries.setdefault(name, copy.deepcopy(value))
    return state


def divided(
    parameters: Sequence[Tensor], shards: Shards, state: Mapping[Any, Mapping[str, Any]]
) -> list[list[dict[str, Any]]]:
    """What each server is to keep, from state by parameter; zeros for parameters that have none."""
    kept: list[list[dict[str, Any]]] = [[{} for _ in parts] for _, parts in shards]
    for one in _overlaps(parameters, shards):
        entries = kept[one.server][one.part]
        for name, value in state.get(one.parameter, {}).items():
            if isinstance(value, Tensor) and value.dim() and value.shape == one.parameter.shape:
                if name not in entries:
                    entries[name] = torch.zeros(shards[one.server][1][one.part].count, dtype=value.dtype)
                entries[name][one.in_part] = value.detach().reshape(-1)[one.in_parameter].cpu()
            else:
                entries.setdefault(name, copy.deepcopy(value))
    return kept


def packed(kept: Sequence[Mapping[str, Any]]) -> Tensor:
    """State of one server's parts as bytes."""
    buffer = io.BytesIO()
    torch.save([dict(entries) for entries in kept], buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def unpacked(raw: Tensor | bytes) -> list[dict[str, Any]]:
    """The reverse; nothing is executed."""
    data = bytes(raw.numpy()) if isinstance(raw, Tensor) else raw
    found: list[dict[str, Any]] = torch.load(io.BytesIO(data), weights_only=True)
    return found
