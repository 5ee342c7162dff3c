"""Predict one training step of a transformer under a parallel plan, in closed form.

    micro-batch   a stage's layers forward and backward, each with what of its collectives no operator hides
    pipeline      m micro-batches at the pace of the slowest stage, and one passage through all of them (the bubble)
    data          gradients reduced, parameters gathered: beside computation where the framework does it, else after it
    step          pipeline + exposed data-parallel communication + optimizer

Ranks are numbered with the tensor-parallel ones innermost, then context, data and pipeline, as Megatron, DeepSpeed
and torchtitan number them, so that a stride says which network a group uses.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.cost.chip import Chip, chip
from paceline.cost.collectives import collective_s, sigma
from paceline.cost.curves import Curves, curves_for
from paceline.cost.operators import OpTimes, times
from paceline.cost.pack import Packed, pack_ops
from paceline.cost.transformer import Blocks, Collective, PieceTime, Shape, adam_ops, blocks, piece_times, saved_bytes
from paceline.predict import memory, remedy
from paceline.predict.interval import Errors, around, device_sigma
from paceline.predict.step import errors_for
from paceline.predict.stragglers import straggling
from paceline.sim.program import buckets
from paceline.sim.schedules import SPLIT, V_SHAPED, bubble_s, chunks_of, chunks_per_rank, span_s
from paceline.sim.timeline import Timeline
from paceline.spec import framework as frameworks
from paceline.spec.cluster import Cluster, Group
from paceline.spec.device import Device
from paceline.spec.framework import Framework
from paceline.spec.plan import Plan, resolve, stage_layers
from paceline.spec.prediction import DistributedPrediction, Evidence, Memory, Part, Stage
from paceline.spec.transformer import Transformer
from paceline.spec.workload import ITEMSIZE

#: bytes per second to the host's memory where a device does not say: PCI Express 3.0, x16
HOST_BPS = 15.75e9
#: of that, for each device while all of a node copy: two share an uplink, and reach 80 % of it
HOST_SHARE = 0.4
#: between kernels that follow each other on the device
GAP_S = 1.3e-6
#: frameworks that leave gradients to torch's DDP; the others put them together as Megatron does
TORCH_BUCKETS = ("torch", "torch-compile", "torch-compile-2024", "llm-foundry")
#: a collective that is still to be timed: operation, bytes, mesh axis
Exchange = tuple[str, float, str]
#: what the exposed part of a mesh axis' collectives is called
TITLES = {"tp": "tensor-parallel collectives", "cp": "context-parallel exchange", "ep": "expert exchange", "host": "activation offload"}


def predict(
    model: Transformer, cluster: Cluster, plan: Plan, *, errors: Errors | None = None, framework: Framework | None = None,
    curves: Curves | None = None,
) -> DistributedPrediction:
    """Step time with interval, where it goes, and the memory of every stage."""
    step = Step.of(model, cluster, resolve(plan, cluster.device_count, model), framework, curves)
    if not plan.relax.plain:
        from paceline.predict import relaxed  # it builds on this module

        return relaxed.transformer(step, errors, simulate=False)
    return step.prediction(errors)


def default_framework(plan: Plan) -> str:
    """Sharded parameters are torch's way, everything else Megatron's."""
    return "torch-compile" if plan.sharding in ("fsdp", "hsdp") else "megatron-core"


@dataclass(frozen=True, slots=True)
class Pass:
    """One direction of a piece: seconds of its operators, what of its collectives is exposed by axis, and the host's time."""

    compute_s: float
    exposed: Mapping[str, float]
    host_s: float
    flops: float
    blocking: bool = False
    #: seconds of these that the device waits for, whatever it does before and after
    wait_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.beside(0.0)

    def beside(self, gathers_s: float) -> float:
        """Seconds with what gathering parameters adds on the device."""
        return max(self.device_s + gathers_s, 0.0 if self.blocking else self.host_s)

    @property
    def device_s(self) -> float:
        """Seconds when the host is never in the way, or always where it waits for every kernel."""
        return self.compute_s + sum(self.exposed.values()) + (self.host_s if self.blocking else self.wait_s)

    def plus(self, other: Pass, times: float = 1.0) -> Pass:
        axes = {*self.exposed, *other.exposed}
        return Pass(
            self.compute_s + times * other.compute_s, {a: self.exposed.get(a, 0.0) + times * other.exposed.get(a, 0.0) for a in axes},
            self.host_s + times * other.host_s, self.flops + times * other.flops, self.blocking or other.blocking,
            self.wait_s + times * other.wait_s,
        )


_NOTHING = Pass(0.0, {}, 0.0, 0.0)


class Held(Protocol):
    """What a stage of the pipeline holds."""

    @property
    def layers(self) -> int: ...
    @property
    def first(self) -> bool: ...
    @property
    def last(self) -> bool: ...


