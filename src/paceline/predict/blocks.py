"""Predict one training step of any captured module whose blocks are spread over a pipeline.

The forward pass is cut between modules (`sim.cuts`) into chunks that take about as long as one another,
forward and backward together. Passes then run in the order of the schedule on the event engine, with
transfers of what crosses a cut between them. Gradients of a stage are reduced when the last of its passes is
done; sharded parameters are gathered before each pass of a chunk, ahead of the one that runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from paceline.cost import memory as memory_model
from paceline.predict.interval import CAPTURED_MEMORY, bounded
from paceline.predict.memory import in_flight
from paceline.predict.parallel import BUBBLE, GATHER, REDUCE, SHARDED, TRANSFERS, Array, Ranks
from paceline.predict.rounds import enough, folded
from paceline.sim import engine
from paceline.sim.cuts import Place, backward_places, balanced, places
from paceline.sim.program import Builder, Label, Program
from paceline.sim.schedules import actions, in_order, sources
from paceline.sim.timeline import Timeline, task_span
from paceline.spec import schedules
from paceline.spec.cluster import Group
from paceline.spec.plan import Plan
from paceline.spec.prediction import DistributedPrediction, Memory, Stage
from paceline.spec.schedules import Action

#: of the time of a backward pass's products and convolutions, the share that goes to gradients of weights:
#: two products of equal size
WEIGHT_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of the model: seconds of its passes on device and host, and what it holds."""

    #: parts between places to cut at
    parts: int
    forward_s: float
    backward_s: float
    recompute_s: float
    #: of the backward pass, what a schedule may put off
    weight_s: float
    forward_host_s: float
    backward_host_s: float
    #: bytes of parameters, of gradients, and the share of a micro-batch's activations that is its own
    parameter_bytes: float
    gradient_bytes: float
    activations: float
    #: bytes that pass on to the next chunk
    sends: float


