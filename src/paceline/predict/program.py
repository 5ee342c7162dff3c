"""The program of a step, made from what its ranks do (`sim/work.py`), and what became of it.

    pass    pieces one after another, collectives beside them
    step    passes in the order of the pipeline's schedule, transfers between stages, gradients reduced as
            they become ready, the update

A pass is a program of its own whose seconds are one task of the step. Only what the step can overlap is
written out there: the pieces of the last backward pass, beside which gradients are reduced, and of the first
forward pass, beside which updated parameters are gathered; and all of them where the host runs ahead. Then
the second of two steps is the answer, which the host began during the first.

Many micro-batches come at the price of a few: once a pipeline is full, another round of them takes what the
one before it took.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

from paceline.sim import engine
from paceline.sim.detail import written_out
from paceline.sim.program import COMPUTE, HOST, JOIN, LAUNCHED, Builder, Label, Program
from paceline.sim.schedules import actions, in_order, sources
from paceline.sim.timeline import Timeline
from paceline.sim.work import BUBBLE, END, Pass, StepWork, Transfer
from paceline.spec import schedules
from paceline.spec.plan import Plan
from paceline.spec.schedules import Action

#: streams of collectives: of every micro-batch, and of the step
PASS_STREAM, STEP_STREAM = "shard", "dp"
#: times as many micro-batches as stages, from which on all rounds of them are alike
ROUNDS = 3
#: of no piece, nothing
NONE: Mapping[int, Any] = MappingProxyType({})
#: pieces of a pass, and the tasks that each waits for
Waits = Mapping[int, list[int]]


def enough(plan: Plan) -> int:
    """Micro-batches that show how every further round goes; as many are left over in the last one as in the
    plan.
    """
    over = plan.micro_batches % plan.pp
    return max(ROUNDS, over + 1) * plan.pp + over


@lru_cache(maxsize=65536)
def _issue(seconds: float) -> Label:
    """What the host issues."""
    return Label("issue", "host", seconds)


@dataclass(frozen=True, slots=True)
class Rank:
    """The tasks of one role of a program, as they are written."""

    builder: Builder
    role: int = 0

    def stream(self, kind: str) -> int:
        return self.builder.stream(self.role, kind)

    def last(self, kind: str = COMPUTE) -> list[int]:
        """The task that stands last on a stream, if there is one."""
        return self.builder.last(self.stream(kind))

    def add(
        self,
        label: Label,
        after: Sequence[int] = (),
        kind: str = COMPUTE,
        also: int = -1,
        micro_batch: int = -1,
    ) -> int:
        """Appends a task to one of its streams."""
        return self.builder.add(self.stream(kind), label, after, also, micro_batch)

    def run(
        self, piece: Label, after: Sequence[int], begin: Sequence[int] = (), micro_batch: int = -1
    ) -> int:
        """A piece on the device, which starts no sooner than the host gets to it and ends no sooner than the
        host has issued all of it and the last kernels have run.

        The host gets to it no sooner than `begin`.
        """
        if not piece.host_s:
            return self.add(piece, after, micro_batch=micro_batch)
        issued = self.last(HOST)
        issue = self.add(_issue(piece.host_s), begin, HOST)
        self.add(piece, [*after, *issued], micro_batch=micro_batch)
        if piece.drain_s:
            issue = self.add(_issue(piece.drain_s), [issue], LAUNCHED)
        end = self.add(JOIN, [issue])
        if piece.reads_back:
            self.add(JOIN, [end], HOST)
        return end

    def send(self, kind: str, sends: Sequence[Label], after: Sequence[int], also: int = -1) -> list[int]:
        """Collectives one after another on a stream; the last of them, if there is one."""
        task: list[int] = []
        for label in sends:
            if label.seconds:
                task = [self.add(label, [*after, *task], kind, also)]
        return task

    def run_pass(
        self,
        passed: Pass,
        ahead: bool,
        after: Sequence[int] = (),
        awaited: Waits = NONE,
        encoded: Mapping[int, Sequence[Label]] = NONE,
        micro_batch: int = -1,
    ) -> list[int]:
        """The pieces of a pass, which the host may run `ahead` of, with its collectives before them and
        behind; returns the task that ends each.

        `awaited` are tasks that pieces wait for besides; what is `encoded` follows pieces.
        """
        waits, left, ran = defaultdict(list, awaited), list(passed.transfers[::-1]), list[int]()
        begin = () if ahead else self.last()

        for n, piece in enumerate(passed.pieces):
            self.release(left, n, waits)
            ran.append(self.run(piece, [*after, *waits[n]], begin, micro_batch))
            for label in encoded.get(n + 1, ()):
                ran[-1] = self.add(label)
        self.release(left, END, waits)
        if passed.transfers:
            ran[-1] = self.add(JOIN, waits[END])
        return ran

    def release(self, left: list[Transfer], done: int, waits: dict[int, list[int]]) -> None:
        """Takes the collectives that may start when so many pieces are done, and issues them; pieces wait for
        them.
        """
        while left and left[-1].release <= done:
            transfer = left.pop()
            waits[transfer.needed] += self.send(PASS_STREAM, transfer.sends, self.last())


@dataclass
class Simulation:
    """The work of a plan's ranks as a program, run by the event engine."""

    work: StepWork
    plan: Plan
    #: passes as one task, whatever the number of micro-batches
    _whole: dict[Pass, Label] = field(default_factory=dict)

    def whole(self, passed: Pass) -> Label:
        """A pass as one task."""
        if passed not in self._whole:
            self._whole[passed] = self._fold(passed)
        return self._whole[passed]

    def _fold(self, passed: Pass) -> Label:
        builder = Builder()
        Rank(builder).run_pass(passed, self.work.runs_ahead)
        body = builder.build()
        found = self._run(body)
        parts = engine.breakdown(body, found, idle="host")
        if not passed.put_off_s:
            return Label(passed.name, passed.part, found.seconds, body=body, parts=parts)
        parts = {**parts, passed.part: max(0.0, parts.get(passed.part, 0.0) - passed.put_off_s)}
        return Label(passed.name, passed.part, sum(parts.values()), parts=parts)

    @cached_property
    def program(self) -> Program:
        """Every role, from the first forward pass to the update."""
        builder = Builder()
        ranks = [Rank(builder, number) for number in range(self.plan.pp)]
        if self.work.runs_ahead:
            StepWriter(self, ranks).write()
        self._first = len(builder)
        StepWriter(self, ranks).write()
        return builder.build()

    # -- what became of it -------------------------------------------------------------------------

    @cached_property
    def found(self) -> engine.Run:
        return self._run(self.program)

    def _run(self, program: Program) -> engine.Run:
        return engine.run(program, self.work.contention, self.work.share)

    @property
    def since(self) -> float:
        """When the step begins that is the answer."""
        return float(self.found.end[: self._first].max(initial=0.0))

    def collectives(self, role: int) -> Iterator[tuple[str, float, str]]:
        """(operation, bytes, axis) of what a role sends in the step that is the answer."""
        return self.program.collectives(role, self._first)

    def spent(self, rank: int) -> dict[str, float]:
        """Where the time of a stage goes."""
        return engine.breakdown(self.program, self.found, rank, idle=BUBBLE, since=self.since)

    def freest(self) -> int:
        """The stage that waits least."""
        return min(range(self.plan.pp), key=lambda rank: self.spent(rank).get(BUBBLE, 0.0))

    def parts(self) -> dict[str, float]:
        """Where the time of the stage that waits least goes; of many micro-batches, from what a few take and
        a round more.
        """
        plan, few = self.plan, enough(self.plan)
        if plan.micro_batches <= few + 2 * plan.pp:
            return self.spent(self.freest())
        batches = (count * plan.dp * plan.mbs for count in (few, few + plan.pp))
        less, more = (replace(self, plan=replace(plan, gbs=gbs)) for gbs in batches)
        rank, times = more.freest(), (plan.micro_batches - few) / plan.pp
        one, other = (defaultdict(float, each.spent(rank)) for each in (less, more))
        return {name: one[name] + times * (other[name] - one[name]) for name in {**one, **other}}

    def stage_s(self, rank: int) -> tuple[float, float]:
        """Seconds of a stage's passes of one micro-batch, forward and backward."""
        mine = self.work.roles[rank].chunks
        forward, backward = (
            sum(self.whole(self.work.passes[chunk, kind]).seconds for chunk in mine) for kind in "FB"
        )
        return forward, backward

    def timeline(self) -> Timeline:
        """What every role does when."""
        return Timeline(written_out(self.program, self.found, self.since, self._run), self.work.title)


