"""Averaging hidden under both passes: scattered and gathered layer by layer (Lee et al. 2018), or by
priority.

    overlap     reduce-scatter under the backward pass, each rank updates its shard, all-gather under the
                next forward pass; of a fully connected layer activations and errors are exchanged in place of
                the gradient where they are fewer
    priority    of the gradients that are ready, the one that the next forward pass needs first; what the
                backward pass does not hide, that one does
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.predict.distributed import Step
from paceline.predict.gradients import Exchange, StageTime
from paceline.predict.parallel import GATHER, REDUCE, Ranks
from paceline.predict.rank import REDUCTION
from paceline.predict.way import Array, Way
from paceline.sim.overlap import Transfer
from paceline.spec.prediction import Evidence
from paceline.spec.synchronisation import Relaxation
from paceline.spec.workload import ITEMSIZE
from paceline.sync.accuracy import accuracy
from paceline.sync.layers import Layer, Layers


def shard_update(ranks: Ranks, device: Array, share: float) -> Array:
    """Operators with an update of a share of the parameters only."""
    update = ranks.layout.update
    fixed = ranks.timed.costs.latency_s[ranks.timed.step.index[update:]]
    device[update:] = fixed + np.maximum(0.0, device[update:] - fixed) * share
    return device


class Overlapped(Way):
    """Scattered behind each layer, gathered ahead of it."""

    def __init__(self, relax: Relaxation) -> None:
        self._accuracy = accuracy(relax)

    @property
    def accuracy(self) -> Evidence:
        return self._accuracy

    def transfers(self, ranks: Ranks) -> list[Transfer]:
        if ranks.plan.dp == 1:
            return []
        layers = Layers(ranks)
        scattered = [
            ranks.transfer(REDUCE, self.sent(layers, layer), layer.ready, ranks.layout.update)
            for layer in layers.listed
        ]
        gathered = [
            ranks.transfer(GATHER, [("all_gather", layer.bytes, "dp")], 0, layer.needed)
            for layer in sorted(layers.listed, key=lambda layer: layer.needed)
        ]
        return scattered + gathered

    def sent(self, layers: Layers, layer: Layer) -> list[Exchange]:
        """Its gradient, or its activations and errors where these take less time."""
        gradient: list[Exchange] = [("reduce_scatter", layer.bytes, "dp")]
        traded = self.traded(layers, layer)
        return traded if traded and layers.ranks.total(traded) < layers.ranks.total(gradient) else gradient

    def traded(self, layers: Layers, layer: Layer) -> list[Exchange]:
        """A fully connected layer's activations to all ranks, and its errors to those that hold their rows;
        nothing of others.
        """
        rows, matrix = layers.rows.get(layer.name, 0), layer.matrix
        if not rows or matrix is None:
            return []
        outputs, inputs = matrix.shape
        width = rows * ITEMSIZE[matrix.dtype]
        return [
            ("all_gather", layers.ranks.plan.dp * inputs * width, "dp"),
            ("all_to_all", outputs * width, "dp"),
        ]

    def durations(self, ranks: Ranks, device: Array) -> Array:
        """The update of a shard; as many FLOPs of the products whose gradients are traded, but what is
        written is a shard.
        """
        dp, layers = ranks.plan.dp, Layers(ranks)
        if dp == 1:
            return device
        device = shard_update(ranks, device, 1 / dp)
        compute = ranks.timed.costs.compute_s[ranks.timed.step.index]
        for layer in layers.listed:
            if layer.matrix is not None and self.sent(layers, layer)[0][0] != "reduce_scatter":
                place = ranks.layout.place(layer.matrix, "backward", 0) - 1
                if place >= 0:
                    device[place] = max(device[place] / dp, float(compute[place]))
        return device


class Prioritised(Way):
    """All-reduce of layers; those that the next forward pass needs first go first."""

    def __init__(self, relax: Relaxation) -> None:
        self._accuracy = accuracy(relax)

    @property
    def accuracy(self) -> Evidence:
        return self._accuracy

    def transfers(self, ranks: Ranks) -> list[Transfer]:
        """What the backward pass hides of each layer's all-reduce; and what is left, in the order in which it
        is needed.
        """
        if ranks.plan.dp == 1:
            return []
        layers = Layers(ranks).listed
        sent: list[list[Exchange]] = [
            [("all_reduce", sum(ranks.wire(p) for p in layer.parameters), "dp")] for layer in layers
        ]
        whole = [ranks.total(exchanges) for exchanges in sent]
        left = self._left(ranks, layers, whole)
        update = ranks.layout.update
        hidden = [
            ranks.part(REDUCE, exchanges, total - rest, layer.ready, update)
            for layer, exchanges, total, rest in zip(layers, sent, whole, left, strict=True)
        ]
        later = [(layer.needed, rest) for layer, rest in zip(layers, left, strict=True) if rest]
        return hidden + [
            ranks.part(REDUCE, [], rest, 0, needed)
            for needed, rest in sorted(later, key=lambda pair: pair[0])
        ]

    def _left(self, ranks: Ranks, layers: Sequence[Layer], whole: Sequence[float]) -> list[float]:
        """Seconds of each layer's all-reduce that are not done when the backward pass ends."""
        ends = np.concatenate([[0.0], np.cumsum(ranks.timed.step.device)])
        stops = [float(ends[layer.ready]) for layer in layers[1:]] + [float(ends[ranks.layout.update])]
        left, at = list(whole), 0.0
        for i, (layer, until) in enumerate(zip(layers, stops, strict=True)):
            at = max(at, float(ends[layer.ready]))
            # of what is ready, the layer that runs first in the forward pass is the latest that became ready
            for j in sorted(range(i + 1), key=lambda j: layers[j].needed):
                sent = max(0.0, min(left[j], until - at))
                left[j] -= sent
                at += sent
        return left

    def finish(self, step: Step, parts: dict[str, float], stages: Sequence[StageTime]) -> dict[str, float]:
        """Less of the reduction, where the next forward pass hides some."""
        if not parts.get(REDUCTION):
            return parts
        room = max(stage.forward_s for stage in stages) * (1 - step.framework.contention)
        first = step.total(self.exchanges(step, step.layer_parameters(), 0.0)[0])
        return {**parts, REDUCTION: max(min(first, parts[REDUCTION]), parts[REDUCTION] - room)}
