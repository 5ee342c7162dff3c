"""What the ranks of a step do, whatever that was made from: a transformer's sizes (`predict/sizes.py`), or a
captured module (`predict/captured.py`).

    piece       a stretch of a pass on the device: a layer, a chunk, or the operators between two moments at
                which something else is released or waited for; with the host's seconds to issue it
    pass        pieces in order, with the collectives of every micro-batch beside them
    role        all ranks of one stage of the pipeline: its chunks, the collectives of a step, the update
    work        the roles, with what goes between their chunks

`predict/program.py` makes the program of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.sim.program import Label

#: a collective that is still to be timed: operation, bytes, mesh axis
Exchange = tuple[str, float, str]
#: the pace of collectives over some axes that run at the same time, each as a share of its pace alone
Share = Callable[[tuple[str, ...]], Sequence[float]]
#: lines of a breakdown
BUBBLE, GATHERS, REDUCTION, TRANSFERS, CODING = (
    "pipeline bubble",
    "parameter gathers",
    "gradient reduction",
    "pipeline transfers",
    "encoding and decoding",
)
#: the same of what is exposed of collectives within a layer, by mesh axis
TITLES = {
    "tp": "tensor-parallel collectives",
    "cp": "context-parallel exchange",
    "ep": "expert exchange",
    "host": "activation offload",
}
#: a moment after all pieces of a pass
END = sys.maxsize


@dataclass(frozen=True, slots=True)
class Transfer:
    """Collectives one after another beside what a rank computes: from when so many pieces of a pass are done,
    and done before a piece of it starts.
    """

    sends: tuple[Label, ...]
    release: int = 0
    needed: int = END
    #: the chunk whose pass that is, where it is one of many
    chunk: int = -1
    #: what the device does with the gradients first, such as to encode them
    before: tuple[Label, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """One direction of one micro-batch through a chunk."""

    kind: str
    pieces: tuple[Label, ...]
    #: every micro-batch's, by release; a pass is over when they are
    transfers: tuple[Transfer, ...] = ()
    #: seconds of its pieces that a later pass runs instead
    put_off_s: float = 0.0

    @property
    def part(self) -> str:
        """The line of a breakdown that its time belongs to."""
        return "forward" if self.kind == "F" else "backward"

    @property
    def name(self) -> str:
        return {"I": "input gradients", "W": "weight gradients"}.get(self.kind, f"{self.part} pass")


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What the ranks of one stage of the pipeline do besides their passes."""

    chunks: tuple[int, ...]
    #: from the start of the step on; a piece of a chunk's first forward pass waits
    gathers: tuple[Transfer, ...] = ()
    #: from a piece of a chunk's last backward pass on, or (`END`) after all passes; the update waits
    reduces: tuple[Transfer, ...] = ()
    update: tuple[Label, ...] = ()
    #: after the update, while nothing else goes on
    regathers: tuple[Label, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What all roles do in a step."""

    title: str
    roles: tuple[Role, ...]
    #: by chunk and kind of action (`spec.schedules.Action`)
    passes: Mapping[tuple[int, str], Pass]
    #: what takes an activation, or its gradient, between a chunk and the next
    hops: Mapping[int, tuple[Label, ...]] = field(default_factory=dict)
    hops_overlap: bool = True
    #: what first and last role exchange before the update
    tied: tuple[Label, ...] = ()
    #: the host's, before a micro-batch and after the update
    before: Label | None = None
    after: Label | None = None
    #: share by which computation slows down beside collectives
    contention: float = 0.0
    share: Share | None = None
    #: whether the host issues passes and steps ahead of the device
    runs_ahead: bool = False
