"""How a strategy of `deferral` is arranged: what its first step showed, and what was made of it on the link
found then.

It goes into checkpoints, so that a run which goes on from one sends the same pieces in the same order from
its first step: sums keep their order, and the run ends with the bits of one that was never interrupted.
Clocks and links, which may be others today, are not asked again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

#: of fully connected layers that do not exchange gradients, what they do, and rows in a step
Factors = Mapping[str, tuple[str, int]]
#: its place in what a strategy remembers
_KEY = "arrangement"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """By names of parameters and modules, in plain data."""

    #: ranks, options, the model, and whatever else decides on it
    asked: Mapping[str, Any]
    #: parameters in the order in which the forward pass uses them
    used: tuple[str, ...]
    #: of modules that read parameters of others, which
    reads: Mapping[str, tuple[str, ...]]
    factors: Factors
    #: bytes of pieces, at least and at most
    piece_bytes: tuple[int, int]
    #: parts in the order in which their gradients travel
    order: tuple[str, ...]
    #: parameters that are used where nothing tells of it
    outside: tuple[str, ...] = ()

    def kept(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {_KEY: asdict(self)}

    @staticmethod
    def of(state: Mapping[str, Any]) -> Arrangement | None:
        """What `kept` gave; None where there is none, or one of another version."""
        try:
            return Arrangement(**state[_KEY])
        except (KeyError, TypeError):
            return None
