"""Every step through parameter servers: gradients as they become ready, parameters back as the forward pass
needs them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from paceline.cost.compression import wire_bytes
from paceline.predict.parallel import GATHER, REDUCE, Ranks
from paceline.predict.way import Array, Way
from paceline.sim.overlap import Transfer
from paceline.spec.prediction import Evidence
from paceline.spec.synchronisation import Relaxation
from paceline.spec.workload import ITEMSIZE, Parameter
from paceline.sync.accuracy import accuracy
from paceline.sync.compressed import Coding
from paceline.sync.layers import Layers
from paceline.sync.overlapped import shard_update
from paceline.sync.servers import servers


class Served(Way):
    """Servers sum and update; workers send gradients, encoded if the plan says so."""

    def __init__(self, relax: Relaxation) -> None:
        self.relax = relax
        self._accuracy = accuracy(relax)

    @property
    def accuracy(self) -> Evidence:
        return self._accuracy

    @property
    def state_bytes(self) -> float:
        return self.relax.scheme.state_bytes if self.relax.compress else 0.0

    def coding(self, ranks: Ranks) -> Coding:
        """Encoders of the workers; servers send one sum."""
        return Coding(ranks, self.relax.scheme, 1)

    def transfers(self, ranks: Ranks) -> list[Transfer]:
        count = ranks.plan.dp
        if count == 1:
            return []
        found = servers(ranks.cluster, count, self.relax.servers)
        layers, coding = Layers(ranks).listed, self.coding(ranks)
        up, down = [], []
        for layer in layers:
            whole = float(sum(ranks.wire(p) for p in layer.parameters))
            sent, back = (
                _coded_bytes(coding, layer.parameters, count) if self.relax.compress else (whole, whole)
            )
            seconds = found.way_s(sent, count) + found.sum_s(whole, count)  # servers add up what they decoded
            up.append(ranks.part(REDUCE, [], seconds, layer.ready, ranks.layout.update))
            down.append(ranks.part(GATHER, [], found.way_s(back, count), 0, layer.needed))
        return up + sorted(down, key=lambda transfer: transfer.needed)

    def durations(self, ranks: Ranks, device: Array) -> Array:
        if ranks.plan.dp == 1:
            return device
        coded = self.coding(ranks).added(device) if self.relax.compress else device
        return shard_update(ranks, coded, 0.0)

    def evidence(self, ranks: Ranks) -> Iterable[Evidence]:
        return self.coding(ranks).evidence() if self.relax.compress and ranks.plan.dp > 1 else ()


def _coded_bytes(coding: Coding, parameters: Sequence[Parameter], workers: int) -> tuple[float, float]:
    """Bytes of encoded gradients to servers, and back: of TernGrad a sum of as many ternary values as there
    are workers, of others whole parameters."""
    sent = back = 0.0
    for p in parameters:
        scheme = coding.schemes[p.name]
        sent += wire_bytes(scheme, p.shape)
        back += p.numel * (math.log2(1 + 2 * workers) / 8 if scheme.name == "terngrad" else ITEMSIZE[p.dtype])
    return sent, back