@dataclass(frozen=True)
class Pipeline(Ranks):
    """A workload cut into the chunks of a pipeline's stages."""

    def group(self, axis: str) -> Group:
        return self.cluster.group(2, self.plan.dp) if axis == "pp" else super().group(axis)

    @property
    def each(self) -> int:
        """Chunks of one stage."""
        return schedules.get(self.plan.schedule).chunks_per_rank(self.plan.vpp)

    @cached_property
    def chunks(self) -> list[Chunk]:
        """The model from its first chunk to its last."""
        found = places(self.workload)
        wanted = self.plan.pp * self.each
        fine = backward_places(self.workload, [place.operator for place in found], self.layout.visits)
        issue, device = self.timed.step.issue, self.timed.step.device
        inside = fine >= 0
        weights = [np.bincount(fine[inside], values[inside], len(found) + 1) for values in (device, issue)]
        chosen = balanced(np.maximum(*weights), wanted - 1)
        coarse = np.where(inside, np.searchsorted(np.array(chosen), fine, side="left"), -1)
        parts = np.diff([-1, *chosen, len(found)]).tolist()
        return self._measure(coarse, [found[i] for i in chosen], parts)

    def _measure(self, chunk: np.typing.NDArray[np.int64], cut: list[Place], parts: list[int]) -> list[Chunk]:
        """What each chunk takes and holds, given the chunk of every operator."""
        step, count = self.timed.step, len(cut) + 1
        phase = np.array([segment.phase for segment in self.workload.segments])[step.segment]
        products = self.timed.packed.kinds.map(lambda kind: float(kind in ("gemm", "conv")))[step.index] > 0

        def total(values: Array, *phases: str) -> Array:
            keep = np.isin(phase, phases) & (chunk >= 0)
            return np.bincount(chunk[keep], values[keep], count).astype(np.float64)

        written = np.array(
            [float(op.bytes_written) for segment in self.workload.segments for op in segment.ops]
        )[step.index]
        kept = total(written, "forward")
        sizes, gradients = self._parameters(chunk, count)
        # two reads and a write
        adds = 3 * gradients / self.timed.chip.bandwidth if self.plan.micro_batches > 1 else np.zeros(count)
        columns = (
            total(step.device, "forward"),
            total(step.device, "backward") + adds,
            total(step.device, "recompute"),
            WEIGHT_SHARE * total(step.device * products, "backward"),
            total(step.issue, "forward"),
            total(step.issue, "backward", "recompute"),
            sizes,
            gradients,
            kept / max(1.0, float(kept.sum())),
            np.array([*(place.bytes for place in cut), 0.0]),
        )
        return [Chunk(number, *map(float, values)) for number, *values in zip(parts, *columns, strict=True)]

    def _parameters(self, chunk: np.typing.NDArray[np.int64], count: int) -> tuple[Array, Array]:
        """Bytes of parameters and of gradients in each chunk."""
        sizes, gradients = np.zeros(count), np.zeros(count)
        for parameter in self.workload.parameters:
            home = max(0, int(chunk[min(self.layout.place(parameter, "forward", 0), len(chunk) - 1)]))
            sizes[home] += parameter.bytes
            gradients[home] += parameter.bytes if parameter.ready >= 0 else 0
        return sizes, gradients

    def held(self, rank: int) -> list[Chunk]:
        """The chunks of a stage."""
        return [
            self.chunks[c] for c in schedules.get(self.plan.schedule).chunks_of(rank, self.plan.pp, self.each)
        ]

    # -- the program -------------------------------------------------------------------------------

    @cached_property
    def labels(self) -> Mapping[tuple[int, str], Label]:
        """Passes by chunk and kind; the host may need longer to issue one than the device to run it."""
        out = {}
        for number, chunk in enumerate(self.chunks):
            back = {"backward": chunk.backward_s, "recomputation": chunk.recompute_s}
            early = {**back, "backward": max(0.0, chunk.backward_s - chunk.weight_s)}
            for kind, parts, host in (
                ("F", {"forward": chunk.forward_s}, chunk.forward_host_s),
                ("B", back, chunk.backward_host_s),
                ("I", early, chunk.backward_host_s),
                ("W", {"backward": min(chunk.weight_s, chunk.backward_s)}, 0.0),
            ):
                parts["host"] = max(0.0, host - sum(parts.values()))
                way = "forward" if kind == "F" else "backward"
                name = {"I": "input gradients", "W": "weight gradients"}.get(kind, way)
                out[number, kind] = Label(f"{name} of chunk {number}", way, sum(parts.values()), parts=parts)
        return out

    @cached_property
    def program(self) -> Program:
        """Every stage, from the first forward pass to the update."""
        p, builder = self.plan, Builder()
        ranks = [actions(p.schedule, rank, p.pp, p.micro_batches, p.vpp) for rank in range(p.pp)]
        sent: dict[tuple[int, str, int], list[int]] = {}
        for rank, action in in_order(ranks, len(self.chunks)):
            chunk, kind, i = action
            device = builder.stream(rank)
            after = [task for source in sources(action, len(self.chunks)) for task in sent[source]]
            ran = builder.add(
                device,
                self.labels[chunk, kind],
                [*after, *self._gather(builder, rank, action)],
                micro_batch=i,
            )
            if kind in ("B", "W") and p.sharding in SHARDED:
                size = self.chunks[chunk].gradient_bytes
                self._send(
                    builder,
                    rank,
                    [("reduce_scatter", size, "shard"), ("all_reduce", size / self.shards, "replicas")],
                    REDUCE,
                    [ran],
                )
            if kind != "W":
                sent[chunk, action.passes, i] = self._transfer(builder, rank, action, [ran])
        for rank in range(p.pp):
            self._finish(builder, rank)
        return builder.build()

    def _send(
        self,
        builder: Builder,
        rank: int,
        exchanges: list[tuple[str, float, str]],
        part: str,
        after: list[int],
    ) -> list[int]:
        """Collectives of a stage one after another, beside its passes."""
        task: list[int] = []
        for op, size, axis in exchanges:
            label = self._collective(op, size, axis, part)
            if label.seconds:
                task = [builder.add(builder.stream(rank, "dp"), label, [*after, *task])]
        return task

    @cached_property
    def _made(self) -> dict[tuple[str, float, str], Label]:
        return {}

    def _collective(self, op: str, size: float, axis: str, part: str) -> Label:
        if (op, size, axis) not in self._made:
            self._made[op, size, axis] = Label(
                op, part, self.send(op, size, axis), op, size, axis, crowds=axis != "pp"
            )
        return self._made[op, size, axis]

    def _gather(self, builder: Builder, rank: int, action: Action) -> list[int]:
        """Makes a chunk's sharded parameters whole before a pass, while the one before it runs."""
        p = self.plan
        once = action.kind == "F" and action.micro_batch == 0
        if p.sharding not in SHARDED or action.kind == "W" or (not p.reshard and not once):
            return []
        size = self.chunks[action.chunk].parameter_bytes * self.gathered_share
        before = [] if p.prefetch else builder.last(builder.stream(rank))
        return self._send(builder, rank, [("all_gather", size, "shard")], GATHER, before)

    def _transfer(self, builder: Builder, rank: int, action: Action, after: list[int]) -> list[int]:
        """Takes an activation, or its gradient, to the stage of the next pass; returns what that has to wait
        for.
        """
        p = self.plan
        target = action.chunk + (1 if action.kind == "F" else -1)
        if (
            not 0 <= target < len(self.chunks)
            or (owner := schedules.get(p.schedule).rank_of(target, p.pp)) == rank
        ):
            return after
        label = self._collective("send_recv", self.chunks[min(action.chunk, target)].sends, "pp", TRANSFERS)
        way = "forward" if action.kind == "F" else "backward"
        return [
            builder.add(
                builder.stream(rank, f"pp {way}"),
                label,
                after,
                builder.stream(owner, f"pp from {action.chunk} {way}"),
            )
        ]

    def _finish(self, builder: Builder, rank: int) -> None:
        """Reduces the gradients of a stage and updates its parameters."""
        p, device = self.plan, builder.stream(rank)
        size = sum(chunk.gradient_bytes for chunk in self.held(rank))
        zero = p.sharding in ("zero1", "zero2")
        if p.sharding not in SHARDED:
            self._send(
                builder,
                rank,
                [("reduce_scatter" if zero else "all_reduce", size, "dp")],
                REDUCE,
                builder.last(device),
            )
        done = builder.last(builder.stream(rank, "dp"))
        builder.add(device, Label("update", "optimizer", self.update_s(rank)), done)
        if zero:
            self._send(builder, rank, [("all_gather", size, "dp")], GATHER, builder.last(device))

    def update_s(self, rank: int) -> float:
        """Seconds of the update of a stage's parameters, or of a rank's share of them."""
        whole = float(self.timed.step.device[self.layout.update :].sum())
        share = sum(chunk.gradient_bytes for chunk in self.held(rank)) / max(
            1.0, sum(chunk.gradient_bytes for chunk in self.chunks)
        )
        return whole * share / self.shards

    # -- memory ------------------------------------------------------------------------------------

    def stage_memory(self, rank: int) -> Memory:
        """Of one device of a stage: its share of the model, and the activations of as many micro-batches as
        are under way.
        """
        p, mine = self.plan, self.held(rank)
        total = max(1.0, sum(chunk.parameter_bytes for chunk in self.chunks))
        share, part = sum(chunk.parameter_bytes for chunk in mine) / total, 1 / self.shards
        held = {
            "parameters": share * (part if p.sharding in SHARDED else 1.0),
            "optimizer": share * part,
            "gradients": share * (part if p.sharding in ("zero2", *SHARDED) else 1.0),
            "activations": self.in_flight(rank),
        }
        more: dict[str, float] = {}
        if p.sharding in SHARDED:
            largest = max(chunk.parameter_bytes for chunk in mine)
            more = {
                "parameters": (1 + min(p.prefetch, len(mine) - 1)) * largest * self.gathered_share,
                "gradients": largest,
            }
        elif p.sharding != "none" and self.style.copies:
            more = {"gradients": sum(chunk.gradient_bytes for chunk in mine)}
        found = memory_model.memory(
            self.workload, self.cluster.device, held=held, more=more, accumulated=p.micro_batches > 1
        )
        return bounded(found, CAPTURED_MEMORY)

    def in_flight(self, rank: int) -> float:
        """The most of a micro-batch's activations that a stage holds at once, in whole micro-batches."""
        p, live, most = self.plan, 0.0, 0.0
        schedule = schedules.get(p.schedule)
        whole = in_flight(p.schedule, rank, p.pp, p.micro_batches, p.vpp)
        few = in_flight(p.schedule, rank, p.pp, enough(p), p.vpp)
        if whole == p.micro_batches:  # before the first goes back
            return p.micro_batches * sum(chunk.activations for chunk in self.held(rank))
        count = p.micro_batches if whole > few else min(p.micro_batches, enough(p))
        for chunk, kind, _ in actions(p.schedule, rank, p.pp, count, p.vpp):
            last = "W" if schedule.splits and kind != "B" else "B"
            live += self.chunks[chunk].activations * {"F": 1.0, last: -1.0}.get(kind, 0.0)
            most = max(most, live)
        return most

    # -- the answer --------------------------------------------------------------------------------

    @cached_property
    def found(self) -> engine.Run:
        return engine.run(self.program, self.style.contention)

    def spent(self, rank: int) -> dict[str, float]:
        """Where the time of a stage goes."""
        return engine.breakdown(self.program, self.found, rank, idle=BUBBLE)

    def freest(self) -> int:
        """The stage that waits least."""
        return min(range(self.plan.pp), key=lambda rank: self.spent(rank).get(BUBBLE, 0.0))

    def at(self, plan: Plan) -> Pipeline:
        """The same with another number of micro-batches."""
        if plan == self.plan:
            return self
        other = replace(self, plan=plan)
        # none of these depends on it
        other.__dict__.update(chunks=self.chunks, labels=self.labels, layout=self.layout, _made=self._made)
        return other

    def prediction(self) -> DistributedPrediction:
        parts = folded(self.plan, self.at)
        stages = []
        for rank in range(self.plan.pp):
            mine = schedules.get(self.plan.schedule).chunks_of(rank, self.plan.pp, self.each)
            forward, backward = (sum(self.labels[c, kind].seconds for c in mine) for kind in "FB")
            layers = sum(self.chunks[c].parts for c in mine)
            stages.append(
                Stage(layers=layers, forward_s=forward, backward_s=backward, memory=self.stage_memory(rank))
            )
        return self.answer(parts, tuple(stages))

    def timeline(self) -> Timeline:
        """What every stage does when."""
        start, end = self.found.start.tolist(), self.found.end.tolist()
        spans = [task_span(self.program, task, start[task], end[task]) for task in range(len(self.program))]
        spans.sort(key=lambda span: (span.rank, span.stream, span.start_s))
        return Timeline(tuple(spans), f"{self.workload.name} on {self.cluster.name}")
