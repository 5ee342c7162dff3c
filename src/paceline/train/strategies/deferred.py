"""Gradients leave during the backward pass; updates and what follows them hide under the next forward pass.

    overlap     all-to-all of gradients, each rank sums and updates its share (optimizer state is shared
                out), all-gather of parameters
    priority    all-reduce of gradients, all ranks update everything; the layers that the next forward pass
                needs first go first

Synchronous SGD, exactly: no parameter is used before it is the new one. The first step runs plainly: it shows
in which order parameters are used and gradients become ready. Rank 0's orders hold for all. A run that goes
on from a checkpoint takes them from there, and has no such step.

Cost of a step, with F and B the passes, C_rs and C_ag the time of reduce-scatter and all-gather on the wire,
for layers that are small against the whole:

    overlap     max(F, C_ag) + max(B, C_rs)    against F + max(B, C_rs + C_ag) of an all-reduce that must
                                               end before the update

Lee et al., Communication-Efficient Parallelization Strategy for Deep Convolutional Neural Network Training,
MLHPC 2018. The schedule of the all-reduce is that of Jayarajan et al., Priority-based Parameter Propagation,
SysML 2019.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from paceline.errors import SpecError
from paceline.train.comm import Collective, Job
from paceline.train.layout import Named, groups_of
from paceline.train.optim.layerwise import Layerwise
from paceline.train.strategies.arrangement import Arrangement
from paceline.train.strategies.base import agree
from paceline.train.strategies.deferral import Deferred
from paceline.train.strategies.factors import MODES, FactorPart, Shape
from paceline.train.strategies.parts import Part, PiecePart


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
        self._rows: dict[nn.Linear, list[int]] = {}

    def _begin(self) -> None:
        super()._begin()
        owners: dict[int, int] = {}
        for module in self.model.modules():
            for parameter in module.parameters(recurse=False):
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
        self._names = {
            m: n
            for n, m in self.model.named_modules()
            if type(m) is nn.Linear
            and m.weight.requires_grad
            and owners[id(m.weight)] == 1
            and m.weight.dtype == torch.float32
        }
        self._handles = (
            [m.register_forward_pre_hook(self._count_rows) for m in self._names]
            if self.fc != "gradient"
            else []
        )

    def _count_rows(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled() and isinstance(layer, nn.Linear):
            self._rows.setdefault(layer, []).append(inputs[0].numel() // layer.in_features)

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        super().detach()

    def _asked(self) -> dict[str, Any]:
        return {**super()._asked(), "fc": self.fc, "layerwise": isinstance(self.optimizer, Layerwise)}

    def _fits(self, known: Arrangement) -> bool:
        return super()._fits(known) and set(known.factors) <= set(self._names.values())

    def _factors(self) -> dict[str, tuple[str, int]]:
        users: dict[int, int] = {}
        for wanted in self._uses.by_module.values():
            for key in wanted:
                users[key] = users.get(key, 0) + 1
        # one call per backward pass, and nobody else reads the weight
        fit = [
            layer for layer, rows in self._rows.items() if len(rows) == 1 and users.get(id(layer.weight)) == 1
        ]
        if self.world > 1 and self.fc != "gradient" and self._names:
            most = self._most_rows([self._rows[layer][0] if layer in fit else 0 for layer in self._names])
            self._rows.update(
                {layer: [rows] for layer, rows in zip(self._names, most, strict=True) if layer in fit}
            )
        return agree(self._choose(fit))

    def _special(
        self, parameters: list[Named], factors: Mapping[str, tuple[str, int]]
    ) -> tuple[list[Part], list[Named]]:
        for handle in self._handles:
            handle.remove()
        groups = groups_of(self.optimizer)
        parts: list[Part] = [
            FactorPart(
                name,
                layer,
                *factors[name],
                self.optimizer,
                groups,
                self.rank,
                self.world,
                self._factors_ready,
                lambda: not self._gradients.enabled,
            )
            for layer, name in self._names.items()
            if name in factors
        ]
        taken = {id(p) for part in parts for p in part.parameters}
        return parts, [(name, p) for name, p in parameters if id(p) not in taken]

    def _most_rows(self, mine: list[int]) -> list[int]:
        """Rows of each layer on the rank that has most of them; batches need not be shared out evenly."""
        rows = torch.tensor(mine, device=self.parameters[0][1].device)

        def job() -> Job:
            yield Collective("max", [rows])

        self.engine.submit("rows of layers", job()).wait()
        return rows.tolist()

    def _rebuild(self, known: Arrangement) -> None:
        super()._rebuild(known)
        if known.factors:
            self._handles = [self.model.register_forward_hook(self._more_rows)]

    def _more_rows(self, *_: Any) -> None:
        """After the first forward pass of a run that goes on: its batch may have grown meanwhile."""
        if not torch.is_grad_enabled() or self._arrangement is None:
            return
        for handle in self._handles:
            handle.remove()
        parts = [part for part in self.parts if isinstance(part, FactorPart)]
        for part, rows in zip(parts, self._most_rows([part.seen for part in parts]), strict=True):
            part.rows = max(part.rows, rows)
        self._arrangement = replace(
            self._arrangement, factors={part.name: (part.mode, part.rows) for part in parts}
        )

    def _choose(self, layers: list[nn.Linear]) -> dict[str, tuple[str, int]]:
        """By name, what a layer exchanges (where not its gradient) and its rows per step."""
        if self.world == 1 or self.fc == "gradient" or isinstance(self.optimizer, Layerwise):
            return {}
        machine = self._here() if self.fc == "auto" else None
        found = {}
        for layer in layers:
            shape = Shape(n_in=layer.in_features, n_out=layer.out_features, rows=self._rows[layer][0])
            mode = (
                shape.choose(self.world, machine.link_Bps, machine.flops) if machine is not None else self.fc
            )
            if mode != "gradient" and not (mode == "rows" and shape.n_out % self.world):
                found[self._names[layer]] = (mode, shape.rows)
        return found

    def _factors_ready(self, part: FactorPart) -> None:
        self._gradients.begin()
        self._drop(part)
        self._count(part)


class Priority(Deferred):
    """All-reduce in pieces; bottom layers, which the next forward pass needs first, overtake where they can.

    Which can is found once, by playing the first backward pass on the link found here: whenever the link is
    free, of the pieces that are ready the one needed first goes. The order found holds for all ranks and
    steps.
    """

    name = "priority"
    paper = "Jayarajan et al., SysML 2019; Peng et al., SOSP 2019"
    shares = False

    def _order(self, ready: Sequence[Part], when: Mapping[int, float]) -> Sequence[Part]:
        if self.world == 1:
            return ready
        machine = self._here()
        need = {id(part): i for i, part in enumerate(self.parts)}
        waiting, order = list(ready), list[Part]()
        now = 0.0
        while waiting:
            now = max(now, when[id(waiting[0])])
            part = min((p for p in waiting if when[id(p)] <= now), key=lambda p: need[id(p)])
            waiting.remove(part)
            order.append(part)
            size = part.piece.bytes if isinstance(part, PiecePart) else 0
            now += machine.latency_s + 2 * (self.world - 1) / self.world * size / machine.reduce_Bps
        return order
