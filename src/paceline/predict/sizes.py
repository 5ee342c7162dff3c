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
from paceline.predict.distributed import Step
from paceline.predict.rank import (
    END,
    GATHERS,
    REDUCTION,
    TITLES,
    TRANSFERS,
    Exchange,
    Pass,
    Role,
    Transfer,
    Work,
)
from paceline.predict.rounds import enough
from paceline.sim import engine
from paceline.sim.program import JOIN, Builder, Label, buckets
from paceline.sim.schedules import actions
from paceline.spec import schedules

#: ways of a piece by kind of action
WAYS = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}


def from_sizes(step: Step) -> Work:
    """What the ranks of a step do."""
    return Sizes(step).work()


class Segment(NamedTuple):
    """A stretch of a piece's operators: collectives that they wait for, and those beside them."""

    ahead: Sequence[Collective]
    ops: Sequence[int]
    beside: Sequence[Collective]


def segments(piece: Piece) -> Iterator[Segment]:
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
        yield Segment(ahead, ops, near)
        at += len(ops)
    if alone:
        yield Segment(alone, (), ())


class Tensor(NamedTuple):
    """A parameter tensor on one rank: elements, whether they are experts', and the piece that uses it."""

    elements: float
    experts: bool
    chunk: int
    piece: int


class Bucket(NamedTuple):
    """Parameters that are exchanged at once."""

    dense: float
    experts: float
    tensors: tuple[Tensor, ...]
    #: its last one among all
    place: int


