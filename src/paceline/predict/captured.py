"""A captured module on the ranks of a plan: its chunks, its gradients, what is exchanged, and what is known
of the step besides its time.

    ddp             gradients in buckets, in the order in which they become ready; awaited by the optimizer
    zero1, zero2    buckets are reduced and scattered; parameters gathered before the next step
    fsdp, hsdp      each block's parameters gathered before it runs, forward and backward; its gradients
                    scattered after
    pp              the forward pass cut between modules into chunks that take about as long as one another

The micro-batch is the batch that the workload was captured with; what is accumulated before is not reduced
(but sharded parameters are gathered and gradients scattered each time). `captured_work.py` says what the
ranks do, `captured_memory.py` what they hold.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from paceline.cost import memory as memory_model
from paceline.predict import captured_work
from paceline.predict.answer import StepFacts
from paceline.predict.captured_memory import stage_memory
from paceline.predict.evidence import network_evidence
from paceline.predict.interval import SPREADS, bounded, network_sigma
from paceline.predict.layout import Chunk, Layout, Unit, cut, whole
from paceline.predict.step import Timed
from paceline.sim.mesh import Mesh
from paceline.sim.work import StepWork
from paceline.spec import schedules
from paceline.spec.cluster import Cluster
from paceline.spec.plan import Plan
from paceline.spec.prediction import Evidence, Fit, Memory
from paceline.spec.synchronisation import Synchronisation
from paceline.spec.vocabulary import Precision, Sharding
from paceline.spec.workload import ITEMSIZE, Op, Parameter, Workload
from paceline.sync.way import BucketRule, Gradient, Message, Place, Side, Way

Array = NDArray[np.float64]


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

    # -- the model ---------------------------------------------------------------------------------

    @cached_property
    def layout(self) -> Layout:
        return Layout(self.workload)

    @cached_property
    def operators(self) -> list[Op]:
        """Every operator that runs."""
        return [op for index in self.workload.order for op in self.workload.segments[index].ops]

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

    @cached_property
    def seconds(self) -> tuple[Array, Array]:
        """Seconds of each operator on host and device."""
        issue, device = self.timed.step.issue, self.timed.step.device
        if self.cluster.device.kind == "cpu":  # the cores that issue are those that compute
            return np.zeros_like(issue), issue + device
        return issue, device

    @cached_property
    def homes(self) -> dict[str, Place]:
        """Of each parameter, its chunk and the operator before which the forward pass needs it."""
        starts = [chunk.forward[0] for chunk in self.chunks]
        places = {p.name: self.layout.needed(p) for p in self.workload.parameters}
        return {name: (max(0, bisect_right(starts, place) - 1), place) for name, place in places.items()}

    @cached_property
    def parameter_bytes(self) -> list[int]:
        """Of each chunk."""
        return self._bytes(self.workload.parameters)

    @cached_property
    def gradient_bytes(self) -> list[int]:
        """Of each chunk, as they are kept."""
        return self._bytes(parameter for parameter in self.workload.parameters if parameter.ready >= 0)

    def _bytes(self, parameters: Iterable[Parameter]) -> list[int]:
        out = [0] * len(self.chunks)
        for parameter in parameters:
            out[self.homes[parameter.name][0]] += parameter.bytes
        return out

    def in_stage(self, of_chunks: Sequence[int], rank: int) -> int:
        """Of a stage of the pipeline, what each of its chunks has."""
        return sum(of_chunks[number] for number in self.mesh.chunks(rank))

    @cached_property
    def units(self) -> list[list[Unit]]:
        """Of each chunk, what is in none of its blocks, then its blocks."""
        out = []
        for chunk, size in zip(self.chunks, self.parameter_bytes, strict=True):
            blocks = [unit for unit in self.layout.units if unit.forward[0] in range(*chunk.forward)]
            rest = max(0, size - sum(unit.bytes for unit in blocks))
            out.append([Unit(rest, chunk.forward, chunk.backward), *blocks])
        return out

    @property
    def gathered_share(self) -> float:
        """Bytes of gathered parameters over those kept: mixed precision gathers what it computes with."""
        return 0.5 if Precision(self.workload.precision).autocast else 1.0

    @property
    def shards(self) -> int:
        """Ranks among which what is sharded is spread."""
        return 1 if self.plan.sharding.whole else self.mesh.shards

    @property
    def update_share(self) -> float:
        """Of the optimizer's state and work, what one rank has."""
        return self.way.update_share(self.mesh.replicas) if self.shards == 1 else 1 / self.shards

    # -- gradients ---------------------------------------------------------------------------------

    @property
    def timing(self) -> BucketRule:
        """When the framework reduces gradients."""
        style = self.style
        late = not style.overlap or (self.plan.micro_batches > 1 and not style.overlap_accumulated)
        relax = self.plan.relax
        first = relax.defaults.first_bucket_bytes if relax.compress else style.first_bucket_bytes
        return BucketRule(
            bucket_bytes=self.plan.bucket_bytes if style.bucket_bytes is None else style.bucket_bytes,
            first_bytes=first,
            cycle_s=style.cycle_s,
            early=not late,
            gathers_early=False,
        )

    @cached_property
    def gradients(self) -> list[list[Gradient]]:
        """Of each stage of the pipeline, in the order in which the model lists its parameters."""
        ready = enumerate(self.layout.ready())
        made = {parameter.name: self._gradient(parameter, turn, at) for turn, (parameter, at) in ready}
        listed = [made[p.name] for p in self.workload.parameters if p.name in made]
        held = map(self.mesh.chunks, range(self.plan.pp))
        return [[gradient for gradient in listed if gradient.ready[0] in mine] for mine in held]

    def _gradient(self, parameter: Parameter, turn: int, place: int) -> Gradient:
        home, width = self.homes[parameter.name], ITEMSIZE[parameter.dtype]
        layer = parameter.name.rpartition(".")[0]
        half = self.style.half_when_mixed and Precision(self.workload.precision).autocast
        linear = layer in self._linear
        return Gradient(
            name=parameter.name,
            shape=parameter.shape,
            bytes=parameter.numel * (min(2, width) if half else width),
            parameter_bytes=parameter.numel * width,
            turn=turn,
            ready=(home[0], place),
            needed=home,
            ready_s=float(self._ends[place]),
            layer=layer,
            rows=self.workload.units_per_step * linear,
            product_s=self._product_s(parameter) if linear else (0.0, 0.0),
        )

    @cached_property
    def _ends(self) -> Array:
        """Seconds of the device until so many operators are done, while nothing is in the way."""
        return np.cumsum([0.0, *self.seconds[1]])

    def _product_s(self, parameter: Parameter) -> tuple[float, float]:
        """Seconds of the operator that makes a gradient, and of its arithmetic."""
        place = self.layout.complete(parameter) - 1
        if place < 0:
            return 0.0, 0.0
        return float(self.seconds[1][place]), float(self.timed.costs.compute_s[self.timed.step.index[place]])

    @cached_property
    def _linear(self) -> set[str]:
        """Fully connected layers, each of which multiplies as many rows as there are samples, or tokens."""
        return {
            op.module for op in self.operators if op.phase == "forward" and op.kind == "gemm" and op.flops
        }

    @cached_property
    def side(self) -> Side:
        """The ranks, as a way of synchronising sees them."""
        backward_s = float(self.seconds[1][: self.layout.update].sum())
        return Side(mesh=self.mesh, chip=self.timed.chip, timing=self.timing, backward_s=backward_s)

    @cached_property
    def messages(self) -> list[list[Message]]:
        """What each stage of the pipeline exchanges once in a step."""
        sent = self.way.messages
        return [list(sent(self.side, mine)) if self.reduces_whole else [] for mine in self.gradients]

    @property
    def reduces_whole(self) -> bool:
        """Whether whole gradients are reduced, in buckets, once in a step."""
        kind = self.plan.sharding
        return kind is not Sharding.NONE and not kind.shards_parameters

    # -- the answer --------------------------------------------------------------------------------

    def work(self) -> StepWork:
        """What the ranks do."""
        return captured_work.CapturedRanks(self).work()

    def facts(self) -> StepFacts:
        """What an answer says of the step besides its time."""
        plan, workload = self.plan, self.workload
        again = sum(op.flops for op in self.operators if op.phase == "recompute")
        samples = plan.dp * plan.micro_batches
        return StepFacts(
            model=workload.name,
            unit=workload.unit,
            units=samples * workload.units_per_step,
            parameters=workload.parameter_count,
            flops=samples * (workload.flops - again),
            executed_flops=samples * workload.flops,
            peak_flops=self.timed.peak_flops * plan.ranks,
        )

    def layers(self, rank: int) -> int:
        """Parts of the model in a stage, between places to cut at."""
        return self.in_stage([chunk.parts for chunk in self.chunks], rank)

    def memory(self, rank: int) -> Memory:
        """Bytes of one device of a stage, by kind, when most is live."""
        return bounded(stage_memory(self, rank), SPREADS["memory"]["captured"])

    def fit(self, fullest: Memory) -> Fit:
        """Whether the fullest stage fits, and what would help."""
        return memory_model.fit(self.workload, fullest)

    @property
    def replica_size(self) -> tuple[float, float]:
        """Parameters of the device that holds most, and bytes of one element of a gradient."""
        counts = [sum(gradient.numel for gradient in mine) for mine in self.gradients]
        widths = (gradient.parameter_bytes / gradient.numel for gradient in chain(*self.gradients))
        return max(counts), round(max(widths, default=4))

    def sigma(self, step: float, exposed: float, bubble: float) -> float:
        """Standard deviation of the logarithm: operators by their groups, exposed communication by its
        network.
        """
        network = network_sigma(self.mesh, self.plan.bucket_bytes, ("dp",))
        share = min(1.0, exposed / step)
        own = self.timed.step_sigma(step / self.plan.micro_batches)
        return math.hypot((1 - share) * own, share * network)

    def provenance(self) -> Iterator[Evidence]:
        """What the times rest on."""
        yield from self.timed.provenance()
        if self.plan.dp > 1:
            yield from network_evidence(self.cluster)
            how = f"buckets and overlap of {self.style.title}"
            if self.plan.sharding.shards_parameters:
                how = "gathers and overlap of PyTorch FSDP"
            yield Evidence(what=how, kind="derived", source="the framework's code")
