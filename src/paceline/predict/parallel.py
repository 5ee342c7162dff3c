"""Predict one training step of any captured module on many devices: data parallel and sharded plans.

The step of one device (`predict.step`) gets a third stream. What the plan communicates becomes transfers on
it, each released by an operator and awaited by another (`sim.overlap`), so that overlap follows from the
order of things:

    ddp             gradients in buckets, in the order in which they become ready; awaited by the optimizer
    zero1, zero2    buckets are reduced and scattered; parameters gathered at the start of the next step
    fsdp, hsdp      each block's parameters gathered before it runs, forward and backward; its gradients
                    scattered after
    server          gradients to the host as they become ready, parameters back as the forward pass needs them

The micro-batch is the batch that the workload was captured with; what is accumulated before is not reduced
(but sharded parameters are gathered and gradients scattered each time).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from paceline.catalog import frameworks
from paceline.cost import memory as memory_model
from paceline.cost import money
from paceline.cost.collectives import collective_s, sigma
from paceline.cost.host_link import LINK_SHARE, SUM_BPS, link_rate
from paceline.predict.degrees import resolve as resolve
from paceline.predict.interval import CAPTURED_MEMORY, around, bounded
from paceline.predict.step import Conditions, Timed, as_run
from paceline.predict.stragglers import slowest_of as slowest_of
from paceline.predict.stragglers import straggling
from paceline.predict.way import USUAL, Way
from paceline.sim.overlap import Overlapped, Transfer, steady
from paceline.sim.timeline import Span, Timeline, kernel
from paceline.spec.cluster import Cluster, Group
from paceline.spec.plan import Plan
from paceline.spec.prediction import DistributedPrediction, Evidence, Memory, Part, Stage
from paceline.spec.synchronisation import Synchronisation
from paceline.spec.workload import ITEMSIZE, Parameter, Segment, Workload

Array = NDArray[np.float64]
#: a collective that is still to be timed: operation, bytes, mesh axis
Exchange = tuple[str, float, str]

SHARDED = ("fsdp", "hsdp")
REDUCE, GATHER, TRANSFERS, BUBBLE = (
    "gradient reduction",
    "parameter gathers",
    "pipeline transfers",
    "pipeline bubble",
)
#: accumulated micro-batches that a trace shows at most: they are alike
MOST_TRACED = 3
#: networks of machines whose cores send by MPI
SUPERCOMPUTERS = ("aries", "slingshot", "omnipath")


def predict(
    workload: Workload,
    cluster: Cluster,
    plan: Plan,
    *,
    conditions: Conditions | None = None,
    trace: bool = False,
) -> DistributedPrediction:
    """Step time with interval, where it goes, and the memory of a rank of each stage; with `trace`, the
    timeline too.
    """
    if cluster.mix:  # all wait for the slowest
        kinds = [
            replace(cluster, device=device, mix=())
            for device in (cluster.device, *(device for device, _ in cluster.mix))
        ]
        found = [predict(workload, each, plan, conditions=conditions, trace=trace) for each in kinds]
        return max(found, key=lambda prediction: prediction.step_s)
    workload = as_run(workload, cluster.device)
    plan = resolve(plan, workload, cluster)
    if conditions is None:
        conditions = Conditions(framework=frameworks.running(plan.framework or frameworks.USUAL, "modules"))
    if not plan.relax.plain:
        from paceline import sync  # it builds on this module

        return sync.captured(workload, cluster, plan, conditions, trace)
    style = conditions.synchronisation
    kind: type[Ranks] = Ranks
    if plan.pp > 1:
        from paceline.predict.blocks import Pipeline  # it builds on this module

        kind = Pipeline
    ranks = kind(workload, cluster, plan, style, Timed.of(workload, cluster.device, conditions))
    answer = ranks.prediction()
    return replace(answer, timeline=ranks.timeline()) if trace else answer


# -- where in the step things are ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are gathered together: their bytes, and the operators between which they are needed."""

    bytes: int
    #: [first, last) operator of the forward pass, and of the backward pass, recomputation included
    forward: tuple[int, int]
    backward: tuple[int, int]