@dataclass
class Sizes:
    step: Step
    _made: dict[tuple[object, ...], Label] = field(default_factory=dict)
    _passes: dict[tuple[object, ...], Pass] = field(default_factory=dict)

    def work(self) -> Work:
        s, f = self.step, self.step.framework
        chunks = [chunk for mine in s.chunks() for chunk in mine]
        kinds = "FBIW" if schedules.get(s.plan.schedule).splits else "FB"
        return Work(
            title=f"{s.model.name} on {s.cluster.name}",
            roles=tuple(self.role(rank, mine) for rank, mine in enumerate(s.chunks())),
            passes={
                (chunk, kind): self.passed(chunk, layers, kind) for chunk, layers in chunks for kind in kinds
            },
            hops=dict.fromkeys(range(self.last), self.labels(s.hop, TRANSFERS, crowds=False)),
            hops_overlap=f.p2p_overlap,
            tied=self.labels(s.tied, REDUCTION),
            before=Label("data", "host", f.micro_batch_s) if f.micro_batch_s else None,
            after=Label("data", "host", f.step_s) if f.step_s else None,
            contention=f.contention,
            share=s.share,
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

    def labels(self, exchanges: Sequence[Exchange], part: str, crowds: bool = True) -> tuple[Label, ...]:
        """Collectives that are timed."""
        return tuple(self.label(exchange, part, crowds) for exchange in exchanges)

    def label(self, exchange: Exchange, part: str, crowds: bool) -> Label:
        op, size, axis = exchange

        def make() -> Label:
            return Label(op, part, self.step.send(op, size, axis), op, size, axis, crowds)

        return self.once((exchange, part, crowds), make)

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
        seconds = self.step.send(c.op, c.size, c.axis)
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
        sharded: list[Transfer] = []
        if s.sharded:
            ends = s.end_parameters(chunk == 0, chunk == self.last)
            sharded = [*self._scattered(names, kind, ends), *self._gathered(names, kind, ends)]
        later = self.step.pieces["layer.backward"].weight_s * layers if kind == "I" else 0.0
        return Pass(
            kind,
            tuple(self.piece(f"{name}.{WAYS[kind]}") for name in names),
            tuple(sorted(sharded, key=lambda transfer: transfer.release)),
            later,
        )

    def _gathered(self, names: Sequence[str], kind: str, ends: float) -> Iterator[Transfer]:
        """Parameters of the ends at once; those of a layer when there is memory for them: when the one before
        those gathered ahead is done.
        """
        s = self.step
        if ends and kind == "F":
            first = min(n for n, name in enumerate(names) if name != "layer")
            yield Transfer(self.labels(s.unshard(ends), GATHERS), 0, first)
        if kind != "F" and not s.plan.reshard:
            return
        places = [n for n, name in enumerate(names) if name == "layer"]
        sends = self.labels(s.unshard(s.layer_parameters()), GATHERS)
        for k, n in enumerate(places):
            over = k - 1 - s.plan.prefetch
            yield Transfer(sends, places[over] + 1 if over >= 0 else 0, n)

    def _scattered(self, names: Sequence[str], kind: str, ends: float) -> Iterator[Transfer]:
        """Gradients behind each layer, and those of the ends behind all."""
        s = self.step
        if kind == "F":
            return
        sends = self.labels(s.scatter(s.layer_parameters()), GATHERS)
        yield from (Transfer(sends, n + 1) for n, name in enumerate(names) if name == "layer")
        if ends:
            yield Transfer(self.labels(s.scatter(ends), GATHERS), END)

    # -- the step ----------------------------------------------------------------------------------

    def role(self, rank: int, mine: Sequence[tuple[int, int]]) -> Role:
        """What the ranks of a stage do besides their passes."""
        s = self.step
        update = (self.once(("update",), lambda: Label("update", "optimizer", s.update_s)),)
        role = Role(chunks=tuple(chunk for chunk, _ in mine), update=update)
        if not s.replicated:
            return role
        overlap, complete = s.framework.dp_overlap, self._completed(rank, mine)
        reduces = tuple(self._reduced(bucket, overlap) for bucket in self._buckets(complete))
        if overlap:
            return replace(role, reduces=reduces, gathers=tuple(self._gathers(mine)))
        counts = [sum(t.elements for t in complete if t.experts == experts) for experts in (False, True)]
        return replace(role, reduces=reduces, regathers=self.labels(s.exchanges(*counts)[1], GATHERS))

    def _reduced(self, bucket: Bucket, overlap: bool) -> Transfer:
        """Reduces gradients when the last of them is complete, or all at the end."""
        sends = self.labels(self.step.exchanges(bucket.dense, bucket.experts)[0], REDUCTION)
        last = bucket.tensors[-1]
        return Transfer(sends, last.piece + 1 if overlap else END, chunk=last.chunk)

    def _gathers(self, mine: Sequence[tuple[int, int]]) -> Iterator[Transfer]:
        """Gathers parameters that the last update left in parts, in the order in which forward passes need
        them.
        """
        for bucket in self._buckets(self._tensors(mine, "F")):
            first = bucket.tensors[0]
            sends = self.labels(self.step.exchanges(bucket.dense, bucket.experts)[1], GATHERS)
            yield Transfer(sends, needed=first.piece, chunk=first.chunk)

    def _tensors(self, mine: Sequence[tuple[int, int]], kind: str) -> list[Tensor]:
        """The tensors of a stage in the order in which passes use them."""
        out = []
        for chunk, layers in mine:
            for n, name in enumerate(self.names(chunk, layers, kind)):
                found = self.step.tensors(name)
                out += [Tensor(*tensor, chunk, n) for tensor in (found if kind == "F" else reversed(found))]
        return out

    def _completed(self, rank: int, mine: Sequence[tuple[int, int]]) -> list[Tensor]:
        """The tensors of a stage in the order in which their gradients are complete."""
        p = self.step.plan
        order = actions(p.schedule, rank, p.pp, min(p.micro_batches, enough(p)), p.vpp)
        last = {action.chunk: i for i, action in enumerate(order) if action.kind in "BW"}
        return self._tensors(sorted(mine, key=lambda chunk: last[chunk[0]]), "B")

    def _buckets(self, tensors: Sequence[Tensor]) -> list[Bucket]:
        """Buckets of parameters, and of experts' parameters, in the order in which they are complete."""
        s, found = self.step, []
        for experts in (False, True):
            places = [i for i, tensor in enumerate(tensors) if tensor.experts == experts]
            sizes = [tensors[i].elements * s.gradient_bytes for i in places]
            for bucket in buckets(sizes, s.bucket_bytes, s.first_bucket_bytes):
                inside = tuple(tensors[places[i]] for i in bucket)
                count = sum(tensor.elements for tensor in inside)
                dense = 0.0 if experts else count
                found.append(Bucket(dense, count - dense, inside, places[bucket[-1]]))
        return sorted(found, key=lambda bucket: bucket.place)
