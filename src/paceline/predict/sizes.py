"""What the ranks of a transformer do, from its sizes under a plan: layers and ends one after another
(`predict/pieces.py`), gathers of sharded parameters a layer ahead and gradients scattered behind; or
gradients reduced in buckets as they become ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.predict import exchange, sharded
from paceline.predict.program import enough
from paceline.predict.sharded import ShardedBlock
from paceline.predict.stages import ChunkLayers
from paceline.sim.program import Label
from paceline.sim.schedules import actions, kinds
from paceline.sim.work import GATHERS, REDUCTION, TRANSFERS, Pass, Role, StepWork, Transfer
from paceline.sync.way import Gradient, Message, Side

if TYPE_CHECKING:
    from paceline.predict.distributed import TransformerStep

#: ways of a piece by kind of action
WAYS = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The ranks of a transformer's step."""

    step: TransformerStep
    #: by parts of the model in a chunk, and kind of action
    _passes: dict[tuple[str, ...], Pass] = field(default_factory=dict)

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
            hops=dict.fromkeys(range(self.last), s.mesh.labels(s.sent.hop, TRANSFERS)),
            hops_overlap=f.p2p_overlap,
            tied=s.mesh.labels(s.sent.tied, REDUCTION),
            before=Label("data", "host", f.micro_batch_s) if f.micro_batch_s else None,
            after=Label("data", "host", f.step_s) if f.step_s else None,
            contention=f.contention,
            share=s.mesh.share,
        )

    @property
    def last(self) -> int:
        """The number of the last chunk."""
        return sum(map(len, self.step.parts.chunks)) - 1

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
        names = self.names(chunk)[:: 1 if kind == "F" else -1]
        key = (*names, kind)
        if key not in self._passes:
            pieces = tuple(self.piece(f"{name}.{WAYS[kind]}") for name in names)
            put_off_s = self.step.tasks.put_off_s(chunk[1]) if kind == "I" else 0.0
            self._passes[key] = Pass(kind, pieces, self._sharded(names, kind), put_off_s)
        return self._passes[key]

    def _sharded(self, names: Sequence[str], kind: str) -> tuple[Transfer, ...]:
        """Gathers and scatters of layers, and of the ends at once."""
        parts, root = self.step.parts, None
        if not self.step.sent.sharded:
            return ()
        ends = parts.ends("embedding" in names, "head" in names)
        if ends:
            root = self._block(ends, min(n for n, name in enumerate(names) if name != "layer"))
        blocks = [self._block(parts.layer, n) for n, name in enumerate(names) if name == "layer"]
        return sharded.transfers(self.step.mesh, kind, root, blocks, GATHERS)

    def _block(self, parameters: float, place: int) -> ShardedBlock:
        sent, trained = self.step.sent, not self.step.plan.adapters
        return ShardedBlock(
            gathered=parameters * sent.parameter_bytes,
            scattered=parameters * sent.gradient_bytes * trained,
            first=place,
            end=place + 1,
        )

    # -- the step ----------------------------------------------------------------------------------

    def role(self, rank: int, mine: Sequence[ChunkLayers]) -> Role:
        """What the ranks of a stage do besides their passes."""
        s, messages = self.step, tuple[Message, ...]()
        if s.sent.replicated:
            gradients = self._gradients(self._completed(rank, mine))
            backward_s = max((gradient.ready_s for gradient in gradients), default=0.0)
            side = Side(mesh=s.mesh, chip=s.timed.chip, timing=s.sent.buckets, backward_s=backward_s)
            messages = tuple(s.way.messages(side, gradients))
        update = Label("update", "optimizer", s.update_s)
        return exchange.role(tuple(number for number, _ in mine), messages, update)

    def _gradients(self, chunks: Sequence[ChunkLayers]) -> list[Gradient]:
        """Those of the tensors of a stage, the last first; they become complete while nothing is in the
        way.
        """
        s, at, found = self.step, 0.0, list[Gradient]()
        for chunk, layers in chunks:
            names = self.names((chunk, layers))
            for n in reversed(range(len(names))):
                at += self.piece(f"{names[n]}.backward").seconds
                for count, experts in s.parts.tensors(names[n])[::-1]:
                    gradient = Gradient(
                        name=f"{chunk}.{n}.{len(found)}",
                        shape=_shape(count, s.model.hidden),
                        bytes=count * s.sent.gradient_bytes,
                        parameter_bytes=count * s.sent.parameter_bytes,
                        turn=len(found),
                        ready=(chunk, len(names) - n),
                        needed=(chunk, n),
                        ready_s=at,
                        axis="expert-dp" if experts else "dp",
                        layer=f"{chunk}.{n}",
                    )
                    found.append(gradient)
        return found[::-1]

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
