"""Gradients of a captured module averaged every step in other ways than by whole buckets: what is sent, when, and the work it takes.

    compressed   each bucket encoded when it is complete, sent by the collective its code needs, decoded before the update
    overlap      reduce-scatter under the backward pass, each rank updates its shard, all-gather under the next forward pass; of a fully
                 connected layer activations and errors are exchanged in place of the gradient where they are fewer (Lee et al. 2018)
    priority     of the gradients that are ready, the one that the next forward pass needs first; what the backward pass does not
                 hide, that one does
    ps-sync      to servers as gradients become ready, parameters back as the forward pass needs them
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from paceline.cost.compression import assign, decode_s, encode_s, exchanges, wire_bytes
from paceline.predict.parallel import GATHER, REDUCE, Array, Ranks, buckets
from paceline.predict.relaxed.accuracy import accuracy
from paceline.predict.relaxed.hosts import Servers, servers
from paceline.sim.overlap import Transfer
from paceline.spec.compression import Scheme
from paceline.spec.prediction import DistributedPrediction, Evidence, Memory
from paceline.spec.workload import ITEMSIZE, Parameter

#: bytes of a gradient element that the schemes count from
FULL_BYTES = 4


class Relaxed(Ranks):
    """A workload whose ranks average gradients every step, in another way than `Ranks` does."""

    def transfers(self) -> list[Transfer]:
        """What the last micro-batch of a step communicates."""
        relax = self.plan.relax
        if self.plan.dp == 1:
            return []
        if relax.mode != "replicas":
            return list(self.served())
        if relax.compress:
            return list(self.compressed())
        return list(self.overlapped() if relax.average == "overlap" else self.prioritised())

    # -- compressed --------------------------------------------------------------------------------

    @cached_property
    def schemes(self) -> dict[str, Scheme]:
        """How each parameter's gradient is sent."""
        return assign(self.plan.relax.scheme, [(p.name, p.shape) for p in self.workload.parameters])

    @cached_property
    def complete(self) -> list[tuple[list[Parameter], int]]:
        """Buckets as DDP fills them with whole gradients, and the operator before which each is complete."""
        ready = self.layout.ready()
        found = buckets([p.numel * FULL_BYTES for p, _ in ready], self.plan.bucket_bytes, self.style.first_bucket_bytes)
        return [([ready[i][0] for i in bucket], max(ready[i][1] for i in bucket)) for bucket in found]

    def compressed(self) -> Iterator[Transfer]:
        """One collective per bucket and kind; what is gathered grows with the ranks."""
        for parameters, place in self.complete:
            sizes: dict[str, float] = defaultdict(float)
            for parameter in parameters:
                scheme = self.schemes[parameter.name]
                for i, exchange in enumerate(exchanges(scheme, parameter.shape)):
                    key = f"{exchange.collective} {exchange.op} {i if exchange.op != 'gather' else ''}"
                    sizes[key] += exchange.bytes * (self.plan.dp if exchange.collective == "all_gather" else 1)
            seconds = sum(self.send(key.split()[0], size) for key, size in sizes.items())
            yield Transfer(REDUCE, seconds, place, self.layout.update)

    def coded_s(self, parameters: Sequence[Parameter], decode: bool) -> float:
        """Device seconds to encode, or decode, gradients."""
        senders = self.plan.dp if self.plan.relax.mode == "replicas" else 1  # servers send one sum
        coded = [(self.schemes[p.name], p.shape) for p in parameters if self.schemes[p.name].name != "fp32"]
        chip, device = self.timed.chip, self.cluster.device
        return sum(decode_s(scheme, shape, senders, chip, device) if decode else encode_s(scheme, shape, chip, device) for scheme, shape in coded)

    # -- overlapped --------------------------------------------------------------------------------

    @cached_property
    def layers(self) -> list[tuple[list[Parameter], int, int]]:
        """Parameters of each module in the order in which their gradients are ready: after which operator, and before which the next
        forward pass needs them."""
        out: list[tuple[list[Parameter], int, int]] = []
        for parameter, place in self.layout.ready():
            needed = self.layout.place(parameter, "forward", 0)
            module = parameter.name.rpartition(".")[0]
            if out and out[-1][0][-1].name.rpartition(".")[0] == module:
                held, at, first = out.pop()
                out.append(([*held, parameter], max(at, place), min(first, needed)))
            else:
                out.append(([parameter], place, needed))
        return out

    def overlapped(self) -> Iterator[Transfer]:
        """Scattered behind each layer, gathered ahead of it."""
        gathers = []
        for parameters, place, needed in self.layers:
            size = float(sum(p.numel * ITEMSIZE[p.dtype] for p in parameters))
            traded = self.traded_s(parameters)
            yield Transfer(REDUCE, min(self.send("reduce_scatter", size), traded), place, self.layout.update)
            gathers.append(Transfer(GATHER, self.send("all_gather", size), 0, needed))
        yield from sorted(gathers, key=lambda transfer: transfer.needed)

    def traded_s(self, parameters: Sequence[Parameter]) -> float:
        """Seconds to bring a fully connected layer's activations to all ranks and its errors to those that hold their rows."""
        rows = self.rows.get(parameters[0].name.rpartition(".")[0], 0)
        matrix = next((p for p in parameters if len(p.shape) == 2), None)
        if not rows or matrix is None:
            return math.inf
        outputs, inputs = matrix.shape
        width = rows * ITEMSIZE[matrix.dtype]
        return self.send("all_gather", self.plan.dp * inputs * width) + self.send("all_to_all", outputs * width)

    @cached_property
    def sharded_products(self) -> list[int]:
        """Operators that compute, for the samples of all ranks, a rank's shard of a weight gradient only."""
        found = []
        for parameters, _, _ in self.layers:
            size = float(sum(p.numel * ITEMSIZE[p.dtype] for p in parameters))
            if self.traded_s(parameters) < self.send("reduce_scatter", size):
                matrix = next(p for p in parameters if len(p.shape) == 2)
                found.append(self.layout.place(matrix, "backward", 0) - 1)
        return [place for place in found if place >= 0]

    @cached_property
    def rows(self) -> dict[str, int]:
        """Rows of the activations that each fully connected layer multiplies: samples, or tokens."""
        out: dict[str, int] = {}
        for segment in self.workload.segments:
            for op in segment.ops if segment.phase == "forward" else ():
                if op.kind == "gemm" and op.flops:
                    out[op.module] = self.workload.units_per_step
        return out

    # -- by priority -------------------------------------------------------------------------------

    def prioritised(self) -> Iterator[Transfer]:
        """What the backward pass hides of each layer's all-reduce; and what is left, in the order in which it is needed."""
        layers = self.layers
        ends = np.concatenate([[0.0], np.cumsum(self.timed.step.device)])
        left = [self.send("all_reduce", sum(self.wire(p) for p in parameters)) for parameters, _, _ in layers]
        total, at = list(left), 0.0
        stop = float(ends[self.layout.update])
        for i, (_, place, _) in enumerate(layers):
            at = max(at, float(ends[place]))
            until = float(ends[layers[i + 1][1]]) if i + 1 < len(layers) else stop
            # of what is ready, the layer that runs first in the forward pass is the latest that became ready
            for j in sorted(range(i + 1), key=lambda j: layers[j][2]):
                sent = max(0.0, min(left[j], until - at))
                left[j] -= sent
                at += sent
        found = list(zip(layers, left, total, strict=True))
        yield from (Transfer(REDUCE, whole - rest, place, self.layout.update) for (_, place, _), rest, whole in found)
        yield from sorted((Transfer(REDUCE, rest, 0, needed) for (_, _, needed), rest, _ in found if rest), key=lambda transfer: transfer.needed)

    # -- servers -----------------------------------------------------------------------------------

    @cached_property
    def servers(self) -> Servers:
        """Where the parameters are kept."""
        return servers(self.cluster, self.plan.dp, self.plan.relax.servers)

    def served(self) -> Iterator[Transfer]:
        """Gradients to servers, parameters back."""
        found, count = self.servers, self.plan.dp
        down = []
        for parameters, place, needed in self.layers:
            size = float(sum(self.wire(p) for p in parameters))
            sent, back = self.coded_bytes(parameters) if self.plan.relax.compress else (size, size)
            yield Transfer(REDUCE, found.way_s(sent, count) + found.sum_s(size, count), place, self.layout.update)
            down.append(Transfer(GATHER, found.way_s(back, count), 0, needed))
        yield from sorted(down, key=lambda transfer: transfer.needed)

    def coded_bytes(self, parameters: Sequence[Parameter]) -> tuple[float, float]:
        """Bytes of encoded gradients to servers, and back: of TernGrad a sum of as many ternary values as there are workers, of others
        whole parameters."""
        sent = back = 0.0
        for p in parameters:
            scheme = self.schemes[p.name]
            sent += wire_bytes(scheme, p.shape)
            back += p.numel * (math.log2(1 + 2 * self.plan.dp) / 8 if scheme.name == "terngrad" else ITEMSIZE[p.dtype])
        return sent, back

    # -- the step ----------------------------------------------------------------------------------

    def durations(self) -> tuple[Array, Array]:
        """As `Ranks`, with encoders beside the backward pass and decoders before the update; or the update of a shard, or none."""
        issue, device = super().durations()
        relax, update = self.plan.relax, self.layout.update
        if self.plan.dp == 1:
            return issue, device
        if relax.compress:
            for parameters, place in self.complete:
                device[min(place, update) - 1] += self.coded_s(parameters, decode=False)
                device[update] += self.coded_s(parameters, decode=True)
        if relax.average == "overlap" or relax.mode != "replicas":
            fixed = self.timed.costs.latency_s[self.timed.step.index[update:]]
            part = 1 / self.plan.dp if relax.mode == "replicas" else 0.0  # servers update
            device[update:] = fixed + np.maximum(0.0, device[update:] - fixed) * part
        if relax.average == "overlap":  # as many FLOPs, but the gradient that is written is a shard
            for place in self.sharded_products:
                device[place] = max(device[place] / self.plan.dp, float(self.timed.costs.compute_s[self.timed.step.index[place]]))
        return issue, device

    @property
    def coding_s(self) -> float:
        """Seconds of a step that encoders and decoders take."""
        if not self.plan.relax.compress or self.plan.dp == 1:
            return 0.0
        return sum(self.coded_s(parameters, decode) for parameters, _ in self.complete for decode in (False, True))

    def memory(self) -> Memory:
        """Compression keeps what it has not sent yet; the rest as `Ranks`."""
        found = super().memory()
        tensors = self.plan.relax.scheme.kept_tensors
        if not tensors:
            return found
        more = tensors * sum(p.numel * FULL_BYTES for p in self.workload.parameters if p.ready >= 0)
        scale = found.reserved_bytes / max(1, found.peak_bytes)
        kinds = {**found.by_kind, "optimizer": found.by_kind["optimizer"] + more}
        return replace(found, peak_bytes=found.peak_bytes + more, reserved_bytes=int((found.peak_bytes + more) * scale), by_kind=kinds)

    def prediction(self) -> DistributedPrediction:
        return replace(super().prediction(), accuracy=accuracy(self.plan.relax))

    def provenance(self) -> Iterator[Evidence]:
        yield from super().provenance()
        if self.coding_s:
            what = f"encoding and decoding {1e3 * self.coding_s:.3g} ms, {self.plan.relax.scheme.title}"
            yield Evidence(what=what, kind="derived", source="copies of the gradient that encoders were measured to take, or their work counted")
