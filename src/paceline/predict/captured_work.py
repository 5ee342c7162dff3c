"""What the ranks of a captured module do: its operators cut into pieces wherever something is released or
waited for. The host issues pieces ahead of the device, across passes and steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.cost.expanded import Expanded
from paceline.predict import exchange, sharded
from paceline.predict.sharded import ShardedBlock
from paceline.predict.step import details
from paceline.sim.program import Builder, Label, Program
from paceline.sim.schedules import kinds
from paceline.sim.work import END, REDUCTION, TRANSFERS, Pass, Role, StepWork, Transfer

if TYPE_CHECKING:
    from paceline.predict.captured import Module

Array = NDArray[np.float64]

#: of the time of a backward pass's products and convolutions, the share that goes to gradients of weights:
#: two products of equal size
WEIGHT_SHARE = 0.5
#: lines of a breakdown by the phase of operators, where they differ
PARTS = {"recompute": "recomputation"}
#: operators between which a pass is cut, its first and its end among them
Edges = list[int]


@dataclass(frozen=True)
class CapturedRanks:
    """The ranks of a captured module's step."""

    module: Module

    @property
    def step(self) -> Expanded:
        """The operators of the step, one after another."""
        return self.module.timed.step

    def work(self) -> StepWork:
        m = self.module
        sends = (("send_recv", chunk.sends, "pp") for chunk in m.chunks[:-1])
        return StepWork(
            title=f"{m.workload.name} on {m.cluster.name}",
            roles=tuple(map(self._in_pieces, self.roles)),
            passes={
                (number, kind): self.passed(number, kind)
                for number in range(len(m.chunks))
                for kind in kinds(m.plan.schedule)
            },
            hops={number: m.mesh.labels([sent], TRANSFERS) for number, sent in enumerate(sends)},
            contention=m.style.contention,
            runs_ahead=True,
        )

    # -- operators ---------------------------------------------------------------------------------

    @cached_property
    def device(self) -> Array:
        """Seconds of each operator on the device, with what adding up gradients takes, without what traded
        gradients spare.
        """
        m, device = self.module, self.module.seconds[1].copy()
        for message in chain(*m.messages):
            if message.spared_s:
                places = (gradient.ready[1] for gradient in message.gradients if gradient.product_s[0])
                device[next(places) - 1] -= message.spared_s
        if m.plan.micro_batches > 1:  # each backward pass adds to what is there: two reads and a write
            kept = m.shards if m.plan.sharding.shards_gradients else 1
            for chunk, size in zip(m.chunks, m.gradient_bytes, strict=True):
                device[chunk.backward[1] - 1] += 3 * size / kept / m.timed.chip.bandwidth
        return device

    @cached_property
    def parts(self) -> NDArray[np.str_]:
        """The line of the breakdown of each operator."""
        phases = [segment.phase for segment in self.module.workload.segments]
        return np.array([PARTS.get(phase, phase) for phase in phases])[self.step.segment]

    def piece(self, name: str, part: str, first: int, last: int) -> Label:
        """Operators one after another as one task."""
        parts, device = self.parts[first:last], self.device[first:last]
        return replace(
            _stretch(name, part, self.module.seconds[0][first:last], device),
            parts={str(line): float(device[parts == line].sum()) for line in np.unique(parts)},
            reads_back=bool((self.step.syncs == last - 1).any()),
            body=self._in_detail(first, last) if self.module.detailed else None,
        )

    def _in_detail(self, first: int, last: int) -> Program:
        """Operators as a program of their own, for a trace."""
        builder = Builder()
        stream, device = builder.stream(0), self.device.tolist()
        for op, seconds in zip(self.module.operators[first:last], device[first:last], strict=True):
            builder.add(stream, Label(op.name, op.phase, seconds, details=details(op)))
        return builder.build()

    # -- passes ------------------------------------------------------------------------------------

    def passed(self, number: int, kind: str) -> Pass:
        """One direction of one micro-batch through a chunk."""
        part, edges = "forward" if kind == "F" else "backward", self.edges[number, kind != "F"]
        moved = tuple(_located(transfer, edges) for transfer in self.sharded(number, kind))
        weight_s = self._weight_s(number) if kind in "IW" else 0.0
        if kind == "W":
            return Pass(kind, (Label("weight gradients", part, weight_s),), moved)
        pieces = (self.piece(f"{part} of chunk {number}", part, *edge) for edge in pairwise(edges))
        return Pass(kind, tuple(pieces), moved, weight_s)

    def _weight_s(self, number: int) -> float:
        """Seconds of a chunk's backward pass that a schedule may put off: gradients of weights."""
        products = self.module.timed.packed.kinds.map(lambda kind: float(kind in ("gemm", "conv")))
        own = self.device * products[self.step.index] * (self.parts == "backward")
        return WEIGHT_SHARE * float(own[slice(*self.module.chunks[number].backward)].sum())

    def sharded(self, number: int, kind: str) -> tuple[Transfer, ...]:
        """Gathers and scatters of a chunk's blocks; places are operators."""
        m, found = self.module, list[ShardedBlock]()
        if not m.plan.sharding.shards_parameters:
            return ()
        for size, forward, backward in m.units[number]:
            gathered, (first, end) = size * m.gathered_share, forward if kind == "F" else backward
            found.append(ShardedBlock(gathered=gathered, scattered=float(size), first=first, end=end))
        root, *blocks = found
        blocks.sort(key=lambda block: block.first)
        return sharded.transfers(m.mesh, kind, root, blocks, REDUCTION)

    # -- the step ----------------------------------------------------------------------------------

    @cached_property
    def roles(self) -> list[Role]:
        """What each stage does besides its passes; places are operators."""
        chunks, messages = self.module.mesh.chunks, self.module.messages
        return [exchange.role(chunks(rank), mine, self.update(rank)) for rank, mine in enumerate(messages)]

    def update(self, rank: int) -> Label:
        """The update of a stage's parameters, or of a rank's share of them, and copies into buckets."""
        m, first = self.module, self.module.layout.update
        mine = m.in_stage(m.gradient_bytes, rank)
        stage = mine / max(1, sum(m.gradient_bytes))
        whole, latency = self.device[first:], m.timed.costs.latency_s[self.step.index[first:]]
        fixed = np.minimum(whole, latency)
        device = stage * (fixed + (whole - fixed) * m.update_share)
        device[:1] += m.reduces_whole * 2 * m.style.copies * mine / m.timed.chip.bandwidth
        label = _stretch("update", "optimizer", stage * m.seconds[0][first:], device)
        shown = m.detailed and m.plan.pp == 1
        return replace(label, body=self._in_detail(first, len(self.device)) if shown else None)

    @cached_property
    def edges(self) -> dict[tuple[int, bool], Edges]:
        """Where the passes of each chunk, forward and backward (True), are cut: where something is released,
        waited for or read back.
        """
        out = {}
        for number, chunk in enumerate(self.module.chunks):
            for back, (first, last) in ((False, chunk.forward), (True, chunk.backward)):
                of_step = chain(*(role.reduces if back else role.gathers for role in self.roles))
                waits = [*(t for t in of_step if t.chunk == number), *self.sharded(number, "FB"[back])]
                places = {place for transfer in waits for place in (transfer.release, transfer.needed)}
                places.update((self.step.syncs + 1).tolist())
                out[number, back] = [first, *sorted(place for place in places if first < place < last), last]
        return out

    def _in_pieces(self, role: Role) -> Role:
        """A role whose places are pieces."""
        return replace(
            role,
            reduces=tuple(_located(t, self.edges[t.chunk, True]) for t in role.reduces),
            gathers=tuple(_located(t, self.edges[t.chunk, False]) for t in role.gathers),
        )


def _stretch(name: str, part: str, issue: Array, device: Array) -> Label:
    """Operators one after another: seconds of the device, and of the host to issue them; the last of them
    ends no sooner than any operator, once issued, and all behind it have run.
    """
    if not len(device):
        return Label(name, part, 0.0)
    issued, left = np.cumsum(issue), np.cumsum(device[::-1])[::-1]
    host_s = float(issued[-1])
    drain_s = float((issued + left).max()) - host_s
    return Label(name, part, float(left[0]), host_s=host_s, drain_s=drain_s)


def _located(transfer: Transfer, edges: Sequence[int]) -> Transfer:
    """A transfer between operators as one between pieces, which lie between edges."""
    release, needed = (
        place if place == END else bisect_left(edges, place, hi=len(edges) - 1)
        for place in (transfer.release, transfer.needed)
    )
    return replace(transfer, release=release, needed=END if needed == len(edges) - 1 else needed)