class Layout:
    """Where in the written-out step each parameter is used and its gradient ready, and which blocks there
    are.

    Operators carry the path of their module. Folded blocks repeat the operators of one of them: its n-th
    visit stands for the n-th sibling that has no operators of its own, and the backward pass visits them last
    to first.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        sizes = [len(segment.ops) for segment in workload.segments]
        self.begins = np.concatenate([[0], np.cumsum([sizes[index] for index in workload.order])]).astype(int)
        last = [i for i, index in enumerate(workload.order) if workload.segments[index].phase == "optimizer"]
        #: the first operator of the update
        self.update = int(self.begins[last[0]]) if last else int(self.begins[-1])
        self._visits: dict[tuple[str, str], list[list[int]]] = {}
        forward, backward = self._entries(("forward",)), self._entries(("recompute", "backward"))
        for path, entries in forward.items():
            self._visits[path, "forward"] = [[entry] for entry in entries] if path else [entries]
            groups = np.array_split(np.array(backward.get(path, [])), len(entries) if path else 1)
            self._visits[path, "backward"] = [
                group.tolist() for group in (reversed(groups) if path else groups)
            ]
        #: of each visit, its entries in the forward pass and in the backward pass
        self.visits = [
            (entries, self._visits[path, "backward"][i])
            for (path, phase), found in self._visits.items()
            if phase == "forward"
            for i, entries in enumerate(found)
        ]
        self._operators = [_by_module(segment) for segment in workload.segments]
        self._home = dict(self._homes())

    def _entries(self, phases: Sequence[str]) -> dict[str, list[int]]:
        out: dict[str, list[int]] = defaultdict(list)
        for entry, index in enumerate(self.workload.order):
            segment = self.workload.segments[index]
            if segment.phase in phases and segment.ops:
                out[segment.path].append(entry)
        return out

    def _homes(self) -> Iterator[tuple[str, tuple[str, int]]]:
        """Path of each block -> the block whose operators stand for it, and the number of the visit."""
        own = [path for path, phase in self._visits if path and phase == "forward"]
        tables: dict[str, dict[str, dict[str, tuple[int, ...]]]] = defaultdict(lambda: defaultdict(dict))
        parents = {path.rpartition(".")[0] for path in own}
        for parameter in self.workload.parameters:
            for parent in parents:
                rest = parameter.name.removeprefix(f"{parent}." if parent else "")
                if rest != parameter.name or not parent:
                    child, _, name = rest.partition(".")
                    tables[parent][f"{parent}.{child}" if parent else child][name] = parameter.shape
        for children in tables.values():
            pattern: dict[str, list[str]] = {}
            for child, table in children.items():
                key = str(sorted(table.items()))
                if child in own:
                    pattern[key] = [child]
                elif key in pattern and len(pattern[key]) < len(self._visits[pattern[key][0], "forward"]):
                    pattern[key].append(child)
                else:
                    continue
                yield child, (pattern[key][0], len(pattern[key]) - 1)

    def _find(self, name: str) -> tuple[str, int, str]:
        """The block, its visit and the module path within the captured operators, of a parameter."""
        module = name.rpartition(".")[0]
        parts = module.split(".")
        for i in range(len(parts), 0, -1):
            block = ".".join(parts[:i])
            if block in self._home:
                path, visit = self._home[block]
                return path, visit, path + module[len(block) :]
        return "", 0, module

    def place(self, parameter: Parameter, phase: str, otherwise: int) -> int:
        """After which operator a gradient is ready (backward), or before which a parameter is needed
        (forward).
        """
        path, visit, module = self._find(parameter.name)
        visits = self._visits.get((path, phase), [])
        entries = visits[visit] if visit < len(visits) else []
        # what touches as many bytes; else anything of the module, or (where kernels were fused) of the one
        # around it
        for key in ((module, parameter.bytes), (module, 0), (module.rpartition(".")[0], 0)):
            found = [
                int(self.begins[entry]) + place
                for entry in entries
                for place in self._operators[self.workload.order[entry]].get(key, ())
            ]
            if found:
                return max(found) + 1 if phase == "backward" else min(found)
        return otherwise

    def ready(self) -> list[tuple[Parameter, int]]:
        """Trained parameters in the order in which their gradients become ready, each with the operator that
        may then start.
        """
        out: list[tuple[Parameter, int]] = []
        start = min(
            (
                entries[0][0]
                for (_, phase), entries in self._visits.items()
                if phase == "backward" and entries and entries[0]
            ),
            default=0,
        )
        at = int(self.begins[start])
        for parameter in sorted((p for p in self.workload.parameters if p.ready >= 0), key=lambda p: p.ready):
            at = self.place(parameter, "backward", at)
            out.append((parameter, min(at, self.update)))
        return out

    @cached_property
    def units(self) -> list[Unit]:
        """The blocks in the order in which they run; first of all what is in none of them, needed from start
        to end.
        """
        inside: dict[tuple[str, int], int] = defaultdict(int)
        for parameter in self.workload.parameters:
            path, visit, _ = self._find(parameter.name)
            inside[path, visit] += parameter.bytes
        spans = {}
        for path, visit in inside:
            ranges = [self._span(path, phase, visit) for phase in ("forward", "backward")]
            spans[path, visit] = ranges if path and all(ranges) else None
        root = sum(size for key, size in inside.items() if spans[key] is None)
        blocks = [Unit(inside[key], found[0], found[1]) for key, found in spans.items() if found is not None]  # type: ignore[arg-type]
        return [
            Unit(root, (0, self.update), (0, self.update)),
            *sorted(blocks, key=lambda unit: unit.forward),
        ]

    def _span(self, path: str, phase: str, visit: int) -> tuple[int, int] | None:
        visits = self._visits.get((path, phase), [])
        entries = visits[visit] if visit < len(visits) else []
        return (int(self.begins[entries[0]]), int(self.begins[entries[-1] + 1])) if entries else None


def _by_module(segment: Segment) -> dict[tuple[str, int], list[int]]:
    """Operators of each module; and of those, with a size beside it, the ones that read or write so many
    bytes.
    """
    out: dict[tuple[str, int], list[int]] = defaultdict(list)
    for place, op in enumerate(segment.ops):
        out[op.module, 0].append(place)
        for access in op.writes if segment.phase != "forward" else op.reads:
            out[op.module, access.bytes].append(place)
    return out


def buckets(
    sizes: Sequence[float],
    cap: float,
    first: float = math.inf,
    spans: Sequence[float] = (),
    cycle_s: float = math.inf,
) -> list[list[int]]:
    """Gradients put together in the order given: a bucket closes with the one that fills it (the first at
    `first` bytes), or once its gradients, ready at the times `spans`, are more than `cycle_s` apart."""
    out: list[list[int]] = [[]]
    held = 0.0
    for i, size in enumerate(sizes):
        if out[-1] and spans and spans[i] - spans[out[-1][0]] > cycle_s:
            out.append([])
            held = 0.0
        out[-1].append(i)
        held += size
        if held >= min(cap, first if len(out) == 1 else cap):
            out.append([])
            held = 0.0
    return [bucket for bucket in out if bucket]


# -- the step --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    """A workload on the ranks of a resolved plan."""

    workload: Workload
    cluster: Cluster
    plan: Plan
    style: Synchronisation
    timed: Timed
    way: Way = USUAL

    @cached_property
    def layout(self) -> Layout:
        return Layout(self.workload)

    @property
    def library(self) -> str:
        if self.cluster.device.kind != "cpu":
            return "nccl"
        return "mpi" if any(tier.kind in SUPERCOMPUTERS for tier in self.cluster.tiers) else "gloo"

    @property
    def shards(self) -> int:
        """Ranks among which a copy of the optimizer's state, and what else is sharded, is spread."""
        return {"none": 1, "ddp": 1, "hsdp": self.plan.shard}.get(self.plan.sharding, self.plan.dp)

    def group(self, axis: str) -> Group:
        if axis == "dp":
            return self.way.replicas(self)
        size, stride = {"shard": (self.shards, 1), "replicas": (self.plan.dp // self.shards, self.shards)}[
            axis
        ]
        return self.cluster.group(size, stride)

    def send(self, op: str, size: float, axis: str = "dp") -> float:
        """Seconds of a collective."""
        group = self.group(axis)
        return (
            collective_s(op, size, group, self.cluster, self.library) if group.size > 1 and size > 0 else 0.0
        )

    def total(self, exchanges: Sequence[Exchange]) -> float:
        """Seconds of collectives one after another."""
        return sum(self.send(*exchange) for exchange in exchanges)

    def transfer(self, name: str, exchanges: Sequence[Exchange], release: int, needed: int) -> Transfer:
        """Collectives one after another as a transfer beside the operators."""
        return self.part(name, exchanges, self.total(exchanges), release, needed)

    def part(
        self, name: str, exchanges: Sequence[Exchange], seconds: float, release: int, needed: int
    ) -> Transfer:
        """A transfer of so many seconds, such as a part of what its collectives take."""
        sent = tuple(
            (op, float(size), axis) for op, size, axis in exchanges if size > 0 and self.group(axis).size > 1
        )
        return Transfer(name, seconds, release, needed, sent)

    def host_s(self, size: float) -> float:
        """Seconds in which every device of a node copies so many bytes to the host or back, and nodes
        exchange their parts.
        """
        here = min(self.plan.dp, self.cluster.node_devices)
        nodes = self.plan.dp // here
        return size / link_rate(self.cluster.device, here) + (
            self.between_s(size, nodes) if nodes > 1 else 0.0
        )

    def between_s(self, size: float, nodes: int) -> float:
        """Seconds of one way between servers that are spread over the nodes."""
        network = next(tier for tier in reversed(self.cluster.tiers) if tier.network)
        return (
            size
            * (nodes - 1)
            / nodes
            / (LINK_SHARE * (network.node_bandwidth_Bps or network.bandwidth_Bps * self.cluster.node_devices))
        )

    # -- transfers ---------------------------------------------------------------------------------

    def wire(self, parameter: Parameter) -> float:
        """Bytes of a gradient as it is sent."""
        half = self.style.half_when_mixed and self.workload.precision.startswith("amp")
        return parameter.numel * min(2 if half else math.inf, ITEMSIZE[parameter.dtype])

    def gradient_buckets(self) -> list[tuple[float, int, int]]:
        """Bytes of each bucket, after which operator its last gradient is ready, and before which the first
        of its parameters is needed.
        """
        ready = self.layout.ready()
        cap = self.plan.bucket_bytes if self.style.bucket_bytes is None else self.style.bucket_bytes
        at = np.concatenate([[0.0], np.cumsum(self.timed.step.device)])
        found = buckets(
            [self.wire(p) for p, _ in ready],
            cap,
            self.style.first_bucket_bytes,
            [float(at[place]) for _, place in ready],
            self.style.cycle_s,
        )
        late = not self.style.overlap or (self.plan.micro_batches > 1 and not self.style.overlap_accumulated)
        out = []
        for bucket in found:
            place = self.layout.update if late else max(ready[i][1] for i in bucket)
            needed = (
                min(self.layout.place(ready[i][0], "forward", 0) for i in bucket) if self.style.server else 0
            )
            out.append((sum(self.wire(ready[i][0]) for i in bucket), place, needed))
        return out

    def transfers(self) -> list[Transfer]:
        """What the last micro-batch of a step communicates."""
        return self.way.transfers(self)

    def usual_transfers(self) -> list[Transfer]:
        """The same where gradients are averaged in full, as the plan's sharding says."""
        if self.plan.sharding == "none":
            return []
        if self.plan.sharding in SHARDED:
            return [*self._gathered_units(), *self._scattered_units()]
        found = self.gradient_buckets()
        if self.style.server:
            return self._served(found)
        update = self.layout.update
        if self.plan.sharding == "ddp":
            return [
                self.transfer(REDUCE, [("all_reduce", size, "dp")], place, update) for size, place, _ in found
            ]
        gathers = [self.transfer(GATHER, [("all_gather", size, "dp")], 0, 0) for size, _, _ in found]
        return gathers + [
            self.transfer(REDUCE, [("reduce_scatter", size, "dp")], place, update) for size, place, _ in found
        ]

    def _served(self, found: Sequence[tuple[float, int, int]]) -> list[Transfer]:
        """Parameters from the host as the forward pass needs them, gradients to it as they become ready."""
        here, update = min(self.plan.dp, self.cluster.node_devices), self.layout.update
        up = [
            Transfer(REDUCE, self.host_s(size) + here * size / SUM_BPS, place, update)
            for size, place, _ in found
        ]
        down = sorted((needed, size) for size, _, needed in found)
        return [Transfer(GATHER, self.host_s(size), 0, needed) for needed, size in down] + up

    def _gathered_units(self) -> Iterator[Transfer]:
        """Gathers ahead of each unit, forward and, where parameters were dropped, backward."""
        root, *blocks = self.layout.units
        yield self._gather_unit(root, 0, 0)
        yield from self._ahead(blocks, [unit.forward for unit in blocks])
        if self.plan.reshard:
            back = sorted(blocks, key=lambda unit: unit.backward)
            yield from self._ahead(back, [unit.backward for unit in back])

    def _ahead(self, units: Sequence[Unit], spans: Sequence[tuple[int, int]]) -> Iterator[Transfer]:
        """Units in the order in which they run, each gathered as many units ahead as the plan says."""
        ahead = self.plan.prefetch
        for i, unit in enumerate(units):
            yield self._gather_unit(unit, spans[max(0, i - ahead)][0] if ahead else spans[i][0], spans[i][0])

    def _gather_unit(self, unit: Unit, release: int, needed: int) -> Transfer:
        return self.transfer(
            GATHER, [("all_gather", unit.bytes * self.gathered_share, "shard")], release, needed
        )

    def _scattered_units(self) -> Iterator[Transfer]:
        """Gradients scattered behind each unit, and reduced over the copies."""
        for unit in self.layout.units:
            sent = [
                ("reduce_scatter", float(unit.bytes), "shard"),
                ("all_reduce", unit.bytes / self.shards, "replicas"),
            ]
            yield self.transfer(REDUCE, sent, unit.backward[1], self.layout.update)

    @property
    def gathered_share(self) -> float:
        """Bytes of gathered parameters over those kept: mixed precision gathers what it computes with."""
        return 0.5 if self.workload.precision.startswith("amp") else 1.0

    # -- operators ---------------------------------------------------------------------------------

    def durations(self) -> tuple[Array, Array]:
        """Host and device seconds of each operator on one rank: the update of its share only, and copies into
        buckets.
        """
        step, update = self.timed.step, self.layout.update
        issue, device = step.issue, step.device
        if self.cluster.device.kind == "cpu":  # the cores that issue are those that compute
            issue, device = np.zeros_like(issue), issue + device
        device = device.copy()
        served = self.style.server and self.plan.sharding != "none"
        if self.shards > 1 or served:
            fixed = self.timed.costs.latency_s[step.index[update:]]
            part = 0.0 if served else 1 / self.shards  # a server updates on the host
            device[update:] = fixed + np.maximum(0.0, device[update:] - fixed) * part
        if self.plan.sharding in ("ddp", "zero1", "zero2") and update < len(device):
            device[update] += 2 * self.style.copies * self.gradient_bytes / self.timed.chip.bandwidth
        if self.plan.micro_batches > 1:  # each backward pass adds to what is there: two reads and a write
            held = 1 / self.shards if self.plan.sharding in ("zero2", *SHARDED) else 1.0
            device[update - 1] += 3 * held * self.gradient_bytes / self.timed.chip.bandwidth
        return issue, self.way.durations(self, device)

    @property
    def gradient_bytes(self) -> int:
        """Of one whole set of gradients, as they are kept."""
        return sum(p.bytes for p in self.workload.parameters if p.ready >= 0)

    def simulate(self, accumulate: bool) -> Overlapped:
        """One micro-batch: the last with reduction and update, or (`accumulate`) one before it."""
        issue, device = self.durations()
        syncs, transfers = self.timed.step.syncs, self.transfers()
        if accumulate:
            update = self.layout.update
            issue, device, syncs = issue[:update], device[:update], syncs[syncs < update]
            transfers = transfers if self.plan.sharding in SHARDED else []
        return steady(issue, device, syncs, transfers, self.style.contention)

    # -- memory ------------------------------------------------------------------------------------

    def memory(self) -> Memory:
        """Of one rank: what is sharded counts by its share, and what is whole for a moment besides."""
        kind, part = self.plan.sharding, 1 / self.shards
        held = {
            "optimizer": part,
            "gradients": part if kind in ("zero2", *SHARDED) else 1.0,
            "parameters": part if kind in SHARDED else 1.0,
        }
        more: dict[str, float] = {}
        inside: dict[str, float] = {}
        if kind in SHARDED:
            units = self.layout.units
            largest = sorted((unit.bytes for unit in units[1:]), reverse=True)[: 1 + self.plan.prefetch]
            more = {"parameters": units[0].bytes * self.gathered_share}
            inside = {"parameters": sum(largest) * self.gathered_share, "gradients": max([*largest, 0])}
            if not largest:  # one unit, whose gradients are whole when all are there
                more["gradients"] = units[0].bytes
        elif kind == "zero2":
            more = {"gradients": max(size for size, _, _ in self.gradient_buckets())}
        elif kind != "none" and self.style.copies:
            more = {"gradients": self.gradient_bytes}  # buckets hold them once more
        if self.style.server and kind != "none":
            held["optimizer"] = 0.0
        several = self.plan.micro_batches > 1
        found = memory_model.memory(
            self.workload, self.cluster.device, held=held, more=more, inside=inside, accumulated=several
        )
        kept = self.way.state_bytes * sum(p.numel for p in self.workload.parameters if p.ready >= 0)
        return bounded(memory_model.with_more(found, kept), CAPTURED_MEMORY)

    # -- the answer --------------------------------------------------------------------------------

    def prediction(self) -> DistributedPrediction:
        last, before = self.simulate(accumulate=False), self.plan.micro_batches - 1
        runs = [(last, 1)] + ([(self.simulate(accumulate=True), before)] if before else [])
        plan, steady_s = self.plan, sum(run.period_s * count for run, count in runs)
        parts = self.parts(runs, steady_s)
        forward, backward = parts["forward"], parts["backward"] + parts.get("recomputation", 0.0)
        stage = Stage(
            layers=len(self.layout.units) - 1,
            forward_s=forward / plan.micro_batches,
            backward_s=backward / plan.micro_batches,
            memory=self.memory(),
        )
        return self.answer(parts, (stage,))

    def answer(self, parts: dict[str, float], stages: tuple[Stage, ...]) -> DistributedPrediction:
        """The prediction for a step whose time goes to `parts`, without the wait for the slowest rank."""
        plan, device, workload = self.plan, self.cluster.device, self.workload
        if plan.ranks > 1 and self.cluster.straggler_cv:
            parts["stragglers"] = sum(parts.values()) * straggling(self.cluster)
        step = sum(parts.values())
        exposed = sum(parts.get(name, 0.0) for name in (REDUCE, GATHER, TRANSFERS))
        low, high = around(step, self.sigma(step, exposed))
        flops, done = (
            plan.dp * plan.micro_batches * workload.flops,
            plan.dp * plan.micro_batches * workload.units_per_step,
        )
        peak = self.timed.peak_flops * plan.ranks
        recomputed = _flops(workload, "recompute") / max(workload.flops, 1.0)
        fullest = max((stage.memory for stage in stages), key=lambda memory: memory.peak_bytes)
        return DistributedPrediction(
            model=workload.name,
            cluster=self.cluster.name,
            device=device.name,
            plan=str(plan),
            devices=plan.ranks,
            batch=plan.gbs,
            seq=workload.seq or 0,
            precision=workload.precision,
            unit=workload.unit,
            step_s=step,
            step_s_low=low,
            step_s_high=high,
            throughput=done / step,
            mfu=flops * (1 - recomputed) / step / peak,
            hfu=flops / step / peak,
            flops=flops,
            parameters=workload.parameter_count,
            micro_batches=plan.micro_batches,
            exposed_s=exposed,
            bubble_s=parts.get(BUBBLE, 0.0),
            bound_by=_bound(parts),
            breakdown=_breakdown(parts, step),
            stages=stages,
            fit=memory_model.fit(workload, fullest),
            provenance=tuple(self.provenance()),
            energy_j=device.tdp_w * step * plan.ranks if device.tdp_w else None,
            accuracy=self.way.accuracy,
            price=money.basis(device),
            cost_per_unit=device.price_per_s * step * plan.ranks / done if device.price_per_s else None,
        )

    def timeline(self) -> Timeline:
        """Operators and transfers of one rank: micro-batches that are accumulated, then the last one."""
        runs = [self.simulate(accumulate=True)] * min(self.plan.micro_batches - 1, MOST_TRACED) + [
            self.simulate(accumulate=False)
        ]
        ops = [op for index in self.workload.order for op in self.workload.segments[index].ops]
        spans, origin = [], 0.0
        for run in runs:
            for op, start, end in zip(ops, run.starts.tolist(), run.ends.tolist(), strict=False):
                moved = op.bytes_read + op.bytes_written
                details = {
                    "module": op.module,
                    "dtype": op.dtype,
                    "dims": list(op.dims),
                    "flops": op.flops,
                    "bytes": moved,
                }
                spans.append(Span(op.name, "device", origin + start, origin + end, op.phase, details))
            for transfer, start, end in run.sent:
                spans.append(
                    Span(
                        kernel(transfer.op) if transfer.op else transfer.name,
                        "dp",
                        origin + start,
                        origin + end,
                        transfer.name,
                        {},
                    )
                )
            origin += run.period_s
        spans.sort(key=lambda span: (span.stream, span.start_s))
        return Timeline(tuple(spans), f"{self.workload.name} on {self.cluster.name}")

    def parts(self, runs: Sequence[tuple[Overlapped, int]], total: float) -> dict[str, float]:
        """The step along its critical path: operators by phase, waits for transfers, contention; the host has
        the rest.
        """
        _, device = self.durations()
        phases = np.array([segment.phase for segment in self.workload.segments])[self.timed.step.segment]
        out: dict[str, float] = defaultdict(float)
        for name, phase in (
            ("forward", "forward"),
            ("backward", "backward"),
            ("recomputation", "recompute"),
            ("optimizer", "optimizer"),
        ):
            out[name] = float(device[phases == phase].sum()) * (
                1 if phase == "optimizer" else self.plan.micro_batches
            )
        for run, count in runs:
            for name, seconds in run.waits.items():
                out[name] += seconds * count
            out["contention"] += run.slowed_s * count
        out["host"] = max(0.0, total - sum(out.values()))
        return dict(out)

    def sigma(self, step: float, exposed: float) -> float:
        """Standard deviation of the logarithm: operators by their groups, exposed communication by its
        network.
        """
        group = self.group("dp")
        network = (
            float(sigma(self.plan.bucket_bytes, group, self.cluster, self.library)) if group.size > 1 else 0.0
        )
        share = min(1.0, exposed / step)
        return math.hypot(
            (1 - share) * self.timed.step_sigma(step / self.plan.micro_batches), share * network
        )

    def provenance(self) -> Iterator[Evidence]:
        yield from self.timed.provenance()
        for path, fact in self.cluster.facts.items():
            if path.startswith("tier.") and path.endswith("bandwidth") and self.plan.dp > 1:
                yield Evidence(what=f"{self.cluster.name} {path}", kind=fact.kind, source=fact.source)
        if self.plan.dp > 1:
            how = (
                "gathers and overlap of PyTorch FSDP"
                if self.plan.sharding in SHARDED
                else f"buckets and overlap of {self.style.title}"
            )
            yield Evidence(what=how, kind="derived", source="the framework's code")
        yield from self.way.evidence(self)


def _flops(workload: Workload, phase: str) -> float:
    per_segment = [
        sum(op.flops for op in segment.ops) if segment.phase == phase else 0.0
        for segment in workload.segments
    ]
    return sum(per_segment[index] for index in workload.order)


_BOUNDS = {
    REDUCE: "communication",
    GATHER: "communication",
    TRANSFERS: "communication",
    "contention": "communication",
    BUBBLE: "bubble",
    "stragglers": "bubble",
    "host": "host",
    "optimizer": "memory",
}


def _bound(parts: Mapping[str, float]) -> str:
    totals: dict[str, float] = defaultdict(float)
    for name, seconds in parts.items():
        totals["compute" if name == "optimizer" else _BOUNDS.get(name, "compute")] += seconds
    return max(totals, key=lambda name: totals[name])


def _breakdown(parts: Mapping[str, float], step: float) -> tuple[Part, ...]:
    listed = [
        Part(
            name=name,
            seconds=seconds,
            share=seconds / step,
            count=1,
            bound_by=_BOUNDS.get(name, "compute"),
            flops=0.0,
        )
        for name, seconds in parts.items()
        if seconds > 0
    ]
    return tuple(sorted(listed, key=lambda part: -part.seconds))
