"""What the ranks of a transformer do, from its sizes under a plan: layers and ends one after another
(`predict/pieces.py`), gathers of sharded parameters a layer ahead and gradients scattered behind; or
gradients reduced in buckets as they become ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.predict import exchange, sharded
from paceline.predict.rounds import enough
from paceline.predict.sharded import ShardedBlock
from paceline.predict.stages import ChunkLayers
from paceline.sim.program import Label
from paceline.sim.schedules import actions, kinds
from paceline.sim.work import GATHERS, REDUCTION, TRANSFERS, Exchange, Pass, Role, StepWork, Transfer
from paceline.sync.way import Gradient, Place, Side

if TYPE_CHECKING:
    from paceline.predict.distributed import TransformerStep

#: ways of a piece by kind of action
WAYS = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The ranks of a transformer's step."""

    step: TransformerStep
    #: by layers, embedding and head of a chunk, and kind of action
    _passes: dict[tuple[int, bool, bool, str], Pass] = field(default_factory=dict)

    def work(self) -> StepWork:
        s, f = self.step, self.step.framework
        return StepWork(
            title=f"{s.model.name} on {s.cluster.name}",
            roles=tuple(self.role(rank, mine) for rank, mine in enumerate(s.parts.chunks)),
            passes={
                (chunk[0], kind): self.passed(chunk, kind)
                for mine in s.parts.chunks
                for chunk in mine
                for kind in kinds(s.plan.schedule)
            },
            hops=dict.fromkeys(range(self.last), self.labels(s.sent.hop, TRANSFERS)),
            hops_overlap=f.p2p_overlap,
            tied=self.labels(s.sent.tied, REDUCTION),
            before=Label("data", "host", f.micro_batch_s) if f.micro_batch_s else None,
            after=Label("data", "host", f.step_s) if f.step_s else None,
            contention=f.contention,
            share=s.mesh.share,
        )

    @property
    def last(self) -> int:
        """The number of the last chunk."""
        return sum(map(len, self.step.parts.chunks)) - 1

    def labels(self, exchanges: Sequence[Exchange], part: str) -> tuple[Label, ...]:
        """Collectives that are timed."""
        return tuple(self.step.mesh.label(sent, part) for sent in exchanges)

    def piece(self, name: str) -> Label:
        """The embedding, a layer or the head in one direction, as one task."""
        return self.step.tasks.piece(name)

    # -- passes ------------------------------------------------------------------------------------

    def names(self, chunk: ChunkLayers) -> list[str]:
        """The parts of the model in a chunk, in order."""
        number, layers = chunk
        return ["embedding"] * (number == 0) + ["layer"] * layers + ["head"] * (number == self.last)

    def passed(self, chunk: ChunkLayers, kind: str) -> Pass:
        """One direction of one micro-batch through a chunk; of equal chunks one and the same."""
        number, layers = chunk
        key = layers, number == 0, number == self.last, kind
        if key not in self._passes:
            names = self.names(chunk) if kind == "F" else self.names(chunk)[::-1]
            self._passes[key] = Pass(
                kind,
                tuple(self.piece(f"{name}.{WAYS[kind]}") for name in names),
                self._sharded(names, kind) if self.step.sent.sharded else (),
                self.step.tasks.put_off_s(layers) if kind == "I" else 0.0,
            )
        return self._passes[key]

    def _sharded(self, names: Sequence[str], kind: str) -> tuple[Transfer, ...]:
        """Gathers and scatters of layers, and of the ends at once."""
        parts, root = self.step.parts, None
        ends = parts.ends("embedding" in names, "head" in names)
        if ends:
            root = self._block(ends, min(n for n, name in enumerate(names) if name != "layer"))
        blocks = [self._block(parts.layer, n) for n, name in enumerate(names) if name == "layer"]
        return sharded.transfers(self.step.plan, kind, root, blocks)

    def _block(self, parameters: float, place: int) -> ShardedBlock:
        sent = self.step.sent
        return ShardedBlock(
            gathers=self.labels(sent.unshard(parameters), GATHERS),
            scatters=self.labels(sent.scatter(parameters), GATHERS),
            first=place,
            end=place + 1,
        )

    # -- the step ----------------------------------------------------------------------------------

    def role(self, rank: int, mine: Sequence[ChunkLayers]) -> Role:
        """What the ranks of a stage do besides their passes."""
        s, chunks = self.step, tuple(number for number, _ in mine)
        update = Label("update", "optimizer", s.update_s)
        if not s.sent.replicated:
            return Role(chunks=chunks, update=(update,))
        gradients, backward_s = self._gradients(rank, mine)
        side = Side(mesh=s.mesh, chip=s.timed.chip, timing=s.sent.buckets, backward_s=backward_s)
        return exchange.role(chunks, tuple(s.way.messages(side, gradients)), update)

    def _gradients(self, rank: int, mine: Sequence[ChunkLayers]) -> tuple[list[Gradient], float]:
        """Those of a stage's tensors, in the order in which the model lists them, and the seconds of its
        backward passes.
        """
        out, at = list[Gradient](), 0.0
        tensors = {name: self.step.parts.tensors(name)[::-1] for name in ("embedding", "layer", "head")}
        for chunk in self._completed(rank, mine):
            names = self.names(chunk)
            for n in reversed(range(len(names))):
                at += self.piece(f"{names[n]}.backward").seconds
                ready, needed = (chunk[0], len(names) - n), (chunk[0], n)
                out += [
                    self._gradient(turn, *tensor, ready, needed, at)
                    for turn, tensor in enumerate(tensors[names[n]], len(out))
                ]
        return out[::-1], at

    def _gradient(
        self, turn: int, count: float, experts: bool, ready: Place, needed: Place, ready_s: float
    ) -> Gradient:
        """That of a tensor with so many parameters on one rank."""
        s, (chunk, piece) = self.step, needed
        return Gradient(
            name=f"{chunk}.{piece}.{turn}",
            shape=_shape(count, s.model.hidden),
            bytes=count * s.sent.gradient_bytes,
            parameter_bytes=count * s.sent.parameter_bytes,
            turn=turn,
            ready=ready,
            needed=needed,
            ready_s=ready_s,
            axis="expert-dp" if experts else "dp",
            layer=f"{chunk}.{piece}",
        )

    def _completed(self, rank: int, mine: Sequence[ChunkLayers]) -> list[ChunkLayers]:
        """The chunks of a stage in the order in which their gradients are complete."""
        p = self.step.plan
        order = actions(p.schedule, rank, p.pp, min(p.micro_batches, enough(p)), p.vpp)
        last = {action.chunk: i for i, action in enumerate(order) if action.kind in "BW"}
        return sorted(mine, key=lambda chunk: last[chunk[0]])


def _shape(count: float, hidden: int) -> tuple[int, ...]:
    """A tensor of so many elements as a matrix, where it is one."""
    number = int(count)
    return (number // hidden, hidden) if number > hidden and number % hidden == 0 else (number,)
