"""What the ranks of a captured module do under a plan: its operators timed, cut into pieces wherever
something is released or waited for.

    ddp             gradients in buckets, in the order in which they become ready; awaited by the optimizer
    zero1, zero2    buckets are reduced and scattered; parameters gathered before the next step
    fsdp, hsdp      each block's parameters gathered before it runs, forward and backward; its gradients
                    scattered after
    pp              the forward pass cut between modules into chunks that take about as long as one another

The micro-batch is the batch that the workload was captured with; what is accumulated before is not reduced
(but sharded parameters are gathered and gradients scattered each time). The host issues operators ahead of
the device, across passes and steps.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from paceline.cost import memory as memory_model
from paceline.cost.collectives import sigma
from paceline.predict import exchange
from paceline.predict.answer import Facts, Passes, network_evidence
from paceline.predict.interval import CAPTURED_MEMORY, bounded
from paceline.predict.layout import Chunk, Layout, Unit, cut, whole
from paceline.predict.memory import in_flight
from paceline.predict.mesh import Mesh, labelled
from paceline.predict.rounds import enough
from paceline.predict.step import Timed
from paceline.sim.program import Builder, Label, Program
from paceline.sim.schedules import actions
from paceline.sim.work import END, GATHERS, REDUCTION, TRANSFERS, Exchange, Pass, Role, Transfer, Work
from paceline.spec import schedules
from paceline.spec.cluster import Cluster
from paceline.spec.plan import Plan
from paceline.spec.prediction import Evidence, Memory, Stage
from paceline.spec.synchronisation import Synchronisation
from paceline.spec.vocabulary import Precision, Sharding
from paceline.spec.workload import ITEMSIZE, Op, Parameter, Workload
from paceline.sync.way import Gradient, Message, Side, Timing, Way

Array = NDArray[np.float64]
#: of the time of a backward pass's products and convolutions, the share that goes to gradients of weights:
#: two products of equal size
WEIGHT_SHARE = 0.5
#: lines of a breakdown by the phase of operators
PARTS = {"recompute": "recomputation"}


@dataclass(frozen=True)
class Module:
    """A workload on the ranks of a resolved plan."""

    workload: Workload
    cluster: Cluster
    plan: Plan
    timed: Timed
    style: Synchronisation
    way: Way
    #: pieces of the program show their operators, for a trace
    detailed: bool = False

    @cached_property
    def layout(self) -> Layout:
        return Layout(self.workload)

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh(self.plan, self.cluster, self.way.island(self.plan, self.cluster))

    @cached_property
    def chunks(self) -> list[Chunk]:
        """The model from its first chunk to its last."""
        if self.plan.pp == 1:
            return [whole(self.layout)]
        step, each = self.timed.step, schedules.get(self.plan.schedule).chunks_per_rank(self.plan.vpp)
        return cut(self.layout, step.issue, step.device, self.plan.pp * each)

    def held(self, rank: int) -> tuple[int, ...]:
        """The chunks of a stage."""
        p = self.plan
        schedule = schedules.get(p.schedule)
        return tuple(schedule.chunks_of(rank, p.pp, schedule.chunks_per_rank(p.vpp)))

    def label(self, sent: Exchange, part: str) -> Label:
        """A collective that is timed."""
        if (sent, part) not in self._labels:
            self._labels[sent, part] = labelled(sent, part, self.mesh.send(*sent))
        return self._labels[sent, part]

    @cached_property
    def _labels(self) -> dict[tuple[Exchange, str], Label]:
        return {}

    # -- operators ---------------------------------------------------------------------------------

    @cached_property
    def seconds(self) -> tuple[Array, Array]:
        """Seconds of each operator on host and device."""
        issue, device = self.timed.step.issue, self.timed.step.device
        if self.cluster.device.kind == "cpu":  # the cores that issue are those that compute
            return np.zeros_like(issue), issue + device
        return issue, device

    @cached_property
    def ready(self) -> list[tuple[Parameter, int]]:
        """Trained parameters as their gradients become ready, each with the operator that may then start."""
        return self.layout.ready()

    @cached_property
    def homes(self) -> dict[str, tuple[int, int]]:
        """Of each parameter, its chunk and the operator before which the forward pass needs it."""
        starts = [chunk.forward[0] for chunk in self.chunks]
        places = {p.name: self.layout.place(p, "forward", 0) for p in self.workload.parameters}
        return {
            name: (max(0, int(np.searchsorted(starts, place, side="right")) - 1), place)
            for name, place in places.items()
        }

    @cached_property
    def parameter_bytes(self) -> list[int]:
        """Of each chunk."""
        return self._bytes(self.workload.parameters)

    @cached_property
    def gradient_bytes(self) -> list[int]:
        """Of each chunk, as they are kept."""
        return self._bytes([parameter for parameter, _ in self.ready])

    def _bytes(self, parameters: Sequence[Parameter]) -> list[int]:
        out = [0] * len(self.chunks)
        for parameter in parameters:
            out[self.homes[parameter.name][0]] += parameter.bytes
        return out

    @property
    def shards(self) -> int:
        """Ranks among which a copy of the optimizer's state, and what else is sharded, is spread."""
        return 1 if self.plan.sharding.whole else self.mesh.shards

    # -- gradients ---------------------------------------------------------------------------------

    @property
    def timing(self) -> Timing:
        """When the framework reduces gradients."""
        late = not self.style.overlap or (self.plan.micro_batches > 1 and not self.style.overlap_accumulated)
        usual = self.style.bucket_bytes is None
        return Timing(
            bucket_bytes=self.plan.bucket_bytes if usual else self.style.bucket_bytes or 0.0,
            first_bytes=self.style.first_bucket_bytes,
            cycle_s=self.style.cycle_s,
            early=not late,
            gathers_early=False,
        )

    @cached_property
    def gradients(self) -> list[Gradient]:
        """In the order in which the model lists its parameters."""
        _, device = self.seconds
        ends = np.concatenate([[0.0], np.cumsum(device)])
        turns = {parameter.name: (turn, place) for turn, (parameter, place) in enumerate(self.ready)}
        half = self.style.half_when_mixed and Precision(self.workload.precision).autocast
        rows = self._rows()
        out = []
        for parameter in self.workload.parameters:
            if parameter.name not in turns:
                continue
            turn, place = turns[parameter.name]
            chunk, needed = self.homes[parameter.name]
            width = ITEMSIZE[parameter.dtype]
            layer = parameter.name.rpartition(".")[0]
            out.append(
                Gradient(
                    name=parameter.name,
                    shape=parameter.shape,
                    bytes=parameter.numel * (min(2, width) if half else width),
                    parameter_bytes=parameter.numel * width,
                    turn=turn,
                    ready=(chunk, place),
                    needed=(chunk, needed),
                    ready_s=float(ends[place]),
                    layer=layer,
                    rows=rows.get(layer, 0),
                    product_s=self._product_s(parameter) if rows.get(layer) else (0.0, 0.0),
                )
            )
        return out

    def _rows(self) -> dict[str, int]:
        """Rows of the activations that each fully connected layer multiplies: samples, or tokens."""
        forward = [segment for segment in self.workload.segments if segment.phase == "forward"]
        products = [op for segment in forward for op in segment.ops if op.kind == "gemm" and op.flops]
        return {op.module: self.workload.units_per_step for op in products}

    def _product_s(self, parameter: Parameter) -> tuple[float, float]:
        """Seconds of the operator that makes a gradient, and of its arithmetic."""
        place = self.layout.place(parameter, "backward", 0) - 1
        if place < 0:
            return 0.0, 0.0
        _, device = self.seconds
        return float(device[place]), float(self.timed.costs.compute_s[self.timed.step.index[place]])

    @cached_property
    def side(self) -> Side:
        """The ranks, as a way of synchronising sees them."""
        _, device = self.seconds
        return Side(
            cluster=self.cluster,
            plan=self.plan,
            chip=self.timed.chip,
            timing=self.timing,
            backward_s=float(device[: self.layout.update].sum()),
            group=self.mesh.group,
            send=self.mesh.send,
            label=self.label,
        )

    @cached_property
    def messages(self) -> list[list[Message]]:
        """What each stage of the pipeline exchanges once in a step."""
        if self.plan.sharding is Sharding.NONE or self.plan.sharding.shards_parameters:
            return [[] for _ in range(self.plan.pp)]
        out = []
        for rank in range(self.plan.pp):
            mine = self.held(rank)
            found = [gradient for gradient in self.gradients if gradient.ready[0] in mine]
            out.append(list(self.way.messages(self.side, found)))
        return out

    # -- passes ------------------------------------------------------------------------------------

    def work(self) -> Work:
        """What the ranks of a step do."""
        kinds = "FBIW" if schedules.get(self.plan.schedule).splits else "FB"
        numbers = range(len(self.chunks))
        return Work(
            title=f"{self.workload.name} on {self.cluster.name}",
            roles=tuple(map(self._in_pieces, self.roles)),
            passes={(number, kind): self.passed(number, kind) for number in numbers for kind in kinds},
            hops={
                number: (self.label(("send_recv", chunk.sends, "pp"), TRANSFERS),)
                for number, chunk in enumerate(self.chunks[:-1])
            },
            contention=self.style.contention,
            runs_ahead=True,
        )

    @cached_property
    def running(self) -> Array:
        """Seconds of each operator on the device, with what adding up gradients takes, without what traded
        gradients spare.
        """
        _, device = self.seconds
        device = device.copy()
        for message in (message for mine in self.messages for message in mine if message.spared_s):
            matrix = next(gradient for gradient in message.gradients if gradient.product_s[0])
            device[matrix.ready[1] - 1] -= message.spared_s
        if self.plan.micro_batches > 1:  # each backward pass adds to what is there: two reads and a write
            kept = 1 / self.shards if self.plan.sharding.shards_gradients else 1.0
            for chunk, size in zip(self.chunks, self.gradient_bytes, strict=True):
                device[chunk.backward[1] - 1] += 3 * kept * size / self.timed.chip.bandwidth
        return device

    def passed(self, number: int, kind: str) -> Pass:
        """One direction of one micro-batch through a chunk."""
        edges = self.edges[number, kind != "F"]
        name = "forward" if kind == "F" else "backward"
        weight_s = self._weight_s(self.chunks[number]) if kind in "IW" else 0.0
        pieces = [Label("weight gradients", name, weight_s)]
        if kind != "W":
            pieces = [self.piece(f"{name} of chunk {number}", name, *edge) for edge in pairwise(edges)]
        sharded = [_located(transfer, edges) for transfer in self.sharded(number, kind)]
        return Pass(
            kind,
            tuple(pieces),
            tuple(sorted(sharded, key=lambda transfer: transfer.release)),
            weight_s if kind == "I" else 0.0,
        )

    def _weight_s(self, chunk: Chunk) -> float:
        """Seconds of a backward pass that a schedule may put off: gradients of weights."""
        step, (first, last) = self.timed.step, chunk.backward
        products = self.timed.packed.kinds.map(lambda kind: float(kind in ("gemm", "conv")))[step.index]
        back = self.phases[first:last] == "backward"
        return WEIGHT_SHARE * float((self.running * products)[first:last][back].sum())

    @cached_property
    def phases(self) -> NDArray[np.str_]:
        """The line of the breakdown of each operator."""
        parts = [PARTS.get(segment.phase, segment.phase) for segment in self.workload.segments]
        return np.array(parts)[self.timed.step.segment]

    def piece(self, name: str, part: str, first: int, last: int) -> Label:
        """Operators one after another as one task."""
        issue, device = self.seconds[0][first:last], self.running[first:last]
        phases = self.phases[first:last]
        parts = {str(phase): float(device[phases == phase].sum()) for phase in np.unique(phases)}
        found = _stretch(name, part, issue, device)
        return replace(
            found,
            parts=parts,
            reads_back=bool((self.timed.step.syncs == last - 1).any()),
            body=self._operators(first, last) if self.detailed else None,
        )

    def _operators(self, first: int, last: int) -> Program:
        """Operators as a program of their own, for a trace."""
        builder = Builder()
        device = builder.stream(0)
        for place in range(first, last):
            op = self._written_out[place]
            builder.add(device, Label(op.name, op.phase, float(self.running[place]), details=_details(op)))
        return builder.build()

    @cached_property
    def _written_out(self) -> list[Op]:
        return [op for index in self.workload.order for op in self.workload.segments[index].ops]

    # -- what is released and awaited --------------------------------------------------------------

    @cached_property
    def roles(self) -> list[Role]:
        """What each stage does besides its passes; places are operators."""
        return [
            exchange.role(self.held(rank), mine, self.update(rank)) for rank, mine in enumerate(self.messages)
        ]

    def update(self, rank: int) -> Label:
        """The update of a stage's parameters, or of a rank's share of them, and copies into buckets."""
        first, kind = self.layout.update, self.plan.sharding
        mine = sum(self.gradient_bytes[number] for number in self.held(rank))
        stage = mine / max(1, sum(self.gradient_bytes)) if self.plan.pp > 1 else 1.0
        share = 1 / self.shards if self.shards > 1 else self.way.update_share(self.mesh.replicas)
        if kind is Sharding.NONE:
            share = 1.0
        device, issue = self.running[first:], self.seconds[0][first:]
        if share < 1:
            fixed = self.timed.costs.latency_s[self.timed.step.index[first:]]
            device = fixed + np.maximum(0.0, device - fixed) * share
        device = stage * device
        if kind is not Sharding.NONE and not kind.shards_parameters and len(device):
            device[0] += 2 * self.style.copies * mine / self.timed.chip.bandwidth
        found = _stretch("update", "optimizer", stage * issue, device)
        if self.detailed and self.plan.pp == 1:
            found = replace(found, body=self._operators(first, len(self.running)))
        return found

    @cached_property
    def edges(self) -> dict[tuple[int, bool], list[int]]:
        """Operators at which the passes of each chunk, forward and backward, are cut into pieces."""
        places: dict[tuple[int, bool], set[int]] = defaultdict(set)
        for role in self.roles:
            for transfer in role.reduces:
                places[transfer.chunk, True].add(transfer.release)
            for transfer in role.gathers:
                places[transfer.chunk, False].add(transfer.needed)
        for number in range(len(self.chunks)):
            for kind in "FB":
                for transfer in self.sharded(number, kind):
                    places[number, kind == "B"] |= {transfer.release, transfer.needed}
        reads = [int(place) + 1 for place in self.timed.step.syncs]
        out = {}
        for number, chunk in enumerate(self.chunks):
            for back, (first, last) in enumerate((chunk.forward, chunk.backward)):
                inside = {place for place in (*places[number, bool(back)], *reads) if first < place < last}
                out[number, bool(back)] = [first, *sorted(inside), last]
        return out

    def _in_pieces(self, role: Role) -> Role:
        """A role whose places are pieces."""
        return replace(
            role,
            reduces=tuple(_located(t, self.edges[t.chunk, True]) for t in role.reduces),
            gathers=tuple(_located(t, self.edges[t.chunk, False]) for t in role.gathers),
        )

    def sharded(self, number: int, kind: str) -> Iterator[Transfer]:
        """Gathers ahead of each block of a chunk, forward and, where parameters were dropped, backward;
        gradients scattered behind it. Places are operators.
        """
        if not self.plan.sharding.shards_parameters:
            return
        (root, *blocks), chunk = self.units[number], self.chunks[number]
        if kind == "W":
            for unit in (root, *blocks):
                yield Transfer(self._scatter(unit))
            return
        spans = [unit.forward if kind == "F" else unit.backward for unit in blocks]
        if kind == "F":
            yield Transfer(self._gather(root), chunk.forward[0], chunk.forward[0])
        if kind == "F" or self.plan.reshard:
            order = sorted(range(len(blocks)), key=lambda i: spans[i])
            for turn, i in enumerate(order):
                ahead = order[max(0, turn - self.plan.prefetch)]
                yield Transfer(self._gather(blocks[i]), spans[ahead][0], spans[i][0])
        if kind == "B":
            yield from (Transfer(self._scatter(unit), unit.backward[1]) for unit in blocks)
            yield Transfer(self._scatter(root), END)

    @cached_property
    def units(self) -> list[list[Unit]]:
        """Of each chunk, what is in none of its blocks, then its blocks."""
        _, *blocks = self.layout.units
        out = []
        for chunk, size in zip(self.chunks, self.parameter_bytes, strict=True):
            mine = [unit for unit in blocks if chunk.forward[0] <= unit.forward[0] < chunk.forward[1]]
            rest = max(0, size - sum(unit.bytes for unit in mine))
            out.append([Unit(rest, chunk.forward, chunk.backward), *mine])
        return out

    def _gather(self, unit: Unit) -> tuple[Label, ...]:
        return (self.label(("all_gather", unit.bytes * self.gathered_share, "shard"), GATHERS),)

    def _scatter(self, unit: Unit) -> tuple[Label, ...]:
        sent = (
            ("reduce_scatter", float(unit.bytes), "shard"),
            ("all_reduce", unit.bytes / self.shards, "replicas"),
        )
        return tuple(self.label(each, REDUCTION) for each in sent)

    @property
    def gathered_share(self) -> float:
        """Bytes of gathered parameters over those kept: mixed precision gathers what it computes with."""
        return 0.5 if Precision(self.workload.precision).autocast else 1.0

    # -- memory ------------------------------------------------------------------------------------

    def memory(self, rank: int) -> Memory:
        """Of one device of a stage: what is sharded counts by its share, and what is whole for a moment
        besides; activations of as many micro-batches as are under way.
        """
        kind, mine, several = self.plan.sharding, self.held(rank), self.plan.micro_batches > 1
        share = sum(self.parameter_bytes[c] for c in mine) / max(1, sum(self.parameter_bytes))
        if self.plan.pp == 1:
            share = 1.0
        part = 1 / self.shards
        own = part if self.shards > 1 else self.way.update_share(self.mesh.replicas)
        held = {
            "parameters": share * (part if kind.shards_parameters else 1.0),
            "gradients": share * (part if kind.shards_gradients else 1.0),
            "optimizer": share * (1.0 if kind is Sharding.NONE else own),
            "activations": self.in_flight(rank),
        }
        more, inside = self._for_a_moment(rank)
        found = memory_model.memory(
            self.workload, self.cluster.device, held=held, more=more, inside=inside, accumulated=several
        )
        trained = sum(gradient.numel for gradient in self.gradients if gradient.needed[0] in mine)
        return bounded(memory_model.with_more(found, self.way.state_bytes * trained), CAPTURED_MEMORY)

    def _for_a_moment(self, rank: int) -> tuple[dict[str, float], dict[str, float]]:
        """Bytes by kind that a rank holds besides its share: for the whole step, and while a block runs."""
        kind, mine = self.plan.sharding, self.held(rank)
        if kind.shards_parameters:
            roots = sum(self.units[number][0].bytes for number in mine)
            sizes = sorted((unit.bytes for c in mine for unit in self.units[c][1:]), reverse=True)
            gathered = sum(sizes[: 1 + self.plan.prefetch]) * self.gathered_share
            more = {"parameters": roots * self.gathered_share}
            if not sizes:  # one unit, whose gradients are whole when all are there
                more["gradients"] = roots
            return more, {"parameters": gathered, "gradients": max([*sizes, 0])}
        if kind is Sharding.ZERO2:
            sent = [sum(g.bytes for g in message.gradients) for message in self.messages[rank]]
            return {"gradients": max(sent, default=0.0)}, {}
        if kind is not Sharding.NONE and self.style.copies:  # buckets hold them once more
            return {"gradients": sum(self.gradient_bytes[number] for number in mine)}, {}
        return {}, {}

    def in_flight(self, rank: int) -> float:
        """The most of a micro-batch's activations that a stage holds at once, in whole micro-batches."""
        p, live, most = self.plan, 0.0, 0.0
        if p.pp == 1:
            return 1.0
        schedule, kept = schedules.get(p.schedule), self.activations
        full = in_flight(p.schedule, rank, p.pp, p.micro_batches, p.vpp)
        few = in_flight(p.schedule, rank, p.pp, enough(p), p.vpp)
        if full == p.micro_batches:  # before the first goes back
            return p.micro_batches * sum(kept[number] for number in self.held(rank))
        count = p.micro_batches if full > few else min(p.micro_batches, enough(p))
        for chunk, kind, _ in actions(p.schedule, rank, p.pp, count, p.vpp):
            last = "W" if schedule.splits and kind != "B" else "B"
            live += kept[chunk] * {"F": 1.0, last: -1.0}.get(kind, 0.0)
            most = max(most, live)
        return most

    @cached_property
    def activations(self) -> list[float]:
        """Of a micro-batch's activations, the share of each chunk: what its operators write."""
        written = np.array([float(op.bytes_written) for op in self._written_out])
        sizes = [float(written[slice(*chunk.forward)].sum()) for chunk in self.chunks]
        return [size / max(1.0, sum(sizes)) for size in sizes]

    # -- the answer --------------------------------------------------------------------------------

    def facts(self, passes: Passes) -> Facts:
        """What an answer says of the step besides its time."""
        plan, workload = self.plan, self.workload
        again = float(sum(op.flops for op in self._written_out if op.phase == "recompute")) / max(
            workload.flops, 1.0
        )
        samples = plan.dp * plan.micro_batches
        stages = tuple(
            Stage(
                layers=sum(self.chunks[number].parts for number in self.held(rank)),
                forward_s=forward_s,
                backward_s=backward_s,
                memory=self.memory(rank),
            )
            for rank, (forward_s, backward_s) in enumerate(passes)
        )
        fullest = max((stage.memory for stage in stages), key=lambda memory: memory.peak_bytes)
        return Facts(
            model=workload.name,
            cluster=self.cluster,
            plan=plan,
            seq=workload.seq or 0,
            precision=workload.precision,
            unit=workload.unit,
            units=samples * workload.units_per_step,
            parameters=workload.parameter_count,
            flops=samples * workload.flops * (1 - again),
            executed_flops=samples * workload.flops,
            peak_flops=self.timed.peak_flops * plan.ranks,
            stages=stages,
            fit=memory_model.fit(workload, fullest),
            provenance=self.provenance(),
        )

    def sigma(self, step: float, exposed: float, bubble: float) -> float:
        """Standard deviation of the logarithm: operators by their groups, exposed communication by its
        network.
        """
        group, network = self.mesh.group("dp"), 0.0
        if group.size > 1:
            network = float(sigma(self.plan.bucket_bytes, group, self.cluster, self.mesh.library))
        share = min(1.0, exposed / step)
        own = self.timed.step_sigma(step / self.plan.micro_batches)
        return math.hypot((1 - share) * own, share * network)

    def provenance(self) -> Iterator[Evidence]:
        """What the times rest on."""
        yield from self.timed.provenance()
        if self.plan.dp > 1:
            yield from network_evidence(self.cluster)
            sharded = self.plan.sharding.shards_parameters
            how = (
                "gathers and overlap of PyTorch FSDP"
                if sharded
                else f"buckets and overlap of {self.style.title}"
            )
            yield Evidence(what=how, kind="derived", source="the framework's code")


def _stretch(name: str, part: str, issue: Array, device: Array) -> Label:
    """Operators one after another: seconds of the device, and of the host to issue them; the last of them
    ends no sooner than any operator, once issued, and all behind it have run.
    """
    if not len(device):
        return Label(name, part, 0.0)
    issued, left = np.cumsum(issue), np.cumsum(device[::-1])[::-1]
    host_s = float(issued[-1])
    return Label(name, part, float(left[0]), host_s=host_s, drain_s=float((issued + left).max()) - host_s)


def _located(transfer: Transfer, edges: Sequence[int]) -> Transfer:
    """A transfer between operators as one between pieces, which lie between edges."""
    release, needed = (
        place if place == END else bisect_left(edges, place, hi=len(edges) - 1)
        for place in (transfer.release, transfer.needed)
    )
    return replace(transfer, release=release, needed=END if needed == len(edges) - 1 else needed)


def _details(op: Op) -> dict[str, object]:
    """What a trace says of an operator."""
    return {
        "module": op.module,
        "dtype": op.dtype,
        "dims": list(op.dims),
        "flops": op.flops,
        "bytes": op.bytes_read + op.bytes_written,
    }
