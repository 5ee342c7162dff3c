"""Predict one training step of a transformer under a parallel plan, by simulating it.

Pieces are timed operators and collectives (`predict/layer.py`, `predict/gradients.py`); how they come
together is left to the event engine, one level at a time:

    layer    segments of operators on the device, the host that issues them, collectives between and
             beside them
    pass     the layers of a chunk; where parameters are sharded, gathers a layer ahead and scatters behind
    step     passes in the order of the pipeline's schedule, transfers between stages, gradients reduced
             bucket by bucket, the update

A level's seconds are a task of the next. Only what the next level can overlap is written out there: the
layers of the last backward pass, beside which gradients are reduced, and of the first forward pass, beside
which updated parameters are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from paceline.cost.collectives import share_links
from paceline.cost.curves import Curves
from paceline.cost.transformer import Collective
from paceline.predict.distributed import TITLES, Step
from paceline.predict.gradients import Exchange, StageTime
from paceline.predict.rounds import folded
from paceline.sim import engine
from paceline.sim.program import COMPUTE, HOST, Builder, Label, Program, buckets
from paceline.sim.schedules import actions, in_order, sources
from paceline.sim.timeline import Span, Timeline, task_span
from paceline.spec import schedules
from paceline.spec.cluster import Cluster, Group
from paceline.spec.framework import Framework
from paceline.spec.plan import Plan, resolve
from paceline.spec.prediction import DistributedPrediction
from paceline.spec.transformer import Transformer

#: spans that a trace file holds at most, about; beyond, passes are not written out layer by layer
MOST_SPANS = 150_000
#: a tensor's parameters on one rank, whether they are experts', and the task (or piece) that it belongs to
_Gradient = tuple[float, bool, int]
BUBBLE, GATHERS, REDUCTION, TRANSFERS = (
    "pipeline bubble",
    "parameter gathers",
    "gradient reduction",
    "pipeline transfers",
)


def predict(
    model: Transformer,
    cluster: Cluster,
    plan: Plan,
    *,
    framework: Framework | None = None,
    host_speed: float = 1.0,
    curves: Curves | None = None,
    trace: bool = False,
) -> DistributedPrediction:
    """Step time with interval, where it goes, and the memory of every stage; with `trace`, the timeline
    too.
    """
    step = Step.of(model, cluster, resolve(plan, cluster.device_count, model), framework, curves, host_speed)
    if not plan.relax.plain:
        from paceline import sync  # it builds on this module

        return sync.transformer(step, trace=trace)
    return Simulation(step).prediction(trace)


@dataclass
class Simulation:
    """A resolved plan as a program, and what became of it."""

    step: Step
    _labels: dict[tuple[object, ...], Label] = field(default_factory=dict)
    _bodies: dict[Label, engine.Run] = field(default_factory=dict)

    # -- layers ------------------------------------------------------------------------------------

    def piece(self, name: str) -> Label:
        """The embedding, a layer or the head in one direction, as one task; a layer's backward pass with what
        it runs again.
        """
        return self._once(("piece", name), lambda: self._piece(name))

    def _once(self, key: tuple[object, ...], make: Callable[[], Label]) -> Label:
        if key not in self._labels:
            self._labels[key] = make()
        return self._labels[key]

    def _piece(self, name: str) -> Label:
        s = self.step
        way = name.rpartition(".")[2]
        if way == "weight":  # a layer's products of gradients, put off; the ends keep theirs
            return Label(
                name, "backward", s.pieces["layer.backward"].weight_s if name == "layer.weight" else 0.0
            )
        builder = Builder()
        host_s = self._operators(builder, name, way)
        if name == "layer.backward" and s.plan.recompute != "none":
            builder = Builder()
            host_s += self._operators(
                builder, "layer.forward", "recomputation", None if s.plan.recompute == "full" else s.again()
            )
            self._operators(builder, name, way)
        body = builder.build()
        found = engine.run(body, s.framework.contention)
        parts = engine.breakdown(body, found)
        wait = s.wait(name) + (
            s.wait("layer.forward") if name == "layer.backward" and s.plan.recompute == "full" else 0.0
        )
        if s.framework.blocking:  # the host waits for every kernel before it issues the next
            wait, host_s = host_s, 0.0
        seconds = found.seconds + wait
        lack = max(0.0, s.copying_s - max(seconds, host_s)) if name.startswith("layer") else 0.0
        waits = {part: more for part, more in (("host", wait), (TITLES["host"], lack)) if more}
        return Label(name, way, seconds + lack, host_s=host_s, body=body, parts={**parts, **waits})

    def _operators(
        self, builder: Builder, name: str, part: str, keep: NDArray[np.bool_] | None = None
    ) -> float:
        """Operators and collectives of a piece, or only the operators to `keep`; returns what the host needs
        to issue them.
        """
        s = self.step
        timed, device = s.pieces[name], builder.stream(0)
        seconds = timed.each + s.gaps(name)
        if keep is not None:
            builder.add(device, Label(name, part, float(seconds[keep].sum())))
            return float(s.issue(name)[keep].sum())
        beside: dict[tuple[int, ...], list[Collective]] = {}
        alone: dict[int, list[Collective]] = {}
        for collective in timed.piece.collectives:
            if collective.behind:
                beside.setdefault(collective.behind, []).append(collective)
            else:
                alone.setdefault(collective.at, []).append(collective)
        regions = {behind[0]: behind for behind in beside}
        stops = sorted({*regions, *alone, len(seconds)})
        at = 0
        while True:
            for place in sorted(place for place in alone if place <= at):
                for collective in alone.pop(place):
                    self._collective(builder, collective, True)
            if at >= len(seconds):
                return float(s.issue(name).sum()) + s.framework.issue_collective_s * len(
                    timed.piece.collectives
                )
            if at in regions:
                ops = list(regions[at])
                sent = [
                    task
                    for collective in beside[regions[at]]
                    for task in self._collective(builder, collective, False)
                ]
                builder.add(device, Label(name, part, float(seconds[ops].sum())))
                builder.add(device, _JOIN, sent)
                at += len(ops)
            else:
                stop = next(stop for stop in stops if stop > at)
                builder.add(device, Label(name, part, float(seconds[at:stop].sum())))
                at = stop

    def _collective(self, builder: Builder, collective: Collective, alone: bool) -> list[int]:
        """A collective after what the device has done so far; it goes on when that is over, or beside it,
        where the first of several parts cannot hide."""
        s, device = self.step, builder.stream(0)
        seconds = s.send(collective.op, collective.size, collective.axis)
        if not seconds:
            return []
        first = 1.0 if alone else 1 / collective.parts if collective.parts > 1 else 0.0
        label = Label(
            collective.op,
            TITLES[collective.axis],
            seconds,
            collective.op,
            collective.size,
            collective.axis,
            crowds=True,
        )
        network = builder.stream(0, collective.axis)
        task = builder.add(
            network, replace(label, seconds=first * seconds) if first else label, builder.last(device)
        )
        if not first:
            return [task]
        builder.add(device, _JOIN, [task])
        return (
            []
            if alone
            else [builder.add(network, replace(label, seconds=(1 - first) * seconds, op="", size=0.0))]
        )

    # -- passes ------------------------------------------------------------------------------------

    def sequence(self, chunk: int, layers: int, kind: str) -> list[Label]:
        """The pieces of a pass through a chunk, in order."""
        last = self._last_chunk
        way = {"F": "forward", "W": "weight"}.get(kind, "backward")
        pieces = [*["embedding"] * (chunk == 0), *["layer"] * layers, *["head"] * (chunk == last)]
        return [self.piece(f"{name}.{way}") for name in (pieces if kind == "F" else reversed(pieces))]

    @cached_property
    def _last_chunk(self) -> int:
        p = self.step.plan
        return p.pp * schedules.get(p.schedule).chunks_per_rank(p.vpp) - 1

    def whole(self, chunk: int, layers: int, kind: str) -> Label:
        """A pass through a chunk as one task."""
        key = ("pass", layers, chunk == 0, chunk == self._last_chunk, kind)
        return self._labels.get(key) or self._once(key, lambda: self._whole(chunk, layers, kind))

    def _whole(self, chunk: int, layers: int, kind: str) -> Label:
        s = self.step
        part = "forward" if kind == "F" else "backward"
        builder = Builder()
        parameters = s.end_parameters(chunk == 0, chunk == self._last_chunk)
        self.layers(builder, 0, self.sequence(chunk, layers, kind), kind, parameters)
        body = builder.build()
        found = engine.run(body, s.framework.contention, self.share)
        parts = engine.breakdown(body, found, idle="host")
        if kind != "I":
            return Label(
                "weight gradients" if kind == "W" else f"{part} pass",
                part,
                found.seconds,
                body=body,
                parts=parts,
            )
        later = sum(label.seconds for label in self.sequence(chunk, layers, "W"))
        parts = {**parts, part: max(0.0, parts.get(part, 0.0) - later)}
        return Label("input gradients", part, sum(parts.values()), parts=parts)

    def run(
        self,
        builder: Builder,
        role: int,
        label: Label,
        after: Sequence[int],
        micro_batch: int = -1,
        begin: Sequence[int] = (),
    ) -> int:
        """A piece on the device, which starts no sooner than the host gets to it and ends no sooner than the
        host has issued all of it.

        The host gets to it no sooner than `begin`: it does not run ahead of whole passes.
        """
        device, host = builder.stream(role), builder.stream(role, HOST)
        if not label.host_s:
            return builder.add(device, label, after, micro_batch=micro_batch)
        issued = builder.last(host)
        issue = builder.add(
            host, self._once(("issue", label.host_s), partial(Label, "issue", "host", label.host_s)), begin
        )
        builder.add(device, label, [*after, *issued], micro_batch=micro_batch)
        return builder.add(device, _JOIN, [issue])

    def layers(self, builder: Builder, role: int, pieces: Sequence[Label], kind: str, ends: float) -> None:
        """The pieces of a pass one after another, with sharded parameters gathered ahead of them and
        gradients scattered behind.
        """
        s = self.step
        if not s.sharded:
            for label in pieces:
                self.run(builder, role, label, ())
            return
        forward, network = kind == "F", builder.stream(role, "shard")
        layer = s.layer_parameters()
        count = sum(label.name.startswith("layer") for label in pieces) if forward or s.plan.reshard else 0
        gathered = [self.exchange(builder, network, s.unshard(ends), GATHERS, ()) if ends and forward else []]
        ran: list[int] = []

        def gather() -> None:
            """The next layer's parameters; there is memory for them when the one before those gathered ahead
            is done.
            """
            number = len(gathered) - 1
            if number < count:
                over = number - 1 - s.plan.prefetch
                gathered.append(
                    self.exchange(
                        builder, network, s.unshard(layer), GATHERS, [ran[over]] if over >= 0 else ()
                    )
                )

        gather()
        for label in pieces:
            if not label.name.startswith("layer"):
                task = self.run(builder, role, label, gathered[0])
                continue
            for _ in range(len(ran) + 1 + s.plan.prefetch - (len(gathered) - 1)):
                gather()
            task = self.run(builder, role, label, gathered[len(ran) + 1] if count else ())
            ran.append(task)
            if not forward:
                self.exchange(builder, network, s.scatter(layer), GATHERS, [task])
        if ends and not forward:
            self.exchange(builder, network, s.scatter(ends), GATHERS, builder.last(builder.stream(role)))
        builder.add(builder.stream(role), _JOIN, builder.last(network))

    def exchange(
        self,
        builder: Builder,
        stream: int,
        exchanges: Sequence[Exchange],
        part: str,
        after: Sequence[int],
        also: int = -1,
        crowds: bool = True,
    ) -> list[int]:
        """Collectives one after another on a stream; the last of them, if there is one."""
        task: list[int] = []
        for exchange in exchanges:
            label = self._labels.get((exchange, part, crowds)) or self._once(
                (exchange, part, crowds),
                partial(Label, exchange[0], part, self.step.send(*exchange), *exchange, crowds=crowds),
            )
            if label.seconds:
                task = [builder.add(stream, label, [*after, *task], also)]
        return task

    # -- the step ----------------------------------------------------------------------------------

    @cached_property
    def program(self) -> Program:
        """Every role of the pipeline, from the first forward pass to the update."""
        s, p = self.step, self.step.plan
        held = s.chunks()
        layers = dict(chunk for mine in held for chunk in mine)
        ranks = [actions(p.schedule, rank, p.pp, p.micro_batches, p.vpp) for rank in range(p.pp)]
        # where data-parallel collectives run beside passes, these are written out layer by layer
        places = [(mine, chunk) for mine, own in zip(ranks, held, strict=True) for chunk, _ in own]
        first = {next(a for a in mine if a[:2] == (chunk, "F")) for mine, chunk in places}
        last = {
            next(a for a in reversed(mine) if a.chunk == chunk and a.kind in "BW") for mine, chunk in places
        }
        builder = Builder()
        updated = [self._updated(builder, rank, own) for rank, own in enumerate(held)]
        overlap = s.replicated and s.framework.dp_overlap
        data = Label("data", "host", s.framework.micro_batch_s)
        #: of each pass, what the next chunk waits for; of each role, gradients with the task that completes
        #: them
        sent: dict[tuple[int, str, int], list[int]] = {}
        ready: list[list[_Gradient]] = [[] for _ in range(p.pp)]
        for rank, action in in_order(ranks, len(layers)):
            chunk, kind, i = action
            device = builder.stream(rank)
            after = [task for source in sources(action, len(layers)) for task in sent[source]]
            if data.seconds and kind == "F" and chunk < p.pp:
                builder.add(device, data, (), micro_batch=i)
            ends = s.replicated and action in last
            pieces = (
                self.sequence(chunk, layers[chunk], kind)
                if ends or (action in first and updated[rank])
                else []
            )
            if pieces and overlap:
                begin = builder.last(device)
                ran = [
                    self.run(
                        builder, rank, label, [*after, *updated[rank].get((chunk, n, kind), [])], i, begin
                    )
                    for n, label in enumerate(pieces)
                ]
            else:
                ran = [
                    builder.add(device, self.whole(chunk, layers[chunk], kind), after, micro_batch=i)
                ] * max(1, len(pieces))
            if ends:
                ready[rank] += [
                    (*tensor, task)
                    for label, task in zip(pieces, ran, strict=False)
                    for tensor in reversed(s.tensors(label.name.partition(".")[0]))
                ]
            if kind != "W":
                sent[chunk, action.passes, i] = self._transfer(builder, rank, chunk, kind, ran[-1:])
        self._finish(builder, ready)
        return builder.build()

    @cached_property
    def _hop(self) -> list[Exchange]:
        return self.step.hop

    def _transfer(self, builder: Builder, rank: int, chunk: int, kind: str, after: list[int]) -> list[int]:
        """Takes what a pass leaves to the rank of the next one; returns what that has to wait for."""
        p = self.step.plan
        target = chunk + (1 if kind == "F" else -1)
        if not 0 <= target <= self._last_chunk or schedules.get(p.schedule).rank_of(target, p.pp) == rank:
            return after
        way = "forward" if kind == "F" else "backward"
        if not self.step.framework.p2p_overlap:
            return (
                self.exchange(builder, builder.stream(rank), self._hop, TRANSFERS, (), crowds=False) or after
            )
        receiver = builder.stream(schedules.get(p.schedule).rank_of(target, p.pp), f"pp from {chunk} {way}")
        return (
            self.exchange(
                builder,
                builder.stream(rank, f"pp {way}"),
                self._hop,
                TRANSFERS,
                after,
                receiver,
                crowds=False,
            )
            or after
        )

    def _updated(
        self, builder: Builder, rank: int, chunks: Sequence[tuple[int, int]]
    ) -> dict[tuple[int, int, str], list[int]]:
        """Gathers parameters that the last update left in parts, in the order in which forward passes need
        them; by chunk and piece.
        """
        s = self.step
        if not (s.replicated and s.framework.dp_overlap):
            return {}
        places = [
            (chunk, n, label)
            for chunk, count in chunks
            for n, label in enumerate(self.sequence(chunk, count, "F"))
        ]
        wanted = [
            (*tensor, i)
            for i, (_, _, label) in enumerate(places)
            for tensor in s.tensors(label.name.partition(".")[0])
        ]
        out: dict[tuple[int, int, str], list[int]] = {}
        for dense, experts, tensors in self._buckets(wanted):
            chunk, n, _ = places[wanted[tensors[0]][2]]
            out[chunk, n, "F"] = self.exchange(
                builder, builder.stream(rank, "dp"), s.exchanges(dense, experts)[1], GATHERS, ()
            )
        return {place: task for place, task in out.items() if task}

    def _buckets(self, tensors: Sequence[_Gradient]) -> list[tuple[float, float, list[int]]]:
        """Parameters and experts' parameters of each bucket, and its tensors; in the order in which they are
        complete.
        """
        found = []
        for experts in (False, True):
            places = [i for i, tensor in enumerate(tensors) if tensor[1] == experts]
            for bucket in buckets(
                [tensors[i][0] * self.step.gradient_bytes for i in places],
                self.step.bucket_bytes,
                self.step.first_bucket_bytes,
            ):
                count = sum(tensors[places[i]][0] for i in bucket)
                found.append(
                    (0.0 if experts else count, count if experts else 0.0, [places[i] for i in bucket])
                )
        return sorted(found, key=lambda bucket: bucket[2][-1])

    def _finish(self, builder: Builder, ready: Sequence[Sequence[_Gradient]]) -> None:
        """Reduces gradients as they become ready, or all of them at the end; then the update, when every
        stage is done (their norm is common).
        """
        s, p = self.step, self.step.plan
        for rank, gradients in enumerate(ready):
            network, end = builder.stream(rank, "dp"), builder.last(builder.stream(rank))
            for dense, experts, tensors in self._buckets(gradients):
                after = [gradients[tensors[-1]][2]] if s.framework.dp_overlap else end
                self.exchange(builder, network, s.exchanges(dense, experts)[0], REDUCTION, after)
        if s.tied:
            ends = [builder.stream(rank, "dp") for rank in (0, p.pp - 1)]
            after = [task for rank in (0, p.pp - 1) for task in builder.last(builder.stream(rank))]
            self.exchange(builder, ends[0], s.tied, REDUCTION, after, ends[1])
        done = [
            task
            for rank in range(p.pp)
            for kind in (COMPUTE, "dp")
            for task in builder.last(builder.stream(rank, kind))
        ]
        update = Label("update", "optimizer", s.update_s)
        for rank, gradients in enumerate(ready):
            device, network = builder.stream(rank), builder.stream(rank, "dp")
            builder.add(device, update, done)
            if s.replicated and not s.framework.dp_overlap:
                dense, experts = (
                    sum(count for count, own, _ in gradients if own == kind) for kind in (False, True)
                )
                self.exchange(builder, network, s.exchanges(dense, experts)[1], GATHERS, builder.last(device))
            if s.framework.step_s:
                builder.add(device, Label("data", "host", s.framework.step_s), builder.last(network))

    @cached_property
    def stages(self) -> list[StageTime]:
        """Every stage of the pipeline, in order."""
        s = self.step
        return [
            StageTime(held.layers, held.first, held.last, *(self.passes_s(mine, kind) for kind in "FB"))
            for held, mine in zip(s.held(), s.chunks(), strict=True)
        ]

    def passes_s(self, chunks: Sequence[tuple[int, int]], kind: str) -> float:
        """Seconds of a rank's passes of one micro-batch in one direction."""
        return sum(self.whole(chunk, layers, kind).seconds for chunk, layers in chunks)

    def share(self, axes: tuple[str, ...]) -> Sequence[float]:
        """The pace of collectives over several axes at once, each as a share of its pace alone; groups beside
        them send at the same time.
        """
        cluster = self.step.cluster
        groups = [self._near(self.step.group(axis)) for axis in axes]
        beside = [
            (i, replace(group, base=base))
            for i, group in enumerate(groups)
            for base in range(min(group.stride, cluster.node_devices))
        ]
        together = share_links([group for _, group in beside], cluster)
        out = []
        for i in range(len(groups)):
            alone = share_links([group for j, group in beside if j == i], cluster)
            mine = [n for n, (j, _) in enumerate(beside) if j == i]
            out.append(min(1.0, float((together[mine] / alone).min())))
        return out

    def _near(self, group: Group) -> Group:
        """A part of a group that shows on which links it is: two domains of the outermost tier but one."""
        cluster = self.step.cluster
        inner = cluster.domain(len(cluster.tiers) - 2) if len(cluster.tiers) > 1 else 1
        return cluster.group(min(group.size, max(2, 2 * inner // group.stride)), group.stride)

    # -- the answer --------------------------------------------------------------------------------

    @cached_property
    def found(self) -> engine.Run:
        return engine.run(self.program, self.step.framework.contention, self.share)

    def prediction(self, trace: bool = False) -> DistributedPrediction:
        """The answer, from the point of view of the stage that waits least."""
        parts = self.spent(self.freest()) if trace else folded(self.step.plan, self.at)
        steady = sum(
            parts.get(name, 0.0) for name in ("forward", "backward", "recomputation", *TITLES.values())
        )
        return self.step.answer(
            parts, self.stages, parts.get(BUBBLE, 0.0), steady, self.timeline() if trace else None
        )

    def spent(self, rank: int) -> dict[str, float]:
        """Where the time of a stage goes."""
        return engine.breakdown(self.program, self.found, rank, idle=BUBBLE)

    def freest(self) -> int:
        """The stage that waits least."""
        return min(range(self.step.plan.pp), key=lambda rank: self.spent(rank).get(BUBBLE, 0.0))

    def at(self, plan: Plan) -> Simulation:
        """The same with another number of micro-batches."""
        return (
            self
            if plan == self.step.plan
            else Simulation(replace(self.step, plan=plan), self._labels, self._bodies)
        )

    def timeline(self) -> Timeline:
        """What every role does when; passes written out in detail as far as a file can hold it."""
        depth = next((d for d in (2, 1) if _count(self.program, d) <= MOST_SPANS), 0)
        spans = sorted(
            self._spans(self.program, self.found.start, self.found.end, 0, depth),
            key=lambda span: (span.rank, span.start_s, span.end_s),
        )
        return Timeline(tuple(spans), f"{self.step.model.name} on {self.step.cluster.name}")

    def _spans(
        self,
        program: Program,
        start: NDArray[np.float64],
        end: NDArray[np.float64],
        rank: int,
        depth: int,
        scale: float = 1.0,
        origin: float = 0.0,
    ) -> Iterator[Span]:
        """Spans of a program's tasks, those of a body in its place."""
        for task, number in enumerate(program.label.tolist()):
            label = program.labels[number]
            begin, stop = origin + scale * float(start[task]), origin + scale * float(end[task])
            if label is _JOIN:
                continue
            if label.body is not None and depth and stop > begin:
                found = self._bodies.get(label) or self._bodies.setdefault(
                    label, engine.run(label.body, self.step.framework.contention, self.share)
                )
                role = rank + program.streams[program.stream[task]][0]
                yield from self._spans(
                    label.body, found.start, found.end, role, depth - 1, (stop - begin) / found.seconds, begin
                )
                continue
            yield task_span(program, task, begin, stop, rank)


_JOIN = Label("join", "idle", 0.0)


def _count(program: Program, depth: int) -> int:
    """Spans of a program written out to a depth."""
    each = np.array(
        [_count(label.body, depth - 1) if label.body is not None and depth else 1 for label in program.labels]
    )
    return int(each[program.label].sum())
