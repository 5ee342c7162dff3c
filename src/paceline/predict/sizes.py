"""What the ranks of a transformer do, from its sizes under a plan (`predict/distributed.py` has what they are
timed by).

Pieces are layers, the embedding and the head, each a program of operators and collectives of its own, whose
seconds the event engine finds. Around them come gathers of sharded parameters, a layer ahead, and gradients
scattered behind; or gradients reduced in buckets as they become ready.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from paceline.cost.tape import Piece
from paceline.cost.transformer import Collective
from paceline.predict import exchange, sharded
from paceline.predict.distributed import Step
from paceline.predict.rounds import enough
from paceline.predict.sharded import ShardedBlock
from paceline.sim import engine
from paceline.sim.program import JOIN, Builder, Label
from paceline.sim.schedules import actions
from paceline.sim.work import GATHERS, REDUCTION, TITLES, TRANSFERS, Exchange, Pass, Role, StepWork, Transfer
from paceline.spec import schedules
from paceline.spec.workload import ITEMSIZE
from paceline.sync.way import Gradient, Side

#: ways of a piece by kind of action
WAYS = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}


def from_sizes(step: Step) -> StepWork:
    """What the ranks of a step do."""
    return Sizes(step).work()


class Stretch(NamedTuple):
    """A stretch of a piece's operators: collectives that they wait for, and those beside them."""

    ahead: Sequence[Collective]
    ops: Sequence[int]
    beside: Sequence[Collective]


def segments(piece: Piece) -> Iterator[Stretch]:
    """The operators of a piece from one collective to the next."""
    beside: dict[int, list[Collective]] = defaultdict(list)
    alone = sorted((c for c in piece.collectives if not c.behind), key=lambda c: c.at)
    for collective in piece.collectives:
        if collective.behind:
            beside[collective.behind[0]].append(collective)
    edges = sorted({*beside, *(c.at for c in alone), len(piece.ops)})
    at = 0
    while at < len(piece.ops):
        ahead = [c for c in alone if c.at <= at]
        alone = alone[len(ahead) :]
        near = beside.get(at, [])
        ops = near[0].behind if near else range(at, next(edge for edge in edges if edge > at))
        yield Stretch(ahead, ops, near)
        at += len(ops)
    if alone:
        yield Stretch(alone, (), ())


