"""What the state machine decides.

A driver carries out one batch in order, after it has released all that the batch stops or moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: (node, devices of it), in the order in which they were chosen
Allocation = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do with the job `name`, and why, in one line."""

    name: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the log."""
        out: dict[str, Any] = {"decision": type(self).__name__.lower()}
        for field in self.__dataclass_fields__:
            value = getattr(self, field)
            out[field] = [list(pair) for pair in value] if isinstance(value, tuple) else value
        return out

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()} {self.name}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Decision):
    """Start a waiting job, from its checkpoint where it has one; `adaptive`: it may choose its batch for
    goodput at each phase.
    """

    allocation: Allocation
    adaptive: bool = False

    def __str__(self) -> str:
        return f"start {self.name} on {show(self.allocation)}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize(Decision):
    """Move a running job to other devices: checkpoint, stop, start there."""

    allocation: Allocation
    adaptive: bool = False

    def __str__(self) -> str:
        return f"resize {self.name} to {show(self.allocation)}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Decision):
    """Checkpoint a running job and stop it; it waits again."""


def devices(allocation: Allocation) -> int:
    """Devices of an allocation."""
    return sum(count for _, count in allocation)


def counts(allocation: Allocation) -> tuple[int, ...]:
    """Devices on each node of an allocation, without the nodes' numbers."""
    return tuple(count for _, count in allocation)


def show(allocation: Allocation) -> str:
    """`2 on node 3, 4 on node 7`."""
    return ", ".join(f"{count} on node {node}" for node, count in allocation)
