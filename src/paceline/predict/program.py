"""The program of a step, made from what its ranks do (`sim/work.py`), and what became of it.

    pass    pieces one after another, collectives beside them
    step    passes in the order of the pipeline's schedule, transfers between stages, gradients reduced as
            they become ready, the update

A pass is a program of its own whose seconds are one task of the step. Only what the step can overlap is
written out there: the pieces of the last backward pass, beside which gradients are reduced, and of the first
forward pass, beside which updated parameters are gathered; and all of them where the host runs ahead. Then
the second of two steps is the answer, which the host began during the first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from paceline.predict.rounds import folded
from paceline.sim import engine
from paceline.sim.program import COMPUTE, HOST, JOIN, LAUNCHED, Builder, Label, Program
from paceline.sim.schedules import actions, in_order, sources
from paceline.sim.timeline import Span, Timeline, task_span
from paceline.sim.work import BUBBLE, END, Pass, Role, StepWork, Transfer
from paceline.spec import schedules
from paceline.spec.plan import Plan
from paceline.spec.schedules import Action

#: spans that a trace file holds at most, about; beyond, passes are not written out piece by piece
MOST_SPANS = 150_000
#: streams of collectives: of every micro-batch, and of the step
PASS_STREAM, STEP_STREAM = "shard", "dp"


@dataclass
class Simulation:
    """The work of a plan's ranks as a program, run by the event engine."""

    work: StepWork
    plan: Plan
    _whole: dict[Pass, Label] = field(default_factory=dict)
    _issues: dict[float, Label] = field(default_factory=dict)
    _bodies: dict[Label, engine.Run] = field(default_factory=dict)

    # -- passes ------------------------------------------------------------------------------------

    def whole(self, passed: Pass) -> Label:
        """A pass as one task."""
        if passed not in self._whole:
            self._whole[passed] = self._fold(passed)
        return self._whole[passed]

    def _fold(self, passed: Pass) -> Label:
        builder = Builder()
        self._write(builder, 0, passed)
        body = builder.build()
        found = engine.run(body, self.work.contention, self.work.share)
        parts = engine.breakdown(body, found, idle="host")
        if not passed.put_off_s:
            return Label(passed.name, passed.part, found.seconds, body=body, parts=parts)
        parts = {**parts, passed.part: max(0.0, parts.get(passed.part, 0.0) - passed.put_off_s)}
        return Label(passed.name, passed.part, sum(parts.values()), parts=parts)

    def _write(
        self,
        builder: Builder,
        role: int,
        passed: Pass,
        after: Sequence[int] = (),
        awaited: Mapping[int, Sequence[int]] | None = None,
        micro_batch: int = -1,
        encoders: Mapping[int, Sequence[Label]] | None = None,
    ) -> list[int]:
        """The pieces of a pass, with its collectives ahead of them and behind; returns the task that ends
        each.

        `awaited` are tasks that pieces wait for besides; `encoders` follow so many pieces.
        """
        device = builder.stream(role)
        waits: dict[int, list[int]] = defaultdict(
            list, {n: list(tasks) for n, tasks in (awaited or {}).items()}
        )
        left = list(reversed(passed.transfers))
        begin = () if self.work.runs_ahead else builder.last(device)
        ran = []
        for n, piece in enumerate(passed.pieces):
            self._release(builder, role, left, n, waits)
            ran.append(self._run(builder, role, piece, [*after, *waits[n]], begin, micro_batch))
            for label in (encoders or {}).get(n + 1, ()):
                ran[-1] = builder.add(device, label)
        self._release(builder, role, left, END, waits)
        if passed.transfers:
            ran[-1] = builder.add(device, JOIN, waits[END])
        return ran

    def _release(
        self, builder: Builder, role: int, left: list[Transfer], done: int, waits: dict[int, list[int]]
    ) -> None:
        """Issues the collectives that may start when so many pieces are done."""
        while left and left[-1].release <= done:
            transfer, network = left.pop(), builder.stream(role, PASS_STREAM)
            waits[transfer.needed] += self._send(
                builder, network, transfer.sends, builder.last(builder.stream(role))
            )

    def _run(
        self,
        builder: Builder,
        role: int,
        piece: Label,
        after: Sequence[int],
        begin: Sequence[int] = (),
        micro_batch: int = -1,
    ) -> int:
        """A piece on the device, which starts no sooner than the host gets to it and ends no sooner than the
        host has issued all of it and the last kernels have run.

        The host gets to it no sooner than `begin`.
        """
        device, host = builder.stream(role), builder.stream(role, HOST)
        if not piece.host_s:
            return builder.add(device, piece, after, micro_batch=micro_batch)
        issued = builder.last(host)
        issue = builder.add(host, self._issue(piece.host_s), begin)
        builder.add(device, piece, [*after, *issued], micro_batch=micro_batch)
        if piece.drain_s:
            issue = builder.add(builder.stream(role, LAUNCHED), self._issue(piece.drain_s), [issue])
        end = builder.add(device, JOIN, [issue])
        if piece.reads_back:
            builder.add(host, JOIN, [end])
        return end

    def _issue(self, seconds: float) -> Label:
        return self._issues.setdefault(seconds, Label("issue", "host", seconds))

    def _send(
        self, builder: Builder, stream: int, sends: Sequence[Label], after: Sequence[int], also: int = -1
    ) -> list[int]:
        """Collectives one after another on a stream; the last of them, if there is one."""
        task: list[int] = []
        for label in sends:
            if label.seconds:
                task = [builder.add(stream, label, [*after, *task], also)]
        return task

    # -- the step ----------------------------------------------------------------------------------

    @cached_property
    def program(self) -> Program:
        """Every role, from the first forward pass to the update."""
        builder = Builder()
        if self.work.runs_ahead:
            self._step(builder)
        self._first = len(builder)
        self._step(builder)
        return builder.build()

    def _step(self, builder: Builder) -> None:
        p, roles = self.plan, self.work.roles
        order = [actions(p.schedule, rank, p.pp, p.micro_batches, p.vpp) for rank in range(p.pp)]
        gathered = [self._gather(builder, rank, role) for rank, role in enumerate(roles)]
        last = {
            (rank, action.chunk): action
            for rank, mine in enumerate(order)
            for action in mine
            if action.kind in "BW"
        }
        #: of each pass, what the next chunk waits for; of each chunk, the tasks that end its last pass
        sent: dict[tuple[int, str, int], list[int]] = {}
        ended: dict[int, list[int]] = {}
        for rank, action in in_order(order, self._chunks):
            after = [task for source in sources(action, self._chunks) for task in sent[source]]
            self._before(builder, rank, action)
            waits = gathered[rank].pop(action.chunk, {}) if action.kind == "F" else {}
            reduced = action == last.get((rank, action.chunk)) and self._reduced(rank, action.chunk)
            written = bool(waits) or self.work.runs_ahead or reduced
            encoders = self._encoders(rank, action.chunk) if reduced else {}
            ran = self._pass(builder, rank, action, after, waits if written else None, encoders)
            if action.kind in "BW":
                ended[action.chunk] = ran
            if action.kind != "W":
                sent[action.chunk, action.passes, action.micro_batch] = self._hop(
                    builder, rank, action, ran[-1:]
                )
        self._finish(builder, ended)

    def _pass(
        self,
        builder: Builder,
        rank: int,
        action: Action,
        after: Sequence[int],
        waits: Mapping[int, Sequence[int]] | None,
        encoders: Mapping[int, Sequence[Label]],
    ) -> list[int]:
        """A pass, piece by piece where pieces have something to wait for."""
        passed, i = self.work.passes[action.chunk, action.kind], action.micro_batch
        if waits is not None:
            return self._write(builder, rank, passed, after, waits, i, encoders)
        return [builder.add(builder.stream(rank), self.whole(passed), after, micro_batch=i)]

    @cached_property
    def _chunks(self) -> int:
        return sum(len(role.chunks) for role in self.work.roles)

    def _reduced(self, rank: int, chunk: int) -> bool:
        """Whether gradients are reduced while a chunk's last pass goes on."""
        return any(t.chunk == chunk and t.release != END for t in self.work.roles[rank].reduces)

    def _encoders(self, rank: int, chunk: int) -> dict[int, list[Label]]:
        """What encodes gradients while a chunk's last pass goes on, by the pieces that it follows."""
        out: dict[int, list[Label]] = defaultdict(list)
        for transfer in self.work.roles[rank].reduces:
            if transfer.before is not None and transfer.chunk == chunk and transfer.release != END:
                out[max(1, transfer.release)].append(transfer.before)
        return out

    def _before(self, builder: Builder, rank: int, action: Action) -> None:
        if self.work.before is not None and action.kind == "F" and action.chunk < self.plan.pp:
            builder.add(builder.stream(rank), self.work.before, (), micro_batch=action.micro_batch)

    def _gather(self, builder: Builder, rank: int, role: Role) -> dict[int, dict[int, list[int]]]:
        """Gathers parameters that the last update left in parts; by chunk and piece, what waits for it."""
        network = builder.stream(rank, STEP_STREAM)
        out: dict[int, dict[int, list[int]]] = defaultdict(dict)
        begin = builder.last(builder.stream(rank))
        for transfer in role.gathers:
            task = self._send(builder, network, transfer.sends, begin)
            if task:
                out[transfer.chunk][transfer.needed] = task
        return out

    def _hop(self, builder: Builder, rank: int, action: Action, after: list[int]) -> list[int]:
        """Takes what a pass leaves to the rank of the next one; returns what that has to wait for."""
        target = action.chunk + (1 if action.kind == "F" else -1)
        if not 0 <= target < self._chunks:
            return after
        owner = schedules.get(self.plan.schedule).rank_of(target, self.plan.pp)
        if owner == rank:
            return after
        sends = self.work.hops[min(action.chunk, target)]
        if not self.work.hops_overlap:
            return self._send(builder, builder.stream(rank), sends, ()) or after
        way = "forward" if action.kind == "F" else "backward"
        receiver = builder.stream(owner, f"pp from {action.chunk} {way}")
        return self._send(builder, builder.stream(rank, f"pp {way}"), sends, after, receiver) or after

    def _finish(self, builder: Builder, ended: Mapping[int, Sequence[int]]) -> None:
        """Reduces gradients as they become ready, or all of them at the end; then the update, when every
        stage is done (their norm is common).
        """
        roles, work = self.work.roles, self.work
        for rank, role in enumerate(roles):
            network, device = builder.stream(rank, STEP_STREAM), builder.stream(rank)
            for transfer in role.reduces:
                if transfer.before is not None and transfer.release == END:
                    builder.add(device, transfer.before)
                end = builder.last(device)
                after = end if transfer.release == END else _done(ended[transfer.chunk], transfer.release)
                self._send(builder, network, transfer.sends, after)
        if work.tied:
            ends = (0, len(roles) - 1)
            after = [task for rank in ends for task in builder.last(builder.stream(rank))]
            first, last = (builder.stream(rank, STEP_STREAM) for rank in ends)
            self._send(builder, first, work.tied, after, last)
        done = [
            task
            for rank in range(len(roles))
            for kind in (COMPUTE, STEP_STREAM)
            for task in builder.last(builder.stream(rank, kind))
        ]
        for rank, role in enumerate(roles):
            device, network = builder.stream(rank), builder.stream(rank, STEP_STREAM)
            for label in role.update:
                self._run(builder, rank, label, done)
            self._send(builder, network, role.regathers, builder.last(device))
            if work.after is not None or role.regathers:
                builder.add(device, work.after or JOIN, builder.last(network))

    # -- what became of it -------------------------------------------------------------------------

    @cached_property
    def found(self) -> engine.Run:
        return engine.run(self.program, self.work.contention, self.work.share)

    @property
    def since(self) -> float:
        """When the step begins that is the answer."""
        return float(self.found.end[: self._first].max(initial=0.0)) if len(self.program) else 0.0

    def collectives(self, role: int) -> Iterator[tuple[str, float, str]]:
        """(operation, bytes, axis) of what a role sends in the step that is the answer."""
        return self.program.collectives(role, self._first)

    def spent(self, rank: int) -> dict[str, float]:
        """Where the time of a stage goes."""
        return engine.breakdown(self.program, self.found, rank, idle=BUBBLE, since=self.since)

    def freest(self) -> int:
        """The stage that waits least."""
        return min(range(self.plan.pp), key=lambda rank: self.spent(rank).get(BUBBLE, 0.0))

    def at(self, plan: Plan) -> Simulation:
        """The same with another number of micro-batches."""
        if plan == self.plan:
            return self
        return Simulation(self.work, plan, self._whole, self._issues, self._bodies)

    def parts(self) -> dict[str, float]:
        """Where the time of the stage that waits least goes, many micro-batches at the price of a few."""
        return folded(self.plan, self.at)

    def stage_s(self, rank: int) -> tuple[float, float]:
        """Seconds of a stage's passes of one micro-batch, forward and backward."""
        mine = self.work.roles[rank].chunks
        forward, backward = (
            sum(self.whole(self.work.passes[chunk, kind]).seconds for chunk in mine) for kind in "FB"
        )
        return forward, backward

    def timeline(self) -> Timeline:
        """What every role does when; passes written out in detail as far as a file can hold it."""
        depth = next((d for d in (2, 1) if _count(self.program, d) <= MOST_SPANS), 0)
        spans = [
            span for span in self._spans(self.program, self.found, depth, -self.since) if span.start_s >= 0
        ]
        spans.sort(key=lambda span: (span.rank, span.start_s, span.end_s))
        return Timeline(tuple(spans), self.work.title)

    def _spans(
        self,
        program: Program,
        found: engine.Run,
        depth: int,
        origin: float,
        scale: float = 1.0,
        rank: int = 0,
    ) -> Iterator[Span]:
        """Spans of a program's tasks, those of a body in its place."""
        for task, number in enumerate(program.label.tolist()):
            label, (role, stream) = program.labels[number], program.streams[program.stream[task]]
            begin, stop = origin + scale * float(found.start[task]), origin + scale * float(found.end[task])
            if label is JOIN or stream == LAUNCHED:
                continue
            if label.body is not None and depth and stop > begin:
                inside = self._run_of(label)
                within = (stop - begin) / inside.seconds
                yield from self._spans(label.body, inside, depth - 1, begin, within, rank + role)
                continue
            yield task_span(program, task, begin, stop, rank)

    def _run_of(self, label: Label) -> engine.Run:
        """When the tasks of a label's body run."""
        if label not in self._bodies:
            assert label.body is not None
            self._bodies[label] = engine.run(label.body, self.work.contention, self.work.share)
        return self._bodies[label]


def _done(tasks: Sequence[int], pieces: int) -> list[int]:
    """The task that ends the last of so many pieces; the whole pass, where that is one task."""
    return [tasks[max(1, min(pieces, len(tasks))) - 1]]


def _count(program: Program, depth: int) -> int:
    """Spans of a program written out to a depth."""
    each = np.array(
        [_count(label.body, depth - 1) if label.body is not None and depth else 1 for label in program.labels]
    )
    return int(each[program.label].sum())