class Layers(NamedTuple):
    """Layers of a stage, and whether the embedding and the head are with them."""

    layers: int
    first: bool
    last: bool


@dataclass(frozen=True, slots=True)
class StageTime:
    """What one stage does for one micro-batch."""

    layers: int
    first: bool
    last: bool
    forward: Pass
    backward: Pass
    recompute: Pass
    #: seconds that gathering and scattering sharded parameters adds to a micro-batch
    gather_forward_s: float
    gather_backward_s: float
    #: seconds of weight gradients in the backward pass
    weight_s: float

    @property
    def forward_s(self) -> float:
        return self.forward.beside(self.gather_forward_s)

    @property
    def backward_s(self) -> float:
        return self.backward.plus(self.recompute).beside(self.gather_backward_s)


@dataclass(frozen=True)
class Step:
    """A resolved plan on a cluster, with everything timed that it is made of."""

    model: Transformer
    cluster: Cluster
    plan: Plan
    framework: Framework
    shape: Shape
    chip: Chip
    curves: Curves
    found: Blocks
    pieces: Mapping[str, PieceTime]
    costs: OpTimes

    @staticmethod
    def of(model: Transformer, cluster: Cluster, plan: Plan, framework: Framework | None, curves: Curves | None) -> Step:
        style = framework or frameworks.get(plan.framework or default_framework(plan))
        shape = Step.shape_of(model, plan, style)
        found, target = blocks(shape), chip(cluster.device)
        constants = curves or curves_for(cluster.device)
        pieces, costs = piece_times(found, cluster.device, target, constants)
        return Step(model, cluster, plan, style, shape, target, constants, found, pieces, costs)

    @staticmethod
    def shape_of(model: Transformer, plan: Plan, framework: Framework) -> Shape:
        """What a rank runs for one micro-batch of a plan."""
        dtype = "bf16" if plan.precision in ("fp8", "fp4") else plan.precision
        return Shape(
            model=model, framework=framework, mbs=plan.mbs, seq=plan.seq, tp=plan.tp, cp=plan.cp, ep=plan.ep, sp=plan.sp, dtype=dtype,
            matrix=plan.precision, context=plan.context, accumulate=plan.micro_batches > 1, trained=not plan.adapters,
        )

    def replanned(self, plan: Plan) -> Step:
        """The step under another resolved plan, for its memory alone: its operators are still those of the first."""
        usual = not plan.framework and self.framework.name == default_framework(self.plan)
        style = frameworks.get(default_framework(plan)) if usual else self.framework
        return replace(self, plan=plan, framework=style, shape=Step.shape_of(self.model, plan, style))

    # -- groups ------------------------------------------------------------------------------------

    def group(self, axis: str) -> Group:
        """Where the ranks of a mesh axis sit; `dp` is every rank that holds the same parameters."""
        p = self.plan
        inner = p.tp * p.cp
        size, stride = {
            "tp": (p.tp, 1), "cp": (p.cp, p.tp), "dp": (p.dp * p.cp, p.tp), "ep": (p.ep, 1), "pp": (2 if p.pp > 1 else 1, inner * p.dp),
            "ends": (2 if p.pp > 1 else 1, inner * p.dp * max(1, p.pp - 1)),
            "shard": ((p.shard or p.dp * p.cp), p.tp), "replicas": (p.dp * p.cp // (p.shard or p.dp * p.cp), p.tp * (p.shard or p.dp * p.cp)),
            "expert-dp": (max(1, p.dp * inner // p.ep), p.ep),
        }[axis]
        return self.cluster.group(size, stride)

    def send(self, op: str, size: float, axis: str) -> float:
        """Seconds of a collective over a mesh axis."""
        group = self.group(axis)
        if group.size == 1 or size <= 0:
            return 0.0
        if axis == "ep" and self.framework.dispatch == "once":
            size *= self.copies(group) / self.model.top_k
        if axis == "shard" and self.framework.flat_gathers and group.size > self.cluster.node_devices:
            size *= self.cluster.node_devices
        return collective_s(op, size, group, self.cluster)

    def copies(self, group: Group) -> float:
        """Domains of the outermost link that a token's experts are in, on average: each gets one copy and passes it on inside."""
        m = self.model
        domains = next(fan for i in reversed(range(len(self.cluster.tiers))) if (fan := group.fan(i)) > 1)
        found = domains * (1 - (1 - 1 / domains) ** m.top_k)
        return min(found, m.top_groups) if m.top_groups and domains < group.size else found

    # -- one micro-batch ---------------------------------------------------------------------------

    def run(self, name: str, keep: NDArray[np.bool_] | None = None) -> Pass:
        """A piece's operators with what they cannot hide of its collectives; or only those to `keep`, without collectives."""
        timed = self.pieces[name]
        every = np.ones(len(timed.each), dtype=bool) if keep is None else keep
        left = np.where(every, timed.each, 0.0)
        compute = float(left.sum() + self.gaps(name)[every].sum())
        exposed: dict[str, float] = defaultdict(float)
        collectives = timed.piece.collectives if keep is None else []
        for collective in collectives:
            exposed[collective.axis] += self.exposed(collective, left)
        flops = self.found.packed.flops[self.place(name)]
        host = float(self.issue(name)[every].sum()) + self.framework.issue_collective_s * len(collectives)
        wait = self.wait(name) if keep is None else 0.0
        return Pass(compute, dict(exposed), host, float(flops[every].sum()), self.framework.blocking, wait)

    def place(self, name: str) -> slice:
        """Where a piece's operators stand among all that are packed."""
        return slice(self.found.starts[name], self.found.starts[name] + len(self.pieces[name].each))

    def gaps(self, name: str) -> NDArray[np.float64]:
        """Seconds between the kernels of each of a piece's operators."""
        out = GAP_S * self.costs.kernels[self.place(name)]
        for place, count in self.pieces[name].piece.launches.items():
            out[place] = GAP_S * count
        return out

    def issue(self, name: str) -> NDArray[np.float64]:
        """Host seconds of each operator of a piece."""
        found = self.pieces[name]
        out = np.full(len(found.each), self.framework.issue_backward_s if name.endswith("backward") else self.framework.issue_s)
        for place, count in found.piece.launches.items():
            cast = found.piece.ops[place].kind == "cast"
            out[place] += count * (self.framework.issue_expert_cast_s if cast else self.framework.issue_expert_s)
        return out

    def wait(self, name: str) -> float:
        """Seconds that the device waits in a piece for a host that could not run ahead of it."""
        timed, start = self.pieces[name], self.pieces[name].piece.sync
        if start < 0 or self.framework.blocking:
            return 0.0
        sent = sum(self.send(c.op, c.size, c.axis) for c in timed.piece.collectives if c.at >= start and not c.behind)
        return max(0.0, float(self.issue(name)[start:].sum() - timed.each[start:].sum()) - sent)

    def exposed(self, collective: Collective, left: np.typing.NDArray[np.float64]) -> float:
        """What of a collective is not hidden; takes the time it hides behind out of `left`, and charges for the contention."""
        seconds = self.send(collective.op, collective.size, collective.axis)
        behind = list(collective.behind)
        room = float(left[behind].sum()) if behind else 0.0
        if not room or not seconds:
            return seconds
        first = seconds / collective.parts if collective.parts > 1 else 0.0
        beside = min(room / (1 - self.framework.contention), seconds - first)  # operators are slower meanwhile
        hidden = (1 - self.framework.contention) * beside
        left[behind] *= 1 - hidden / room
        return seconds - hidden

    def again(self) -> NDArray[np.bool_]:
        """Which operators of a layer's forward pass the backward pass runs again."""
        piece = self.pieces["layer.forward"].piece
        count = len(piece.ops)
        if self.plan.recompute != "selective":
            return np.full(count, self.plan.recompute == "full")
        if self.framework.selective == "core":
            return np.isin(np.arange(count), piece.core)
        # operators other than products run again, and every second product
        products = [i for i, op in enumerate(piece.ops) if op.kind in ("gemm", "attention")]
        return ~np.isin(np.arange(count), [*products[::2], *piece.core])

    def recomputed(self) -> Pass:
        """What of a layer's forward pass the backward pass runs again."""
        if self.plan.recompute == "none":
            return _NOTHING
        return self.run("layer.forward", None if self.plan.recompute == "full" else self.again())

    # -- where the layers are ----------------------------------------------------------------------

    def chunks(self) -> list[tuple[tuple[int, int], ...]]:
        """The chunks of each rank of the pipeline, as (number along the model, layers)."""
        p = self.plan
        each = chunks_per_rank(p.schedule, p.vpp)
        held = [chunks_of(p.schedule, rank, p.pp, each) for rank in range(p.pp)]
        whole, total = self.model.layers, p.pp * each
        if whole % total and (whole + 2) % total == 0 and total > 1:  # one layer fewer beside the embedding and beside the head
            return [tuple((c, (whole + 2) // total - (c in (0, total - 1))) for c in mine) for mine in held]
        counts = stage_layers(whole, p.pp, each)
        return [tuple((c, counts[rank] // each + (i < counts[rank] % each)) for i, c in enumerate(mine)) for rank, mine in enumerate(held)]

    def ends(self, rank: int) -> tuple[bool, bool]:
        """Whether a rank of the pipeline holds the embedding, and the head."""
        return rank == 0, rank == (0 if self.plan.schedule in V_SHAPED else self.plan.pp - 1)

    def stages(self) -> list[StageTime]:
        """Every distinct stage of the pipeline, in order."""
        again = self.recomputed()
        forward, backward = self.copied(self.run("layer.forward")), self.copied(self.run("layer.backward"), again)
        outer = {name: self.run(name) for name in ("embedding.forward", "embedding.backward", "head.forward", "head.backward")}
        weight = self.pieces["layer.backward"].weight_s
        gather, scatter = self.gathers()
        out = []
        for i, mine in enumerate(self.chunks()):
            layers, (first, last) = sum(count for _, count in mine), self.ends(i)
            f, b = _NOTHING.plus(forward, layers), _NOTHING.plus(backward, layers)
            for there, part in ((first, "embedding"), (last, "head")):
                if there:
                    f, b = f.plus(outer[f"{part}.forward"]), b.plus(outer[f"{part}.backward"])
            whole = backward.plus(again)
            out.append(StageTime(
                layers, first, last, f, b, _NOTHING.plus(again, layers), _hidden(gather, forward.device_s, layers, self.framework.contention),
                _hidden(scatter + (gather if self.plan.reshard else 0.0), whole.device_s, layers, self.framework.contention),
                weight * layers,
            ))
        return out

    @property
    def host_Bps(self) -> float:  # noqa: N802
        """Bytes per second between a device and its host's memory while all devices of a node copy."""
        return HOST_SHARE * (self.cluster.device.host_bandwidth_Bps or HOST_BPS)

    @property
    def copying_s(self) -> float:
        """Seconds to copy what a layer saves to the host's memory, or back."""
        if self.plan.offload != "activations":
            return 0.0
        return saved_bytes(self.shape, self.plan.recompute) / self.host_Bps

    def copied(self, layer: Pass, again: Pass = _NOTHING) -> Pass:
        """A layer that waits for its copies, which go on beside it and what it runs `again`."""
        wait = max(0.0, self.copying_s - layer.plus(again).seconds)
        return layer.plus(Pass(0.0, {"host": wait}, 0.0, 0.0)) if wait else layer

    def gathers(self) -> tuple[float, float]:
        """Seconds to gather one layer's sharded parameters, and to reduce and scatter its gradients."""
        if not self.sharded:
            return 0.0, 0.0
        layer = self.layer_parameters()
        return self.total(self.unshard(layer)), self.total(self.scatter(layer))

    def unshard(self, parameters: float) -> list[Exchange]:
        """What makes sharded parameters whole."""
        return [("all_gather", parameters * ITEMSIZE[self.shape.dtype], "shard")]

    def scatter(self, parameters: float) -> list[Exchange]:
        """What reduces their gradients and leaves each rank its part."""
        if self.plan.adapters:
            return []
        size, share = parameters * self.gradient_bytes, self.plan.shard or self.plan.dp * self.plan.cp
        return [("reduce_scatter", size, "shard"), ("all_reduce", size / share, "replicas")]

    def total(self, exchanges: Sequence[Exchange]) -> float:
        """Seconds of collectives one after another."""
        return sum(self.send(*exchange) for exchange in exchanges)

    @property
    def sharded(self) -> bool:
        """Whether parameters are sharded, and gathered layer by layer."""
        return self.plan.sharding in ("fsdp", "hsdp")

    @property
    def replicated(self) -> bool:
        """Whether whole gradients are reduced once per step."""
        return self.plan.dp * self.plan.cp > 1 and not self.sharded and not self.plan.adapters

    # -- sizes -------------------------------------------------------------------------------------

    @property
    def gradient_bytes(self) -> int:
        """Of one parameter, as it is reduced."""
        return 4 if self.framework.reduce_fp32 else ITEMSIZE[self.shape.dtype]

    def layer_parameters(self) -> float:
        """Of a layer on one rank."""
        return self.model.dense_parameters / self.plan.tp + self.expert_parameters()

    def expert_parameters(self) -> float:
        """Of a layer's experts on one rank."""
        return self.model.expert_parameters / self.plan.ep

    def end_parameters(self, first: bool, last: bool) -> float:
        """Of the embedding and the head on one rank; a tied projection is held at both ends."""
        m, tp = self.model, self.plan.tp
        tied = m.vocab * m.hidden if m.tied and last and not first else 0
        return ((m.embedding_parameters if first else 0) + ((m.head_parameters + tied) if last else 0)) / tp

    def parameters(self, stage: Held) -> float:
        return stage.layers * self.layer_parameters() + self.end_parameters(stage.first, stage.last)

    # -- the step ----------------------------------------------------------------------------------

    def pipeline(self, stages: list[StageTime]) -> tuple[float, float, float]:
        """Seconds of all micro-batches at the slowest stage's pace, of the bubble, and of exposed transfers."""
        p = self.plan
        spent = [stage.forward_s + stage.backward_s for stage in stages]
        slowest = max(spent)
        steady = p.micro_batches * (slowest + self.framework.micro_batch_s)
        if p.pp == 1:
            return steady, 0.0, 0.0
        hop, overlap = self.total(self.hop), self.framework.p2p_overlap
        if p.schedule in ("1f1b", "gpipe"):
            alone, sent = (
                span_s(p.schedule, p.micro_batches, [stage.forward_s for stage in stages], [stage.backward_s for stage in stages], seconds, overlap)
                for seconds in (0.0, hop))
            bubble, transfers = alone - p.micro_batches * slowest, sent - alone
        else:
            each = chunks_per_rank(p.schedule, p.vpp)
            others, last = [stage for stage in stages if not stage.last], next(stage for stage in stages if stage.last)
            forward, backward, weight = (
                sum(getattr(stage, name) for stage in others) / len(others) / each for name in ("forward_s", "backward_s", "weight_s"))
            head = last.forward_s - forward * each, last.backward_s - backward * each
            bubble, sent = (
                bubble_s(p.schedule, p.pp, p.micro_batches, each, (forward, backward, weight), head, seconds, overlap) for seconds in (0.0, hop))
            transfers = sent - bubble
        return steady, bubble, transfers

    def data_parallel(self, stages: list[StageTime]) -> tuple[float, float]:
        """Exposed seconds of reducing gradients and of gathering parameters after the update."""
        reduce_s = gather_s = 0.0
        if self.replicated:
            reduce_s, gather_s = self.overlapped(stages) if self.framework.dp_overlap else self.afterwards(stages)
        elif self.sharded:
            # the ends are gathered and scattered outside the layers, before and after everything else
            end = max(self.end_parameters(stage.first, stage.last) for stage in stages)
            reduce_s, gather_s = (self.plan.micro_batches * self.total(found) for found in (self.scatter(end), self.unshard(end)))
        return reduce_s + self.total(self.tied), gather_s

    def afterwards(self, stages: list[StageTime]) -> tuple[float, float]:
        """The same where nothing hides it; later stages finish earlier, and reduce while the first ones still work."""
        reduce_s = gather_s = waited = 0.0
        for stage in stages:
            reduces, gathers = self.reduction(stage)
            reduce_s, gather_s = max(reduce_s, reduces - waited), max(gather_s, gathers)
            waited += stage.backward_s / self.plan.vpp
        return reduce_s, gather_s

    def overlapped(self, stages: list[StageTime]) -> tuple[float, float]:
        """The same bucket by bucket beside the last backward and the first forward pass.

        What hides slows these passes down, on every stage that they go through one after another. The bucket that is ready last, with
        the embedding, does not hide, nor does the first that a forward pass needs.
        """
        p, slow = self.plan, self.framework.contention
        each, split = chunks_per_rank(p.schedule, p.vpp), p.schedule in SPLIT
        many = 1 + (each - 1) * p.pp  # passes through one chunk from when another's gradients are complete
        reduce_s = gather_s = late = 0.0
        for i in reversed(range(len(stages))):
            stage, ahead = stages[i], stages[:i]
            reduces, gathers = self.reduction(stage)
            size = self.parameters(stage)
            bucket = min(1.0, self.bucket / size)
            end = max(bucket, self.end_parameters(True, False) / size) if stage.first else bucket
            # where weights' gradients are put off, all stages end with them
            last = (stage.weight_s if split else stage.backward_s) / each
            waited = 0.0 if split else sum(other.backward_s for other in ahead) / each
            hidden = max(0.0, min(reduces * (1 - end), last * ((1 + many) / 2 if split else many - bucket) / (1 - slow)))
            reduce_s = max(reduce_s, late + slow * hidden + reduces - hidden - waited)
            late += 0.0 if split else slow * min(hidden, last / (1 - slow))
            left = max(0.0, gathers - sum(other.forward_s for other in ahead) / each)
            hidden = min(left, gathers * (1 - end), stage.forward_s / each * many / (1 - slow))
            gather_s += slow * hidden if i else max(0.0, gathers - (1 - slow) * hidden)
        return max(reduce_s, late), gather_s

    @property
    def bucket_bytes(self) -> float:
        """Gradients that are reduced at once: what the plan says, else torch's or Megatron's rule; all of them where nothing overlaps."""
        if not self.framework.dp_overlap:
            return math.inf
        if self.plan.bucket_bytes != Plan.bucket_bytes:
            return self.plan.bucket_bytes
        if self.framework.name in TORCH_BUCKETS:
            return 25 * 2.0**20
        return max(40e6, 1e6 * self.plan.dp * self.plan.cp) * self.gradient_bytes

    @property
    def first_bucket_bytes(self) -> float | None:
        """Of the bucket that is ready first: torch's is small, unless a size is given."""
        return 2.0**20 if self.framework.name in TORCH_BUCKETS and self.plan.bucket_bytes == Plan.bucket_bytes else None

    def reduction(self, stage: StageTime) -> tuple[float, float]:
        """Seconds to reduce a stage's gradients over the ranks that share them, and to gather what each has updated."""
        experts, dense = stage.layers * self.expert_parameters(), stage.layers * (self.layer_parameters() - self.expert_parameters())
        end = self.end_parameters(stage.first, stage.last)
        if dense + experts + end <= self.bucket:
            whole = self.exchanges(dense + end, experts)
            return self.total(whole[0]), self.total(whole[1])
        if end < self.bucket:  # the ends are in a bucket with layers, or large tensors by themselves
            share, end = 1 + end / max(1.0, dense + experts), 0.0
        else:
            share = 1.0
        reduces, gathers = (self.total(found) for found in self.exchanges(end, 0.0))
        return reduces + share * stage.layers * self.layer_reduction[0], gathers + share * stage.layers * self.layer_reduction[1]

    @cached_property
    def layer_buckets(self) -> list[tuple[float, bool]]:
        """Buckets of several layers in a row, as parameters and whether they are experts'; tensors are not cut."""
        out = []
        for experts in (False, True):
            sizes = [count for count, own in self.tensors("layer") if own == experts] * self._in_a_row
            out += [(sum(sizes[i] for i in bucket), experts) for bucket in buckets(sizes, self.bucket_bytes / self.gradient_bytes)]
        return out

    @property
    def _in_a_row(self) -> int:
        return math.ceil(min(self.model.layers, 1 + 4 * self.bucket_bytes / self.gradient_bytes / self.layer_parameters()))

    @cached_property
    def bucket(self) -> float:
        """Parameters of one bucket, on average."""
        return max(sum(count for count, _ in self.layer_buckets) / len(self.layer_buckets), min(1e15, self.bucket_bytes / self.gradient_bytes))

    @cached_property
    def layer_reduction(self) -> tuple[float, float]:
        """Seconds to reduce the gradients of a layer, and to gather its parameters, in their buckets."""
        found = [self.exchanges(0.0 if experts else count, count if experts else 0.0) for count, experts in self.layer_buckets]
        reduces, gathers = (sum(self.total(pair[way]) for pair in found) / self._in_a_row for way in (0, 1))
        return reduces, gathers

    def tensors(self, kind: str) -> list[tuple[float, bool]]:
        """Parameters on one rank of the tensors of a piece, in the order in which a forward pass uses them, and whether they are experts'."""
        m, tp = self.model, self.plan.tp
        norm = [m.hidden / tp] * (2 if m.norm == "layer" else 1)
        if kind != "layer":
            both = self.plan.pp == 1 or self.ends(0) == (True, True)
            first = self.end_parameters(True, False)
            rest = self.end_parameters(both, True) - sum(norm) - (first if both else 0.0)
            table = m.vocab * m.hidden / tp
            found = [table, *filter(None, [first - table])] if kind == "embedding" else [*norm, *filter(None, [rest])]
            return [(count, False) for count in found]

        def linear(inputs: int, outputs: int) -> list[float]:
            return [inputs * outputs / tp, *[outputs / tp] * m.bias]

        def feed(width: int) -> list[float]:
            return [*linear(m.hidden, width) * (2 if m.gated else 1), *linear(width, m.hidden)]

        apart = [*linear(m.hidden, m.q_size), *linear(m.hidden, m.kv_size) * 2] if m.gated else linear(m.hidden, m.q_size + 2 * m.kv_size)
        attention = [m.attention_parameters / tp] if m.kv_rank else [*apart, *linear(m.q_size, m.hidden)]
        mixed = [m.hidden * m.experts / tp, *(feed(m.shared_ffn) if m.shared_ffn else [])] if m.experts else feed(m.ffn)
        experts = [count * tp for count in feed(m.ffn)] * (m.experts // self.plan.ep)
        return [*((count, False) for count in (*norm, *attention, *norm, *mixed)), *((count, True) for count in experts)]

    def exchanges(self, dense: float, experts: float) -> tuple[list[Exchange], list[Exchange]]:
        """What reduces the gradients of so many parameters, and gathers them after the update."""
        low = ITEMSIZE[self.shape.dtype]
        zero = self.plan.sharding in ("zero1", "zero2")
        counts = [(axis, count) for axis, count in (("dp", dense), ("expert-dp", experts)) if count]
        reduces = [("reduce_scatter" if zero else "all_reduce", count * self.gradient_bytes, axis) for axis, count in counts]
        return reduces, [("all_gather", count * low, axis) for axis, count in counts] if zero else []

    @property
    def hop(self) -> list[Exchange]:
        """What takes an activation from one stage of the pipeline to the next."""
        part = self.plan.tp if self.plan.sp or self.framework.p2p_scattered else 1
        whole: list[Exchange] = [("all_gather", self.shape.wide_bytes, "tp")] if part > 1 and not self.plan.sp else []
        return [("send_recv", self.shape.wide_bytes / part, "pp"), *whole]

    @property
    def tied(self) -> list[Exchange]:
        """What keeps the two copies of an embedding equal that both ends of a pipeline hold."""
        p, m = self.plan, self.model
        if not (m.tied and p.pp > 1 and self.framework.tied_allreduce and p.schedule not in V_SHAPED) or p.adapters:
            return []
        return [("all_reduce", m.vocab * m.hidden / p.tp * self.gradient_bytes, "ends")]

    def optimizer(self, stages: list[StageTime]) -> float:
        """Seconds of the update, on the stage with the most parameters."""
        return self.update(max(self.updated(stage) for stage in stages))

    def updated(self, stage: Held) -> float:
        """Parameters of a stage that one rank updates; fewer ranks hold the same experts than hold the same of everything else."""
        p = self.plan
        if p.sharding not in ("zero1", "zero2", "fsdp", "hsdp"):
            return self.parameters(stage)
        experts = stage.layers * self.expert_parameters()
        return (self.parameters(stage) - experts) / (p.shard or p.dp * p.cp) + experts / self.group("expert-dp").size

    def update(self, parameters: float) -> float:
        """Seconds of the update of a rank's share of a stage's parameters."""
        p = self.plan
        if p.adapters:
            return 0.0
        count = int(parameters)
        seconds = float(times(_adam(count, self.shape.dtype, self.framework), self.chip, self.curves).seconds.sum())
        if p.offload == "optimizer":
            moved = count * (self.gradient_bytes + ITEMSIZE[self.shape.dtype])
            seconds = max(seconds, moved / self.host_Bps)
        return seconds

    # -- memory ------------------------------------------------------------------------------------

    def held(self) -> list[Layers]:
        """What each stage of the pipeline holds, in order."""
        return [Layers(sum(count for _, count in mine), *self.ends(i)) for i, mine in enumerate(self.chunks())]

    def memory(self, stage: Held, index: int) -> Memory:
        """Bytes of one device of a stage, by kind, when most is live."""
        return memory.stage_memory(self, stage, index)

    # -- the answer --------------------------------------------------------------------------------

    def prediction(self, errors: Errors | None) -> DistributedPrediction:
        p = self.plan
        stages = self.stages()
        steady, bubble, transfers = self.pipeline(stages)
        reduce_s, gather_s = self.data_parallel(stages)
        if p.schedule in V_SHAPED and self.replicated and self.framework.dp_overlap:
            reduce_s -= min(bubble, reduce_s) / 2  # of a rank's two chunks one is done long before the other; its gradients fill the bubble
        update = self.optimizer(stages)
        slow = max(stages, key=lambda stage: stage.forward_s + stage.backward_s)
        parts: dict[str, float] = {}
        backward = slow.backward.plus(slow.recompute)
        for name, run, gathers in (("forward", slow.forward, slow.gather_forward_s), ("backward", backward, slow.gather_backward_s)):
            parts[name] = run.compute_s - (slow.recompute.compute_s if name == "backward" else 0.0)
            if name == "backward":
                parts["recomputation"] = slow.recompute.compute_s
            for axis, seconds in run.exposed.items():
                parts[TITLES[axis]] = parts.get(TITLES[axis], 0.0) + seconds
            parts["host"] = parts.get("host", 0.0) + max(0.0, run.beside(gathers) - run.compute_s - sum(run.exposed.values()) - gathers)
        parts["parameter gathers"] = slow.gather_forward_s + slow.gather_backward_s
        parts["host"] = parts.get("host", 0.0) + self.framework.micro_batch_s
        parts = {name: seconds * p.micro_batches for name, seconds in parts.items()}
        parts |= {"pipeline bubble": bubble, "pipeline transfers": transfers, "gradient reduction": reduce_s, "optimizer": update}
        parts["parameter gathers"] += gather_s
        parts["host"] += self.framework.step_s
        return self.answer(parts, stages, bubble, steady, errors)

    def answer(
        self, parts: dict[str, float], stages: Sequence[StageTime], bubble: float, steady: float, errors: Errors | None,
        timeline: Timeline | None = None,
    ) -> DistributedPrediction:
        """The prediction for a step whose time goes to `parts`, without the wait for the slowest of `steady` seconds of computation."""
        p, m, device = self.plan, self.model, self.cluster.device
        parts["stragglers"] = steady * self.straggling
        step = sum(parts.values())
        exposed = sum(parts.get(t, 0.0) for t in (*TITLES.values(), "parameter gathers", "pipeline transfers", "gradient reduction"))
        low, high = around(step, self.sigma(step, exposed, bubble, errors or errors_for(device, self.curves)))
        tokens = p.gbs * p.seq
        flops = m.flops(tokens, p.seq)
        peak = self.chip.peaks[p.precision] * p.ranks
        recomputed = self.recomputed().flops * m.layers * p.micro_batches * p.tp * p.cp * p.dp
        shown = tuple(
            Stage(layers=s.layers, forward_s=s.forward_s, backward_s=s.backward_s, memory=self.memory(s, i)) for i, s in enumerate(stages)
        )
        fullest = max((s.memory for s in shown), key=lambda found: found.peak_bytes)
        return DistributedPrediction(
            model=m.name, cluster=self.cluster.name, device=device.name, plan=str(p), devices=p.ranks, batch=p.gbs, seq=p.seq, precision=p.precision,
            unit="tokens", step_s=step, step_s_low=low, step_s_high=high, throughput=tokens / step, mfu=flops / step / peak,
            hfu=(flops + recomputed) / step / peak, flops=flops, parameters=m.parameters, micro_batches=p.micro_batches, exposed_s=exposed,
            bubble_s=bubble, bound_by=_bound(parts, exposed, bubble), breakdown=_breakdown(parts, step), stages=shown,
            fit=remedy.fit(self, fullest),
            provenance=tuple(self.provenance(device)), energy_j=device.tdp_w * step * p.ranks if device.tdp_w else None,
            cost_per_unit=device.price_per_s * step * p.ranks / tokens if device.price_per_s else None, timeline=timeline,
        )

    @property
    def straggling(self) -> float:
        """By what share of its computation a step is longer because all wait for the slowest rank."""
        return straggling(self.cluster)

    def sigma(self, step: float, exposed: float, bubble: float, errors: Errors) -> float:
        """Standard deviation of the logarithm: operators by their groups, communication by its networks."""
        spent = self.found.packed.groups.total(self.costs.seconds)
        total = sum(spent.values()) or 1.0
        operators = device_sigma({group: seconds / total for group, seconds in spent.items()}, errors)
        groups = [group for axis in ("tp", "cp", "dp", "pp") if (group := self.group(axis)).size > 1]
        network = max((float(sigma(1e8, group, self.cluster)) for group in groups), default=0.0)
        share = exposed / step
        return math.hypot((1 - share) * operators, share * network, 0.3 * bubble / step)

    def provenance(self, device: Device) -> Iterator[Evidence]:
        for path in ("memory.bandwidth", f"peak.{self.plan.precision}"):
            if path in device.facts:
                yield Evidence(what=f"{device.name} {path}", kind=device.facts[path].kind, source=device.facts[path].source)
        for path, fact in self.cluster.facts.items():
            if path.startswith("tier.") and path.endswith("bandwidth"):
                yield Evidence(what=f"{self.cluster.name} {path}", kind=fact.kind, source=fact.source)
        yield Evidence(what=f"operator curves: {self.curves.name}", kind="fitted", source=self.curves.source, share=1.0)
        yield Evidence(what=f"kernels and overlap of {self.framework.title}", kind="derived", source="the framework's code")


def _hidden(communication: float, compute: float, layers: int, contention: float) -> float:
    """Seconds that a collective per layer, one layer ahead of computation, adds to `layers` of them."""
    if not communication or not layers:
        return 0.0
    return communication + (layers - 1) * max(communication - compute, contention * communication)


@lru_cache(maxsize=1024)
def _adam(parameters: int, dtype: str, framework: Framework) -> Packed:
    return pack_ops(adam_ops(parameters, dtype, framework))


def _bound(parts: Mapping[str, float], exposed: float, bubble: float) -> str:
    groups = {
        "compute": sum(parts.get(name, 0.0) for name in ("forward", "backward", "recomputation", "optimizer")), "communication": exposed,
        "bubble": bubble, "host": parts.get("host", 0.0),
    }
    return max(groups, key=lambda name: groups[name])


def _breakdown(parts: Mapping[str, float], step: float) -> tuple[Part, ...]:
    kinds = {"pipeline bubble": "bubble", "host": "host", "stragglers": "bubble", "forward": "compute", "backward": "compute",
             "recomputation": "compute", "optimizer": "memory"}
    listed = [
        Part(name=name, seconds=seconds, share=seconds / step, count=1, bound_by=kinds.get(name, "communication"), flops=0.0)
        for name, seconds in parts.items() if seconds > 0
    ]
    return tuple(sorted(listed, key=lambda part: -part.seconds))
