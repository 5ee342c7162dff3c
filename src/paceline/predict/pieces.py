"""The embedding, a layer and the head of a transformer on one rank, each in one direction as a task, whose
operators and collectives the event engine has run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from paceline.cost.host_link import link_rate
from paceline.cost.pieces import LAYER, TimedPieces
from paceline.cost.tape import LayerCollective, Shape, TapePiece
from paceline.cost.transformer import saved_bytes
from paceline.sim import engine
from paceline.sim.mesh import Mesh
from paceline.sim.program import JOIN, Builder, Label, Program
from paceline.sim.work import TITLES
from paceline.spec.framework import Framework
from paceline.spec.vocabulary import Offload, Recompute

#: operators of a piece in a row, with collectives that they wait for, and those beside them
Stretch = tuple[Sequence[LayerCollective], Sequence[int], Sequence[LayerCollective]]


def stretches(piece: TapePiece) -> Iterator[Stretch]:
    """The operators of a piece from one collective to the next."""
    alone = sorted((c for c in piece.collectives if not c.behind), key=lambda c: c.at)
    edges = {*((c.behind or (c.at,))[0] for c in piece.collectives), len(piece.ops)}
    before, at = -1, 0
    while at < len(piece.ops):
        beside = [c for c in piece.collectives if c.behind[:1] == (at,)]
        ops = beside[0].behind if beside else range(at, min(edge for edge in edges if edge > at))
        yield [c for c in alone if before < c.at <= at], ops, beside
        before, at = at, at + len(ops)
    yield [c for c in alone if c.at > before], (), ()


@dataclass(frozen=True, slots=True)
class PieceTasks:
    """Pieces of a transformer as tasks of one rank."""

    timed: TimedPieces
    mesh: Mesh
    framework: Framework
    shape: Shape
    _made: dict[str, Label] = field(default_factory=dict, compare=False)

    def piece(self, name: str) -> Label:
        """A piece; a layer's backward pass with what it runs again."""
        if name not in self._made:
            make = self._put_off if name.endswith("weight") else self._piece
            self._made[name] = make(name)
        return self._made[name]

    def put_off_s(self, layers: int) -> float:
        """Seconds of the products of weights' gradients of so many layers; the ends do not put theirs off."""
        return self.timed.pieces["layer.backward"].weight_s * layers

    def _put_off(self, name: str) -> Label:
        return Label(name, "backward", self.put_off_s(name == "layer.weight"))

    def _piece(self, name: str) -> Label:
        builder, part = Builder(), name.rpartition(".")[2]
        runs, host_s = [(name, part)], 0.0
        again = self.mesh.plan.recompute if name == "layer.backward" else Recompute.NONE
        if again is Recompute.FULL:
            runs.insert(0, (LAYER, "recomputation"))
        elif again is Recompute.SELECTIVE:
            host_s = self._again(builder)
        for run in runs:
            self._operators(builder, *run)
        wait_s = sum(self.wait(each) for each, _ in runs)
        host_s += sum(self.timed.host_s(each) for each, _ in runs)
        if self.framework.blocking:  # the host waits for every kernel before it issues the next
            wait_s, host_s = host_s, 0.0
        body = builder.build()
        return self._label(Label(name, part, wait_s, host_s=host_s, body=body), body)

    def _label(self, waits: Label, body: Program) -> Label:
        """What the event engine finds of a piece, with the seconds in which its device waits for the host."""
        found, lack = engine.run(body, self.framework.contention), 0.0
        seconds = found.seconds + waits.seconds
        if waits.name.startswith("layer"):
            lack = max(0.0, self.copying_s - max(seconds, waits.host_s))
        more = {line: late for line, late in (("host", waits.seconds), (TITLES["host"], lack)) if late}
        return replace(waits, seconds=seconds + lack, parts={**engine.breakdown(body, found), **more})

    def _again(self, builder: Builder) -> float:
        """What a selective recomputation runs again; the host's seconds to issue it."""
        again = self.timed.again(Recompute.SELECTIVE)
        seconds = float(self.timed.device_s(LAYER)[again].sum())
        builder.add(builder.stream(0), Label(LAYER, "recomputation", seconds))
        return float(self.timed.issue(LAYER)[again].sum())

    # -- the host ----------------------------------------------------------------------------------

    def wait(self, name: str) -> float:
        """Seconds that the device waits in a piece for a host that could not run ahead of it."""
        timed, start = self.timed.pieces[name], self.timed.pieces[name].piece.sync
        if start < 0 or self.framework.blocking:
            return 0.0
        sent = sum(self._send_s(c) for c in timed.piece.collectives if c.at >= start and not c.behind)
        return max(0.0, float(self.timed.issue(name)[start:].sum() - timed.each[start:].sum()) - sent)

    @property
    def host_Bps(self) -> float:
        """Bytes per second between a device and its host's memory while all devices of a node copy."""
        return link_rate(self.mesh.cluster.device, self.mesh.cluster.node_devices)

    @property
    def copying_s(self) -> float:
        """Seconds to copy what a layer saves to the host's memory, or back."""
        if self.mesh.plan.offload is not Offload.ACTIVATIONS:
            return 0.0
        return saved_bytes(self.shape, self.mesh.plan.recompute) / self.host_Bps

    # -- operators and collectives -----------------------------------------------------------------

    def _operators(self, builder: Builder, name: str, part: str) -> None:
        device, seconds = builder.stream(0), self.timed.device_s(name)
        for ahead, ops, beside in stretches(self.timed.pieces[name].piece):
            for collective in ahead:
                self._send(builder, collective, 1.0)
            # the first of several parts cannot hide
            exposed = [(c, 1 / c.parts if c.parts > 1 else 0.0) for c in beside]
            hidden = [task for c, share in exposed for task in self._send(builder, c, share)]
            if ops:
                builder.add(device, Label(name, part, float(seconds[list(ops)].sum())))
            if beside:
                builder.add(device, JOIN, hidden)

    def _send(self, builder: Builder, c: LayerCollective, awaited: float) -> list[int]:
        """A collective after what the device has done so far, which waits for a share of it; the task of the
        rest. One of both is counted.
        """
        device, stream = builder.stream(0), builder.stream(0, c.axis)
        seconds, sent = self._send_s(c), (c.op, c.size)
        if not seconds:
            return []

        def add(share: float) -> list[int]:
            label = Label(c.op, TITLES[c.axis], share * seconds, *sent, c.axis, crowds=True)
            return [builder.add(stream, label, builder.last(device))]

        if awaited:
            builder.add(device, JOIN, add(awaited))
            sent = "", 0.0
        return add(1 - awaited) if awaited < 1 else []

    def _send_s(self, c: LayerCollective) -> float:
        return self.mesh.send(c.op, c.size, c.axis)