@dataclass
class StepWriter:
    """The tasks of a step of all ranks, as they are written."""

    simulation: Simulation
    ranks: Sequence[Rank]
    #: of each pass, what the next chunk waits for; of each chunk, the tasks that end its last pass
    _sent: dict[tuple[int, str, int], list[int]] = field(default_factory=dict)
    _ended: dict[int, list[int]] = field(default_factory=dict)
    #: of each chunk, gathers that pieces of its first pass wait for
    _gathered: dict[int, dict[int, list[int]]] = field(default_factory=lambda: defaultdict(dict))

    @property
    def work(self) -> StepWork:
        return self.simulation.work

    @cached_property
    def order(self) -> list[list[Action]]:
        """What each rank runs."""
        p = self.simulation.plan
        return [actions(p.schedule, number, p.pp, p.micro_batches, p.vpp) for number in range(p.pp)]

    @cached_property
    def last(self) -> dict[int, Action]:
        """The last backward pass of each chunk."""
        return {action.chunk: action for mine in self.order for action in mine if action.kind in "BW"}

    def write(self) -> None:
        """Passes in the order of the schedule, gradients reduced, updates."""
        for rank in self.ranks:
            self._gather(rank)
        for number, action in in_order(self.order, len(self.last)):
            rank, (chunk, kind, micro_batch) = self.ranks[number], action
            ran = self._pass(rank, action)
            if kind in "BW":
                self._ended[chunk] = ran
            if kind != "W":
                self._sent[chunk, action.passes, micro_batch] = self._hop(rank, action, ran[-1:])
        self._reduce()
        self._update()

    def _gather(self, rank: Rank) -> None:
        """Gathers parameters that the last update left in parts."""
        begin = rank.last()
        for transfer in self.work.roles[rank.role].gathers:
            task = rank.send(STEP_STREAM, transfer.sends, begin)
            if task:
                self._gathered[transfer.chunk][transfer.needed] = task

    def _pass(self, rank: Rank, action: Action) -> list[int]:
        """A pass, piece by piece where pieces have something to wait for; the tasks that end them."""
        work, (chunk, kind, micro_batch) = self.work, action
        after = [task for source in sources(action, len(self.last)) for task in self._sent[source]]
        if work.before is not None and kind == "F" and chunk < len(self.ranks):
            rank.add(work.before, micro_batch=micro_batch)
        awaited = self._gathered.pop(chunk, NONE) if kind == "F" else NONE
        beside = self._reduced(rank, chunk) if action == self.last[chunk] else []
        passed = work.passes[chunk, kind]
        if not (awaited or beside or work.runs_ahead):
            return [rank.add(self.simulation.whole(passed), after, micro_batch=micro_batch)]
        return rank.run_pass(passed, work.runs_ahead, after, awaited, _encoded(beside), micro_batch)

    def _reduced(self, rank: Rank, chunk: int) -> list[Transfer]:
        """Gradients that are reduced while a chunk's last pass goes on."""
        return [t for t in self.work.roles[rank.role].reduces if t.chunk == chunk and t.release != END]

    def _hop(self, rank: Rank, action: Action, after: list[int]) -> list[int]:
        """Takes what a pass leaves to the rank of the next one; returns what that has to wait for."""
        way, ahead = ("forward", 1) if action.kind == "F" else ("backward", -1)
        target, plan = action.chunk + ahead, self.simulation.plan
        owner = schedules.get(plan.schedule).rank_of(target, plan.pp)
        if owner == rank.role or not 0 <= target < len(self.last):
            return after
        sends = self.work.hops[min(action.chunk, target)]
        if not self.work.hops_overlap:
            return rank.send(COMPUTE, sends, ()) or after
        receiver = self.ranks[owner].stream(f"pp from {action.chunk} {way}")
        return rank.send(f"pp {way}", sends, after, receiver) or after

    def _reduce(self) -> None:
        """Reduces gradients as they become ready, or all of them at the end."""
        for rank in self.ranks:
            for transfer in self.work.roles[rank.role].reduces:
                ready = self._ended.get(transfer.chunk, [])[: max(1, transfer.release)][-1:]
                if transfer.release == END:
                    for label in transfer.before:
                        rank.add(label)
                    ready = rank.last()
                rank.send(STEP_STREAM, transfer.sends, ready)
        first, last = self.ranks[0], self.ranks[-1]
        both = [*first.last(), *last.last()]
        first.send(STEP_STREAM, self.work.tied, both, last.stream(STEP_STREAM))

    def _update(self) -> None:
        """Updates when every stage is done: the norm of gradients is common."""
        done = [task for rank in self.ranks for kind in (COMPUTE, STEP_STREAM) for task in rank.last(kind)]
        for rank in self.ranks:
            role = self.work.roles[rank.role]
            for label in role.update:
                rank.run(label, done)
            rank.send(STEP_STREAM, role.regathers, rank.last())
            if self.work.after is not None or role.regathers:
                rank.add(self.work.after or JOIN, rank.last(STEP_STREAM))


def _encoded(reduces: Sequence[Transfer]) -> dict[int, list[Label]]:
    """What encodes gradients, by the number of pieces that it follows."""
    out: dict[int, list[Label]] = defaultdict(list)
    for transfer in reduces:
        out[max(1, transfer.release)] += transfer.before
    return out
