"""The embedding, a layer and the head of a transformer on one rank (`cost/transformer.py`), timed: seconds of
their operators on the device and on the host that issues them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.cost.chip import Chip, chip
from paceline.cost.curves import Curves, curves_for
from paceline.cost.operators import OpTimes, sustained, times
from paceline.cost.pack import PackedOps
from paceline.cost.tape import Shape, TapePiece
from paceline.cost.transformer import blocks
from paceline.spec.device import Device
from paceline.spec.vocabulary import Recompute

Array = NDArray[np.float64]

#: between kernels that follow each other on the device
GAP_S = 1.3e-6
#: what a full recomputation runs again
LAYER = "layer.forward"


@dataclass(frozen=True, slots=True)
class PieceTime:
    """Seconds of a piece on the device: its weight gradients, and each operator's."""

    weight_s: float
    each: Array
    piece: TapePiece


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPieces:
    """The operators of all pieces, timed on a device."""

    shape: Shape
    chip: Chip
    curves: Curves
    packed: PackedOps
    costs: OpTimes
    pieces: Mapping[str, PieceTime]
    #: of each piece, where its operators start among all that are packed
    starts: Mapping[str, int]

    @staticmethod
    def of(shape: Shape, device: Device, curves: Curves | None) -> TimedPieces:
        """All pieces of a shape, at the clock that a long run sustains."""
        found, target, constants = blocks(shape), chip(device), curves or curves_for(device)
        packed, framework = found.packed, shape.framework
        costs = times(packed, target, constants)
        fused = packed.kinds.map(lambda kind: float(kind == "attention")) > 0
        if framework.attention_flops_per_cycle:  # an older kernel than the one the curves were fitted to
            limit = packed.flops / (framework.attention_flops_per_cycle * target.sm_hz)
            costs = replace(costs, seconds=np.where(fused, np.maximum(costs.seconds, limit), costs.seconds))
        if framework.fp8_rate < 1:
            slower = packed.dtypes.map(lambda dtype: 1 / framework.fp8_rate if dtype == "fp8" else 1.0)
            costs = replace(costs, seconds=costs.seconds * slower)
        costs = sustained(costs, packed, device)
        pieces = {}
        for name, piece in found.pieces.items():
            each = costs.seconds[found.starts[name] : found.starts[name] + len(piece.ops)]
            pieces[name] = PieceTime(float(each[piece.weight].sum()), each, piece)
        return TimedPieces(
            shape=shape,
            chip=target,
            curves=constants,
            packed=packed,
            costs=costs,
            pieces=pieces,
            starts=found.starts,
        )

    def place(self, name: str) -> slice:
        """Where a piece's operators stand among all that are packed."""
        return slice(self.starts[name], self.starts[name] + len(self.pieces[name].each))

    def device_s(self, name: str) -> Array:
        """Seconds of the device for each operator of a piece, with the gaps between kernels."""
        kernels = self.costs.kernels[self.place(name)].copy()
        for place, count in self.pieces[name].piece.launches.items():
            kernels[place] = count
        return self.pieces[name].each + GAP_S * kernels

    # -- the host ----------------------------------------------------------------------------------

    def issue(self, name: str) -> Array:
        """Host seconds of each operator of a piece."""
        f, piece = self.shape.framework, self.pieces[name].piece
        out = np.full(len(piece.ops), f.issue_backward_s if name.endswith("backward") else f.issue_s)
        for place, count in piece.launches.items():
            cast = piece.ops[place].kind == "cast"
            out[place] += count * (f.issue_expert_cast_s if cast else f.issue_expert_s)
        return out

    def host_s(self, name: str) -> float:
        """Seconds of the host to issue a piece."""
        sent = self.shape.framework.issue_collective_s * len(self.pieces[name].piece.collectives)
        return float(self.issue(name).sum()) + sent

    # -- what runs again ---------------------------------------------------------------------------

    def again(self, recompute: Recompute) -> NDArray[np.bool_]:
        """Which operators of a layer's forward pass the backward pass runs again."""
        piece = self.pieces[LAYER].piece
        places = np.arange(len(piece.ops))
        if recompute is not Recompute.SELECTIVE:
            return np.full(len(places), recompute is Recompute.FULL)
        if self.shape.framework.selective == "core":
            return np.isin(places, piece.core)
        # operators other than products run again, and every second product
        products = [i for i, op in enumerate(piece.ops) if op.kind in ("gemm", "attention")]
        return ~np.isin(places, [*products[::2], *piece.core])

    def recomputed_flops(self, recompute: Recompute) -> float:
        """Of what a layer's backward pass runs again."""
        return float(self.packed.flops[self.place(LAYER)][self.again(recompute)].sum())
