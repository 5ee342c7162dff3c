"""Predict one training step of a transformer under a parallel plan, by simulating it.

The pieces are those of the closed form (`predict/distributed.py`); how they come together is left to the event engine, one level at a time:

    layer    segments of operators on the device, the host that issues them, collectives between and beside them
    pass     the layers of a chunk; where parameters are sharded, gathers a layer ahead and scatters behind
    step     passes in the order of the pipeline's schedule, transfers between stages, gradients reduced bucket by bucket, the update

A level's seconds are a task of the next. Only what the next level can overlap is written out there: the layers of the last backward
pass, beside which gradients are reduced, and of the first forward pass, beside which updated parameters are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from paceline.cost.collectives import share_links
from paceline.cost.curves import Curves
from paceline.cost.transformer import Collective
from paceline.predict.distributed import TITLES, Exchange, StageTime, Step
from paceline.predict.interval import Errors
from paceline.sim import engine
from paceline.sim.program import COMPUTE, HOST, Builder, Label, Program, buckets
from paceline.sim.schedules import SPLIT, Action, actions, chunks_per_rank, rank_of
from paceline.sim.timeline import Span, Timeline
from paceline.spec.cluster import Cluster, Group
from paceline.spec.framework import Framework
from paceline.spec.plan import Plan, resolve
from paceline.spec.prediction import DistributedPrediction
from paceline.spec.transformer import Transformer

#: copies of a layer that are run to see at what pace one follows another
COPIES = 3
#: the least that gradients are put together to where a framework does not use torch's buckets
LEAST_BUCKET = 40e6
#: bytes of the first bucket of torch's DDP, which becomes ready soonest
FIRST_BUCKET = 2.0**20
#: spans that a trace file holds at most, about; beyond, passes are not written out layer by layer
MOST_SPANS = 150_000
BUBBLE, GATHERS, REDUCTION, TRANSFERS = "pipeline bubble", "parameter gathers", "gradient reduction", "pipeline transfers"


def predict(
    model: Transformer, cluster: Cluster, plan: Plan, *, errors: Errors | None = None, framework: Framework | None = None,
    curves: Curves | None = None, trace: bool = False,
) -> DistributedPrediction:
    """Step time with interval, where it goes, and the memory of every stage; with `trace`, the timeline too."""
    simulation = Simulation(Step.of(model, cluster, resolve(plan, cluster.device_count, model), framework, curves))
    return simulation.prediction(errors, trace)


@dataclass
class Simulation:
    """A resolved plan as a program, and what became of it."""

    step: Step
    _labels: dict[tuple[object, ...], Label] = field(default_factory=dict)

    # -- layers ------------------------------------------------------------------------------------

    def piece(self, name: str) -> Label:
        """The embedding, a layer or the head in one direction, as one task; a layer's backward pass with what it runs again."""
        return self._once(("piece", name), lambda: self._piece(name))

    def _once(self, key: tuple[object, ...], make: object) -> Label:
        if key not in self._labels:
            self._labels[key] = make()  # type: ignore[operator]
        return self._labels[key]

    def _piece(self, name: str) -> Label:
        s = self.step
        way = name.rpartition(".")[2]
        builder = Builder()
        for _ in range(COPIES):
            if name == "layer.backward" and s.plan.recompute != "none":
                full = s.plan.recompute == "full"
                self._operators(builder, "layer.forward", "recomputation", None if full else s.again())
            self._operators(builder, name, way)
        body = builder.build(COPIES)
        found = engine.turn(body, s.framework.contention, idle="host")
        return Label(name, way, found.seconds, body=body, parts=found.parts)

    def _operators(self, builder: Builder, name: str, part: str, keep: NDArray[np.bool_] | None = None) -> None:
        """Operators and collectives of a piece; or only the operators to `keep`."""
        s = self.step
        timed = s.pieces[name]
        seconds, each = timed.each + s.gaps(name), s.issue(name)
        host, device = builder.stream(0, HOST), builder.stream(0)
        if keep is not None:
            self._issued(builder, Label(name, part, float(seconds[keep].sum())), each * int(keep.sum()), ())
            return
        beside: dict[tuple[int, ...], list[Collective]] = {}
        alone: dict[int, list[Collective]] = {}
        for collective in timed.piece.collectives:
            if collective.behind:
                beside.setdefault(collective.behind, []).append(collective)
            else:
                alone.setdefault(collective.at, []).append(collective)
        starts = {behind[0]: behind for behind in beside}
        inside = {i for behind in beside for i in behind}
        at, count = 0, len(seconds)
        while at <= count:
            for collective in alone.get(at, ()):
                self._collective(builder, collective, builder.last(device))
            if at == count:
                break
            if at in starts:
                behind = starts[at]
                stop = at + len(behind)
                sent = []
                for collective in beside[behind]:
                    first, rest = self._cut(collective)
                    if first is not None:
                        self._sent(builder, first, builder.last(device), device)
                    sent.append((rest, builder.last(device)))
                shared = [self._sent(builder, rest, after) for rest, after in sent]
                ops = Label(name, part, float(seconds[list(behind)].sum()))
                self._issued(builder, ops, each * len(behind), sent[0][1])
                builder.add(device, _JOIN, shared)
                # a collective that stands alone within the region runs after it
                for place in range(at + 1, stop):
                    for collective in alone.get(place, ()):
                        self._collective(builder, collective, builder.last(device))
            else:
                stop = next((i for i in range(at + 1, count) if i in inside or i in alone), count)
                self._issued(builder, Label(name, part, float(seconds[at:stop].sum())), each * (stop - at), ())
            at = stop
        if s.framework.blocking:
            builder.add(host, _JOIN, builder.last(device))

    def _issued(self, builder: Builder, label: Label, host_s: float, after: Sequence[int]) -> int:
        """Operators on the device, after the host has issued them; a host that waits for each kernel issues them one by one."""
        host, device = builder.stream(0, HOST), builder.stream(0)
        blocking = self.step.framework.blocking
        issue = builder.add(host, Label("issue", "host", host_s), builder.last(device) if blocking else ())
        return builder.add(device, label, [issue, *after])

    def _cut(self, collective: Collective) -> tuple[Label | None, Label]:
        """A collective cut into what has to come first and what runs beside operators."""
        seconds = self.step.send(collective.op, collective.size, collective.axis)
        first = 1 / collective.parts if collective.parts > 1 else 0.0
        whole = Label(collective.op, TITLES[collective.axis], seconds, collective.op, collective.size, collective.axis, crowds=True)
        if not first:
            return None, whole
        # the first part carries the name, so that the collective is counted once
        rest = replace(whole, seconds=seconds * (1 - first), op="more " + collective.op, size=0.0)
        return replace(whole, seconds=seconds * first), rest

    def _sent(self, builder: Builder, label: Label, after: Sequence[int], back: int = -1) -> int:
        """A collective on the stream of its axis; with `back`, that stream waits for it."""
        issue = builder.add(builder.stream(0, HOST), Label("issue", "host", self.step.framework.issue_collective_s))
        task = builder.add(builder.stream(0, label.axis), label, [issue, *after])
        if back >= 0:
            builder.add(back, _JOIN, [task])
        return task

    def _collective(self, builder: Builder, collective: Collective, after: Sequence[int]) -> None:
        seconds = self.step.send(collective.op, collective.size, collective.axis)
        if seconds:
            label = Label(collective.op, TITLES[collective.axis], seconds, collective.op, collective.size, collective.axis, crowds=True)
            self._sent(builder, label, after, builder.stream(0))

    # -- passes ------------------------------------------------------------------------------------

    def sequence(self, chunk: int, layers: int, kind: str) -> list[Label]:
        """The pieces of a pass through a chunk, in order."""
        last = self._last_chunk
        way = "forward" if kind == "F" else "backward"
        pieces = [*["embedding"] * (chunk == 0), *["layer"] * layers, *["head"] * (chunk == last)]
        return [self.piece(f"{name}.{way}") for name in (pieces if kind == "F" else reversed(pieces))]

    @property
    def _last_chunk(self) -> int:
        p = self.step.plan
        return p.pp * chunks_per_rank(p.schedule, p.vpp) - 1

    def whole(self, chunk: int, layers: int, kind: str) -> Label:
        """A pass through a chunk as one task."""
        end = (chunk == 0, chunk == self._last_chunk)
        return self._once(("pass", layers, end, kind), lambda: self._whole(chunk, layers, kind))

    def _whole(self, chunk: int, layers: int, kind: str) -> Label:
        s = self.step
        part = "forward" if kind == "F" else "backward"
        if kind == "W":
            return Label("weight gradients", part, s.pieces["layer.backward"].weight_s * layers)
        builder = Builder()
        parameters = s.end_parameters(chunk == 0, chunk == self._last_chunk)
        self.layers(builder, 0, self.sequence(chunk, layers, kind), kind, parameters)
        body = builder.build()
        found = engine.turn(body, s.framework.contention, self.share, BUBBLE)
        label = Label(f"{part} pass", part, found.seconds, body=body, parts=found.parts)
        if kind != "I":
            return label
        later = s.pieces["layer.backward"].weight_s * layers
        parts = {**label.parts, part: max(0.0, label.parts.get(part, 0.0) - later)}
        return Label("input gradients", part, sum(parts.values()), parts=parts)

    def layers(self, builder: Builder, role: int, pieces: Sequence[Label], kind: str, ends: float) -> list[int]:
        """The pieces of a pass one after another, with sharded parameters gathered ahead of them and gradients scattered behind."""
        s = self.step
        device = builder.stream(role)
        if not s.sharded:
            return [builder.add(device, label) for label in pieces]
        forward, network = kind == "F", builder.stream(role, "shard")
        ahead = 1 + s.plan.prefetch
        ran: list[int] = []
        gathered: dict[int, list[int]] = {}
        places = [i for i, label in enumerate(pieces) if label.name.startswith("layer")]

        def gather(number: int) -> None:
            if number < len(places) and (forward or s.plan.reshard):
                # memory for a layer more is there when the one before those gathered ahead is done
                done = [ran[places[number - ahead]]] if number >= ahead else []
                gathered[places[number]] = self.exchange(builder, network, s.unshard(s.layer_parameters()), GATHERS, done)

        start = self.exchange(builder, network, s.unshard(ends), GATHERS, ()) if ends and forward else []
        for number in range(ahead if not forward else 1):
            gather(number)
        reached = ahead - 1 if not forward else 0
        for i, label in enumerate(pieces):
            if i in gathered or i in places:
                if forward and i not in gathered:
                    gather(places.index(i))
                ran.append(builder.add(device, label, gathered.get(i, [])))
                reached += 1
                if forward:
                    gather(reached)
                else:
                    self.exchange(builder, network, s.scatter(s.layer_parameters()), GATHERS, ran[-1:])
                    gather(reached)
            else:
                ran.append(builder.add(device, label, start))
        if ends and not forward:
            self.exchange(builder, network, s.scatter(ends), GATHERS, ran[-1:])
        builder.add(device, _JOIN, builder.last(network))
        return ran

    def exchange(
        self, builder: Builder, stream: int, exchanges: Sequence[Exchange], part: str, after: Sequence[int], also: int = -1, crowds: bool = True,
    ) -> list[int]:
        """Collectives one after another on a stream; the last of them, if there is one."""
        task: list[int] = []
        for exchange in exchanges:
            seconds = self.step.send(*exchange)
            if seconds:
                label = self._once((exchange, part, crowds), lambda e=exchange, t=seconds: Label(e[0], part, t, *e, crowds=crowds))
                task = [builder.add(stream, label, [*after, *task], also)]
        return task

    # -- the step ----------------------------------------------------------------------------------

    @cached_property
    def program(self) -> Program:
        """Every role of the pipeline, from the first forward pass to the update."""
        s, p = self.step, self.step.plan
        chunks = s.chunks()
        builder = Builder()
        left = [actions(p.schedule, rank, p.pp, p.micro_batches, p.vpp)[::-1] for rank in range(p.pp)]
        layers = {chunk: count for mine in chunks for chunk, count in mine}
        #: of each pass, what the next stage waits for
        sent: dict[tuple[int, str, int], list[int]] = {}
        ready: list[list[tuple[float, float, list[int]]]] = [[] for _ in range(p.pp)]
        firsts = {rank: {a: None for a in _first_forward(mine)} for rank, mine in enumerate(left)}
        lasts = {rank: {a: None for a in _last_backward(mine, SPLIT if p.schedule in SPLIT else ())} for rank, mine in enumerate(left)}
        gathered = {rank: self._updated(builder, rank, chunks[rank]) for rank in range(p.pp)}
        running = Label("data", "host", s.framework.micro_batch_s) if s.framework.micro_batch_s else None
        while any(left):
            stuck = True
            for rank, mine in enumerate(left):
                while mine:
                    chunk, kind, i = action = mine[-1]
                    source = (chunk - 1, "F", i) if kind == "F" else (chunk + 1, "B", i)
                    needed = kind != "W" and (chunk > 0 if kind == "F" else chunk < self._last_chunk)
                    if needed and source not in sent:
                        break
                    mine.pop()
                    stuck = False
                    device = builder.stream(rank)
                    arrived = sent[source] if needed else []
                    if running and kind == "F" and chunk < p.pp:
                        builder.add(device, running, (), micro_batch=i)
                    pieces = self.sequence(chunk, layers[chunk], kind) if s.replicated and s.framework.dp_overlap else []
                    if pieces and action in firsts[rank] and any(gathered[rank].values()):
                        ran = [builder.add(device, label, [*arrived, *gathered[rank].get((chunk, n), [])], micro_batch=i)
                               for n, label in enumerate(pieces)]
                    elif pieces and action in lasts[rank] and kind == "B":
                        ran = [builder.add(device, label, arrived, micro_batch=i) for label in pieces]
                        ready[rank] += [(*self._trained(label), [task]) for label, task in zip(pieces, ran, strict=True)]
                    else:
                        ran = [builder.add(device, self.whole(chunk, layers[chunk], kind), arrived, micro_batch=i)]
                        if action in lasts[rank] and s.replicated:
                            ready[rank] += [(*self._trained(label), ran) for label in self.sequence(chunk, layers[chunk], "B")]
                    if kind != "W":
                        sent[chunk, "F" if kind == "F" else "B", i] = self._transfer(builder, rank, chunk, kind, ran[-1:])
            if stuck:
                raise AssertionError(f"schedule {p.schedule} waits for itself")
        self._finish(builder, ready)
        return builder.build()

    def _transfer(self, builder: Builder, rank: int, chunk: int, kind: str, after: list[int]) -> list[int]:
        """Takes what a pass leaves to the rank of the next one; returns what that has to wait for."""
        p = self.step.plan
        target = chunk + (1 if kind == "F" else -1)
        if not 0 <= target <= self._last_chunk or rank_of(p.schedule, target, p.pp) == rank:
            return after
        way = "forward" if kind == "F" else "backward"
        if not self.step.framework.p2p_overlap:
            return self.exchange(builder, builder.stream(rank), self.step.hop, TRANSFERS, (), crowds=False) or after
        receiver = builder.stream(rank_of(p.schedule, target, p.pp), f"pp from {chunk} {way}")
        return self.exchange(builder, builder.stream(rank, f"pp {way}"), self.step.hop, TRANSFERS, after, receiver, crowds=False) or after

    def _trained(self, label: Label) -> tuple[float, float]:
        """Parameters, and experts' parameters, whose gradients a piece leaves."""
        s = self.step
        kind = label.name.partition(".")[0]
        if kind == "layer":
            return s.layer_parameters() - s.expert_parameters(), s.expert_parameters()
        alone = s.plan.pp == 1 or s.ends(0) == (True, True)
        head = s.end_parameters(alone, True) - (s.end_parameters(True, False) if alone else 0.0)
        return (s.end_parameters(True, False) if kind == "embedding" else head), 0.0

    def _updated(self, builder: Builder, rank: int, chunks: Sequence[tuple[int, int]]) -> dict[tuple[int, int], list[int]]:
        """Gathers parameters that the last update left in parts, in the order in which forward passes need them; by chunk and piece."""
        s = self.step
        out: dict[tuple[int, int], list[int]] = {}
        if not (s.replicated and s.framework.dp_overlap) or s.plan.sharding not in ("zero1", "zero2"):
            return out
        wanted = [((chunk, n), self._trained(label)) for chunk, count in chunks for n, label in enumerate(self.sequence(chunk, count, "F"))]
        for bucket in buckets([(dense + experts) * s.gradient_bytes for _, (dense, experts) in wanted], self._cap):
            dense, experts = (sum(wanted[i][1][k] for i in bucket) for k in (0, 1))
            task = self.exchange(builder, builder.stream(rank, "dp"), s.exchanges(dense, experts)[1], GATHERS, ())
            out[wanted[bucket[0]][0]] = task
        return out

    @property
    def _cap(self) -> float:
        return max(self.step.plan.bucket_bytes, LEAST_BUCKET)

    def _finish(self, builder: Builder, ready: Sequence[Sequence[tuple[float, float, list[int]]]]) -> None:
        """Reduces gradients as they become ready, or all of them at the end; then the update, when every stage is done (their norm is common)."""
        s, p = self.step, self.step.plan
        for rank, parts in enumerate(ready):
            network = builder.stream(rank, "dp")
            for bucket in buckets([(dense + experts) * s.gradient_bytes for dense, experts, _ in parts], self._cap):
                dense, experts = (sum(parts[i][k] for i in bucket) for k in (0, 1))
                after = parts[bucket[-1]][2] if s.framework.dp_overlap else builder.last(builder.stream(rank))
                self.exchange(builder, network, s.exchanges(dense, experts)[0], REDUCTION, after)
        if s.tied:
            ends = [builder.stream(rank, "dp") for rank in (0, p.pp - 1)]
            after = [task for rank in (0, p.pp - 1) for task in builder.last(builder.stream(rank))]
            self.exchange(builder, ends[0], s.tied, REDUCTION, after, ends[1])
        done = [task for rank in range(p.pp) for kind in (COMPUTE, "dp") for task in builder.last(builder.stream(rank, kind))]
        update = Label("update", "optimizer", self.stages_update)
        for rank in range(p.pp):
            device, network = builder.stream(rank), builder.stream(rank, "dp")
            builder.add(device, update, done)
            if s.replicated and not s.framework.dp_overlap:
                dense, experts = (sum(part[k] for part in ready[rank]) for k in (0, 1))
                self.exchange(builder, network, s.exchanges(dense, experts)[1], GATHERS, builder.last(device))
            if s.framework.step_s:
                builder.add(device, Label("data", "host", s.framework.step_s), builder.last(network))

    @cached_property
    def stages(self) -> list[StageTime]:
        return self.step.stages()

    @cached_property
    def stages_update(self) -> float:
        return self.step.optimizer(self.stages)

    def share(self, axes: tuple[str, ...]) -> Sequence[float]:
        """The pace of collectives over several axes at once, each as a share of its pace alone; groups beside them send at the same time."""
        cluster = self.step.cluster
        groups = [self._near(self.step.group(axis)) for axis in axes]
        beside = [(i, replace(group, base=base)) for i, group in enumerate(groups) for base in range(min(group.stride, cluster.node_devices))]
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

    def prediction(self, errors: Errors | None, trace: bool = False) -> DistributedPrediction:
        """The answer, from the point of view of the stage that waits least."""
        candidates = [engine.breakdown(self.program, self.found, rank, idle=BUBBLE) for rank in range(self.step.plan.pp)]
        parts = min(candidates, key=lambda parts: parts.get(BUBBLE, 0.0))
        steady = sum(parts.get(name, 0.0) for name in ("forward", "backward", "recomputation", *TITLES.values()))
        return self.step.answer(parts, self.stages, parts.get(BUBBLE, 0.0), steady, errors, self.timeline() if trace else None)

    def timeline(self) -> Timeline:
        """What every role does when; passes written out in detail as far as a file can hold it."""
        depth = next((d for d in (2, 1) if _count(self.program, d) <= MOST_SPANS), 0)
        spans = self._spans(self.program, self.found.start, self.found.end, 0, depth)
        return Timeline(tuple(sorted(spans, key=lambda span: (span.rank, span.start_s, span.end_s))), f"{self.step.model.name} on {self.step.cluster.name}")

    def _spans(self, program: Program, start: NDArray[np.float64], end: NDArray[np.float64], rank: int, depth: int, scale: float = 1.0,
               origin: float = 0.0) -> Iterator[Span]:
        """Spans of a program's tasks, those of a body in its place."""
        labels, once = program.label.tolist(), len(program) // program.copies
        for task in range(len(program) - once, len(program)):
            label, i = program.labels[labels[task]], task - len(program) + once
            begin, stop = origin + scale * float(start[i]), origin + scale * float(end[i])
            role, stream = program.streams[program.stream[task]]
            if label is _JOIN:
                continue
            if label.body is not None and depth and stop > begin:
                turn = engine.turn(label.body, self.step.framework.contention, self.share)
                yield from self._spans(label.body, turn.start, turn.end, rank + role, depth - 1, (stop - begin) / turn.seconds, begin)
                continue
            number = int(program.micro_batch[task])
            details = {"bytes": label.size, "axis": label.axis} if label.op else {"micro-batch": number} if number >= 0 else {}
            yield Span(_kernel(label), stream, begin, stop, label.part, details, rank + role)


_JOIN = Label("join", "idle", 0.0)


def _first_forward(mine: Sequence[Action]) -> Iterator[Action]:
    """The first forward pass of each chunk; `mine` is in reverse."""
    seen: set[int] = set()
    for action in reversed(mine):
        if action.kind == "F" and action.chunk not in seen:
            seen.add(action.chunk)
            yield action


def _last_backward(mine: Sequence[Action], split: Sequence[str]) -> Iterator[Action]:
    """The pass of each chunk that completes its gradients; `mine` is in reverse."""
    seen: set[int] = set()
    for action in mine:
        if action.kind in ("BW" if split else "B") and action.chunk not in seen:
            seen.add(action.chunk)
            yield action


def _count(program: Program, depth: int) -> int:
    """Spans of a program written out to a depth."""
    each = np.array([_count(label.body, depth - 1) if label.body is not None and depth else 1 for label in program.labels])
    return int(each[program.label].sum()) // program.copies


def _kernel(label: Label) -> str:
    """Names of collectives as trace analysers know them."""
    return "ncclDevKernel_" + "".join(word.capitalize() for word in label.op.removeprefix("more ").split("_")) if label.op else label.name
