"""The layers of a pipeline stage: operators and collectives of one micro-batch on one rank, and what the rank
holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.cost.chip import Chip
from paceline.cost.curves import Curves
from paceline.cost.host_link import link_rate
from paceline.cost.operators import OpTimes
from paceline.cost.transformer import PackedPieces, PieceTime, Shape, saved_bytes
from paceline.sim.mesh import Mesh
from paceline.spec import schedules
from paceline.spec.cluster import Cluster, Group
from paceline.spec.framework import Framework
from paceline.spec.plan import Plan, stage_layers
from paceline.spec.transformer import Transformer
from paceline.spec.workload import ITEMSIZE
from paceline.sync.way import USUAL, Way

#: between kernels that follow each other on the device
GAP_S = 1.3e-6


class Held(Protocol):
    """What a stage of the pipeline holds."""

    @property
    def layers(self) -> int: ...
    @property
    def first(self) -> bool: ...
    @property
    def last(self) -> bool: ...


class Layers(NamedTuple):
    """Layers of a stage, and whether the embedding and the head are with them."""

    layers: int
    first: bool
    last: bool


@dataclass(frozen=True)
class Layer:
    """A resolved plan on a cluster, with the operators of its layers timed."""

    model: Transformer
    cluster: Cluster
    plan: Plan
    framework: Framework
    shape: Shape
    chip: Chip
    curves: Curves
    found: PackedPieces
    pieces: Mapping[str, PieceTime]
    costs: OpTimes
    #: the user named the framework, rather than taking what is usual
    named: bool = False
    way: Way = USUAL

    # -- groups ------------------------------------------------------------------------------------

    @cached_property
    def mesh(self) -> Mesh:
        """Where the ranks sit, and what they send."""
        return Mesh(self.plan, self.cluster, self.way.island(self.plan, self.cluster), self._sent_bytes)

    def _sent_bytes(self, op: str, size: float, axis: str, group: Group) -> float:
        """Bytes of a collective as the framework sends them."""
        if axis == "ep" and self.framework.dispatch == "once":
            return size * self.copies(group) / self.model.top_k
        if axis == "shard" and self.framework.flat_gathers and group.size > self.cluster.node_devices:
            return size * self.cluster.node_devices
        return size

    def copies(self, group: Group) -> float:
        """Domains of the outermost link that a token's experts are in, on average: each gets one copy and
        passes it on inside.
        """
        m = self.model
        domains = next(fan for i in reversed(range(len(self.cluster.tiers))) if (fan := group.fan(i)) > 1)
        found = domains * (1 - (1 - 1 / domains) ** m.top_k)
        return min(found, m.top_groups) if m.top_groups and domains < group.size else found

    # -- one micro-batch ---------------------------------------------------------------------------

    def place(self, name: str) -> slice:
        """Where a piece's operators stand among all that are packed."""
        return slice(self.found.starts[name], self.found.starts[name] + len(self.pieces[name].each))

    def gaps(self, name: str) -> NDArray[np.float64]:
        """Seconds between the kernels of each of a piece's operators."""
        out = GAP_S * self.costs.kernels[self.place(name)]
        for place, count in self.pieces[name].piece.launches.items():
            out[place] = GAP_S * count
        return out

    def issue(self, name: str) -> NDArray[np.float64]:
        """Host seconds of each operator of a piece."""
        found = self.pieces[name]
        out = np.full(
            len(found.each),
            self.framework.issue_backward_s if name.endswith("backward") else self.framework.issue_s,
        )
        for place, count in found.piece.launches.items():
            cast = found.piece.ops[place].kind == "cast"
            out[place] += count * (
                self.framework.issue_expert_cast_s if cast else self.framework.issue_expert_s
            )
        return out

    def host_s(self, name: str) -> float:
        """Seconds of the host to issue a piece."""
        sent = self.framework.issue_collective_s * len(self.pieces[name].piece.collectives)
        return float(self.issue(name).sum()) + sent

    def device_s(self, name: str) -> NDArray[np.float64]:
        """Seconds of the device for each operator of a piece, with the gaps between kernels."""
        return self.pieces[name].each + self.gaps(name)

    def wait(self, name: str) -> float:
        """Seconds that the device waits in a piece for a host that could not run ahead of it."""
        timed, start = self.pieces[name], self.pieces[name].piece.sync
        if start < 0 or self.framework.blocking:
            return 0.0
        sent = sum(
            self.mesh.send(c.op, c.size, c.axis)
            for c in timed.piece.collectives
            if c.at >= start and not c.behind
        )
        return max(0.0, float(self.issue(name)[start:].sum() - timed.each[start:].sum()) - sent)

    def again(self) -> NDArray[np.bool_]:
        """Which operators of a layer's forward pass the backward pass runs again."""
        piece = self.pieces["layer.forward"].piece
        count = len(piece.ops)
        if self.plan.recompute != "selective":
            return np.full(count, self.plan.recompute == "full")
        if self.framework.selective == "core":
            return np.isin(np.arange(count), piece.core)
        # operators other than products run again, and every second product
        products = [i for i, op in enumerate(piece.ops) if op.kind in ("gemm", "attention")]
        return ~np.isin(np.arange(count), [*products[::2], *piece.core])

    @property
    def wait_again(self) -> float:
        """Seconds that the device waits for the host where it runs a layer again."""
        return self.wait("layer.forward") if self.plan.recompute == "full" else 0.0

    @property
    def recomputed_flops(self) -> float:
        """Of what a layer's backward pass runs again."""
        return float(self.found.packed.flops[self.place("layer.forward")][self.again()].sum())

    @property
    def host_Bps(self) -> float:
        """Bytes per second between a device and its host's memory while all devices of a node copy."""
        return link_rate(self.cluster.device, self.cluster.node_devices)

    @property
    def copying_s(self) -> float:
        """Seconds to copy what a layer saves to the host's memory, or back."""
        if self.plan.offload != "activations":
            return 0.0
        return saved_bytes(self.shape, self.plan.recompute) / self.host_Bps

    # -- what a rank holds -------------------------------------------------------------------------

    def chunks(self) -> list[tuple[tuple[int, int], ...]]:
        """The chunks of each rank of the pipeline, as (number along the model, layers)."""
        p = self.plan
        each = schedules.get(p.schedule).chunks_per_rank(p.vpp)
        held = [self.mesh.chunks(rank) for rank in range(p.pp)]
        whole, total = self.model.layers, p.pp * each
        # one layer fewer beside the embedding and beside the head
        if whole % total and (whole + 2) % total == 0 and total > 1:
            return [tuple((c, (whole + 2) // total - (c in (0, total - 1))) for c in mine) for mine in held]
        counts = stage_layers(whole, p.pp, each)
        return [
            tuple((c, counts[rank] // each + (i < counts[rank] % each)) for i, c in enumerate(mine))
            for rank, mine in enumerate(held)
        ]

    def ends(self, rank: int) -> tuple[bool, bool]:
        """Whether a rank of the pipeline holds the embedding, and the head."""
        return rank == 0, rank == (0 if schedules.get(self.plan.schedule).v_shaped else self.plan.pp - 1)

    def held(self) -> list[Layers]:
        """What each stage of the pipeline holds, in order."""
        return [
            Layers(sum(count for _, count in mine), *self.ends(i)) for i, mine in enumerate(self.chunks())
        ]

    @property
    def gradient_bytes(self) -> int:
        """Of one parameter, as it is reduced."""
        return 4 if self.framework.reduce_fp32 else ITEMSIZE[self.shape.dtype]

    def layer_parameters(self) -> float:
        """Of a layer on one rank."""
        return self.model.dense_parameters / self.plan.tp + self.expert_parameters()

    def expert_parameters(self) -> float:
        """Of a layer's experts on one rank."""
        return self.model.expert_parameters / self.plan.ep

    def end_parameters(self, first: bool, last: bool) -> float:
        """Of the embedding and the head on one rank; a tied projection is held at both ends."""
        m, tp = self.model, self.plan.tp
        tied = m.vocab * m.hidden if m.tied and last and not first else 0
        return ((m.embedding_parameters if first else 0) + ((m.head_parameters + tied) if last else 0)) / tp

    def parameters(self, stage: Held) -> float:
        return stage.layers * self.layer_parameters() + self.end_parameters(stage.first, stage.last)

    @property
    def sharded(self) -> bool:
        """Whether parameters are sharded, and gathered layer by layer."""
        return self.plan.sharding in ("fsdp", "hsdp")

    @property
    def replicated(self) -> bool:
        """Whether whole gradients are reduced once per step."""
        return self.mesh.replicas > 1 and not self.sharded and not self.plan.adapters