@dataclass
class Sizes:
    step: Step
    _made: dict[tuple[object, ...], Label] = field(default_factory=dict)
    _passes: dict[tuple[object, ...], Pass] = field(default_factory=dict)

    def work(self) -> StepWork:
        s, f = self.step, self.step.framework
        chunks = [chunk for mine in s.chunks() for chunk in mine]
        kinds = "FBIW" if schedules.get(s.plan.schedule).splits else "FB"
        return StepWork(
            title=f"{s.model.name} on {s.cluster.name}",
            roles=tuple(self.role(rank, mine) for rank, mine in enumerate(s.chunks())),
            passes={
                (chunk, kind): self.passed(chunk, layers, kind) for chunk, layers in chunks for kind in kinds
            },
            hops=dict.fromkeys(range(self.last), self.labels(s.hop, TRANSFERS)),
            hops_overlap=f.p2p_overlap,
            tied=self.labels(s.tied, REDUCTION),
            before=Label("data", "host", f.micro_batch_s) if f.micro_batch_s else None,
            after=Label("data", "host", f.step_s) if f.step_s else None,
            contention=f.contention,
            share=s.mesh.share,
        )

    @property
    def last(self) -> int:
        """The number of the last chunk."""
        p = self.step.plan
        return p.pp * schedules.get(p.schedule).chunks_per_rank(p.vpp) - 1

    def once(self, key: tuple[object, ...], make: Callable[[], Label]) -> Label:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def labels(self, exchanges: Sequence[Exchange], part: str) -> tuple[Label, ...]:
        """Collectives that are timed."""
        return tuple(self.step.mesh.label(sent, part) for sent in exchanges)

    # -- pieces ------------------------------------------------------------------------------------

    def piece(self, name: str) -> Label:
        """The embedding, a layer or the head in one direction, as one task; a layer's backward pass with what
        it runs again.
        """
        way = name.rpartition(".")[2]
        if way == "weight":  # a layer's products of gradients, put off; the ends keep theirs
            seconds = self.step.pieces["layer.backward"].weight_s if name == "layer.weight" else 0.0
            return self.once((name,), lambda: Label(name, "backward", seconds))
        return self.once((name,), lambda: self._piece(name, way))

    def _piece(self, name: str, way: str) -> Label:
        s, builder = self.step, Builder()
        host_s, wait_s = s.host_s(name), s.wait(name)
        if name == "layer.backward" and s.plan.recompute != "none":
            host_s, wait_s = host_s + self._again(builder), wait_s + s.wait_again
        self._operators(builder, name, way)
        body = builder.build()
        found = engine.run(body, s.framework.contention)
        if s.framework.blocking:  # the host waits for every kernel before it issues the next
            wait_s, host_s = host_s, 0.0
        seconds = found.seconds + wait_s
        lack = max(0.0, s.copying_s - max(seconds, host_s)) if name.startswith("layer") else 0.0
        waits = {part: more for part, more in (("host", wait_s), (TITLES["host"], lack)) if more}
        parts = {**engine.breakdown(body, found), **waits}
        return Label(name, way, seconds + lack, host_s=host_s, body=body, parts=parts)

    def _again(self, builder: Builder) -> float:
        """What a backward pass runs again of the forward pass; the host's seconds to issue it."""
        s, name, part = self.step, "layer.forward", "recomputation"
        if s.plan.recompute == "full":
            self._operators(builder, name, part)
            return s.host_s(name)
        again = s.again()
        builder.add(builder.stream(0), Label(name, part, float(s.device_s(name)[again].sum())))
        return float(s.issue(name)[again].sum())

    def _operators(self, builder: Builder, name: str, part: str) -> None:
        """Operators and collectives of a piece."""
        device, seconds = builder.stream(0), self.step.device_s(name)
        for segment in segments(self.step.pieces[name].piece):
            for collective in segment.ahead:
                self._wait(builder, self._collective(builder, collective, 1.0))
            beside = [task for c in segment.beside for task in self._beside(builder, c)]
            if segment.ops:
                builder.add(device, Label(name, part, float(seconds[list(segment.ops)].sum())))
            if segment.beside:
                builder.add(device, JOIN, beside)

    def _beside(self, builder: Builder, collective: Collective) -> list[int]:
        """A collective beside the operators that follow; the first of several parts cannot hide."""
        first = 1 / collective.parts if collective.parts > 1 else 0.0
        if first:
            self._wait(builder, self._collective(builder, collective, first))
        return self._collective(builder, collective, 1 - first, rest=bool(first))

    def _collective(self, builder: Builder, c: Collective, share: float, rest: bool = False) -> list[int]:
        """A share of a collective, after what the device has done so far."""
        seconds = self.step.mesh.send(c.op, c.size, c.axis)
        if not seconds:
            return []
        label = Label(c.op, TITLES[c.axis], share * seconds, c.op, c.size, c.axis, crowds=True)
        if rest:  # it is counted once
            label = replace(label, op="", size=0.0)
        return [builder.add(builder.stream(0, c.axis), label, builder.last(builder.stream(0)))]

    def _wait(self, builder: Builder, tasks: Sequence[int]) -> None:
        if tasks:
            builder.add(builder.stream(0), JOIN, tasks)

    # -- passes ------------------------------------------------------------------------------------

    def names(self, chunk: int, layers: int, kind: str) -> list[str]:
        """The parts of the model that a pass goes through, in order."""
        parts = [*["embedding"] * (chunk == 0), *["layer"] * layers, *["head"] * (chunk == self.last)]
        return parts if kind == "F" else parts[::-1]

    def passed(self, chunk: int, layers: int, kind: str) -> Pass:
        key = layers, chunk == 0, chunk == self.last, kind
        if key not in self._passes:
            self._passes[key] = self._passed(chunk, layers, kind)
        return self._passes[key]

    def _passed(self, chunk: int, layers: int, kind: str) -> Pass:
        s, names = self.step, self.names(chunk, layers, kind)
        moved = self._sharded(names, kind, chunk) if s.sharded else ()
        later = s.pieces["layer.backward"].weight_s * layers if kind == "I" else 0.0
        return Pass(
            kind,
            tuple(self.piece(f"{name}.{WAYS[kind]}") for name in names),
            tuple(sorted(moved, key=lambda transfer: transfer.release)),
            later,
        )

    def _sharded(self, names: Sequence[str], kind: str, chunk: int) -> Iterator[Transfer]:
        """Gathers and scatters of layers, and of the ends at once."""
        s = self.step
        ends = s.end_parameters(chunk == 0, chunk == self.last)
        places = [n for n, name in enumerate(names) if name == "layer"]
        root = None
        if ends:
            root = self._block(ends, next(n for n, name in enumerate(names) if name != "layer"))
        blocks = [self._block(s.layer_parameters(), n) for n in places]
        return sharded.transfers(s.plan, kind, root, blocks)

    def _block(self, parameters: float, place: int) -> ShardedBlock:
        s = self.step
        gathers, scatters = s.unshard(parameters), s.scatter(parameters)
        return ShardedBlock(
            gathers=self.labels(gathers, GATHERS),
            scatters=self.labels(scatters, GATHERS),
            first=place,
            end=place + 1,
        )

    # -- the step ----------------------------------------------------------------------------------

    def role(self, rank: int, mine: Sequence[tuple[int, int]]) -> Role:
        """What the ranks of a stage do besides their passes."""
        s, chunks = self.step, tuple(chunk for chunk, _ in mine)
        update = self.once(("update",), lambda: Label("update", "optimizer", s.update_s))
        if not s.replicated:
            return Role(chunks=chunks, update=(update,))
        backward_s = sum(self._backward_s(*chunk) for chunk in mine)
        side = Side(mesh=s.mesh, chip=s.chip, timing=s.timing, backward_s=backward_s)
        return exchange.role(chunks, tuple(s.way.messages(side, self._gradients(rank, mine))), update)

    def _backward_s(self, chunk: int, layers: int) -> float:
        return sum(self.piece(f"{name}.backward").seconds for name in self.names(chunk, layers, "B"))

    def _gradients(self, rank: int, mine: Sequence[tuple[int, int]]) -> list[Gradient]:
        """Those of a stage's tensors, in the order in which the model lists them."""
        s, low, hidden = self.step, ITEMSIZE[self.step.shape.dtype], self.step.model.hidden
        complete = self._completed(rank, mine)
        out: list[Gradient] = []
        turn, at = sum(len(s.tensors(name)) for c, layers in mine for name in self.names(c, layers, "F")), 0.0
        for chunk, layers in reversed(complete):
            at += self._backward_s(chunk, layers)
        for chunk, layers in reversed(complete):
            names = self.names(chunk, layers, "F")
            for n, name in enumerate(names):
                for count, experts in s.tensors(name):
                    turn -= 1
                    out.append(
                        Gradient(
                            name=f"{chunk}.{n}.{turn}",
                            shape=_shape(count, hidden),
                            bytes=count * s.gradient_bytes,
                            parameter_bytes=count * low,
                            turn=turn,
                            ready=(chunk, len(names) - n),
                            needed=(chunk, n),
                            ready_s=at,
                            axis="expert-dp" if experts else "dp",
                            layer=f"{chunk}.{n}",
                        )
                    )
                at -= self.piece(f"{name}.backward").seconds
        return out

    def _completed(self, rank: int, mine: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """The chunks of a stage in the order in which their gradients are complete."""
        p = self.step.plan
        order = actions(p.schedule, rank, p.pp, min(p.micro_batches, enough(p)), p.vpp)
        last = {action.chunk: i for i, action in enumerate(order) if action.kind in "BW"}
        return sorted(mine, key=lambda chunk: last[chunk[0]])


def _shape(count: float, hidden: int) -> tuple[int, ...]:
    """A tensor of so many elements as a matrix, where it is one."""
    number = int(count)
    return (number // hidden, hidden) if number > hidden and number % hidden == 0 else (number,)
