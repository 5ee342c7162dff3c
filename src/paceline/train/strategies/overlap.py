"""Gradients leave during the backward pass in an all-to-all; each rank sums and updates its share, with its
share of the optimizer's state; an all-gather of parameters hides under the next forward pass.

Synchronous SGD, exactly: no parameter is used before it is the new one. The first step runs plainly: it shows
in which order parameters are used and gradients become ready. Rank 0's orders hold for all. A run that goes
on from a checkpoint takes them from there, and has no such step.

Cost of a step, with F and B the passes, C_rs and C_ag the time of reduce-scatter and all-gather on the wire,
for layers that are small against the whole:

    overlap     max(F, C_ag) + max(B, C_rs)    against F + max(B, C_rs + C_ag) of an all-reduce that must
                                               end before the update

Lee et al., Communication-Efficient Parallelization Strategy for Deep Convolutional Neural Network Training,
MLHPC 2018.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from paceline.errors import SpecError
from paceline.sync.factors import MODES, LinearShape
from paceline.train.comm import agree
from paceline.train.optim.layerwise import Layerwise
from paceline.train.strategies.arrangement import Factors
from paceline.train.strategies.base import State
from paceline.train.strategies.deferral import Deferred
from paceline.train.strategies.factors import FactorPart, fully_connected, most_rows, rows_of
from paceline.train.strategies.parts import DeferredPart


class Overlap(Deferred):
    """Overlapped gradient averaging, with message fusion.

    `fc` says what fully connected layers exchange: "gradient", "rows", "factors" (see `factors`), or "auto":
    what takes least time on the link and the device found here. Layers that are called once per pass and
    share no weight qualify.
    """

    name = "overlap"
    paper = "Lee et al., MLHPC 2018"
    shares = True

    def __init__(self, *, fc: str = "auto", **options: Any) -> None:
        super().__init__(**options)
        if fc not in ("auto", *MODES):
            raise SpecError(f"fc must be auto, {', '.join(MODES)}; got {fc!r}")
        self.fc = fc

    def _begin(self) -> None:
        super()._begin()
        self._connected = fully_connected(self.model)

    def _asked(self) -> dict[str, Any]:
        more = {"layerwise": isinstance(self.optimizer, Layerwise), "layers": list(self._connected)}
        return {**super()._asked(), "fc": self.fc, **more}

    def _factors(self) -> Factors:
        if self.world == 1 or self.fc == "gradient" or isinstance(self.optimizer, Layerwise):
            return {}
        found = {}
        for name, rows in rows_of(self._connected, self._uses, self.device).items():
            layer = self._connected[name]
            shape = LinearShape(n_in=layer.in_features, n_out=layer.out_features, rows=rows)
            mode = self.fc
            if mode == "auto":
                mode = shape.choose(self.world, self._here.link_Bps, self._here.flops)
            if mode != "gradient" and not (mode == "rows" and shape.n_out % self.world):
                found[name] = (mode, rows)
        return agree(found)

    def _special(self, factors: Factors) -> Sequence[DeferredPart]:
        parts = []
        for name, how in factors.items():
            layer = self._connected[name]
            ends = self._gradients, self._layer_ready
            parts.append(FactorPart(name, layer, how, self.optimizer, self.engine, *ends))
            self._undo.callback(layer.__dict__.pop, "forward", None)
        return parts

    def load_state_dict(self, state: State) -> None:
        begun = bool(self.parts)
        super().load_state_dict(state)
        if not begun and self._arrangement is not None and self._arrangement.factors:
            self._looking = self.model.register_forward_hook(self._more_rows)
            self._undo.callback(self._looking.remove)

    def _more_rows(self, *_: Any) -> None:
        """After the first forward pass of a run that goes on: its batch may have grown meanwhile."""
        if not torch.is_grad_enabled() or self._arrangement is None:
            return
        self._looking.remove()
        parts = [part for part in self.parts if isinstance(part, FactorPart)]
        most = most_rows([part.seen for part in parts], self.device)
        for part, rows in zip(parts, most, strict=True):
            part.rows = max(part.rows, rows)
        factors = {part.name: (part.mode, part.rows) for part in parts}
        self._arrangement = replace(self._arrangement, factors=factors)
