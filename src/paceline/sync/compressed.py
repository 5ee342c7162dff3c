"""Gradients encoded before they are averaged, every step: each bucket is encoded when it is complete, sent by
the collective its code needs, and decoded before the update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from paceline.cost.compression import assign, decode_s, encode_s, exchanges
from paceline.predict.distributed import Step
from paceline.predict.gradients import Exchange, StageTime
from paceline.predict.parallel import REDUCE, Ranks, buckets
from paceline.predict.rank import CODING
from paceline.predict.way import Array, Way
from paceline.sim.overlap import Transfer
from paceline.spec.compression import Scheme
from paceline.spec.prediction import Evidence
from paceline.spec.synchronisation import Relaxation
from paceline.spec.workload import Parameter
from paceline.sync.accuracy import accuracy

#: bytes of a gradient element that the schemes count from
FULL_BYTES = 4
_SOURCE = "copies of the gradient that encoders were measured to take, or their work counted"


@dataclass(frozen=True)
class Coding:
    """Encoders and decoders of a captured module's gradients, for payloads of so many `senders`."""

    ranks: Ranks
    scheme: Scheme
    senders: int

    @cached_property
    def schemes(self) -> dict[str, Scheme]:
        """How each parameter's gradient is sent."""
        return assign(self.scheme, [(p.name, p.shape) for p in self.ranks.workload.parameters])

    @cached_property
    def complete(self) -> list[tuple[list[Parameter], int]]:
        """Buckets as DDP fills them with whole gradients, and the operator before which each is complete."""
        ready = self.ranks.layout.ready()
        sizes = [p.numel * FULL_BYTES for p, _ in ready]
        found = buckets(sizes, self.ranks.plan.bucket_bytes, self.ranks.style.first_bucket_bytes)
        return [([ready[i][0] for i in bucket], max(ready[i][1] for i in bucket)) for bucket in found]

    def seconds(self, parameters: Sequence[Parameter], decode: bool) -> float:
        """Device seconds to encode, or decode, gradients."""
        chip, device = self.ranks.timed.chip, self.ranks.cluster.device
        coded = [(self.schemes[p.name], p.shape) for p in parameters if self.schemes[p.name].name != "fp32"]
        if decode:
            return sum(decode_s(scheme, shape, self.senders, chip, device) for scheme, shape in coded)
        return sum(encode_s(scheme, shape, chip, device) for scheme, shape in coded)

    def added(self, device: Array) -> Array:
        """Operators with encoders beside the backward pass, and decoders before the update."""
        update = self.ranks.layout.update
        for parameters, place in self.complete:
            device[min(place, update) - 1] += self.seconds(parameters, decode=False)
            device[update] += self.seconds(parameters, decode=True)
        return device

    def evidence(self) -> Iterator[Evidence]:
        """Seconds of a step that encoders and decoders take."""
        total = sum(
            self.seconds(parameters, decode) for parameters, _ in self.complete for decode in (False, True)
        )
        if total:
            what = f"{CODING} {1e3 * total:.3g} ms, {self.scheme.title}"
            yield Evidence(what=what, kind="derived", source=_SOURCE)


class Compressed(Way):
    """Averaged every step, in the code of a scheme."""

    def __init__(self, relax: Relaxation) -> None:
        self.scheme = relax.scheme
        self._accuracy = accuracy(relax)
        self._averages: dict[tuple[Hashable, ...], tuple[dict[str, float], float]] = {}

    @property
    def accuracy(self) -> Evidence:
        return self._accuracy

    @property
    def state_bytes(self) -> float:
        return self.scheme.state_bytes

    # -- captured modules --------------------------------------------------------------------------

    def coding(self, ranks: Ranks) -> Coding:
        """Encoders of the ranks, each of which decodes what all send."""
        return Coding(ranks, self.scheme, ranks.plan.dp)

    def transfers(self, ranks: Ranks) -> list[Transfer]:
        """One collective per bucket and kind; what is gathered grows with the ranks."""
        coding, out = self.coding(ranks), []
        for parameters, place in coding.complete if ranks.plan.dp > 1 else ():
            sizes: dict[tuple[str, str, int], float] = defaultdict(float)
            for parameter in parameters:
                for i, exchange in enumerate(exchanges(coding.schemes[parameter.name], parameter.shape)):
                    gathered = exchange.op == "gather"
                    key = exchange.collective, exchange.op, -1 if gathered else i
                    sizes[key] += exchange.bytes * (ranks.plan.dp if gathered else 1)
            sent = [(collective, size, "dp") for (collective, _, _), size in sizes.items()]
            out.append(ranks.transfer(REDUCE, sent, place, ranks.layout.update))
        return out

    def durations(self, ranks: Ranks, device: Array) -> Array:
        return self.coding(ranks).added(device) if ranks.plan.dp > 1 else device

    def evidence(self, ranks: Ranks) -> Iterable[Evidence]:
        return self.coding(ranks).evidence() if ranks.plan.dp > 1 else ()

    # -- transformers by their sizes ---------------------------------------------------------------

    def exchanges(self, step: Step, dense: float, experts: float) -> tuple[list[Exchange], list[Exchange]]:
        sizes, _ = self._per_parameter(step)
        counts = [(axis, count) for axis, count in (("dp", dense), ("expert-dp", experts)) if count]
        return [(op, size * count, axis) for axis, count in counts for op, size in sizes.items()], []

    def finish(self, step: Step, parts: dict[str, float], stages: Sequence[StageTime]) -> dict[str, float]:
        if not step.replicated:
            return parts
        _, seconds = self._per_parameter(step)
        return {**parts, CODING: seconds * max(step.parameters(stage) for stage in stages)}

    def size_evidence(self, parts: Mapping[str, float]) -> Iterator[Evidence]:
        if CODING in parts:
            what = f"{CODING} {1e3 * parts[CODING]:.3g} ms, {self.scheme.title}"
            yield Evidence(what=what, kind="derived", source=_SOURCE)

    def _per_parameter(self, step: Step) -> tuple[dict[str, float], float]:
        """Bytes per parameter that each collective takes, and seconds to encode and decode one; averages over
        a layer.
        """
        key = step.group("dp").size, step.model, step.plan.tp, step.plan.ep, step.cluster.device.name
        if key not in self._averages:
            self._averages[key] = _averages(step, self.scheme)
        return self._averages[key]


def _averages(step: Step, scheme: Scheme) -> tuple[dict[str, float], float]:
    ranks, hidden = step.group("dp").size, step.model.hidden
    counts = [int(count) for count, _ in step.tensors("layer")]
    shapes = [
        (count // hidden, hidden) if count > hidden and count % hidden == 0 else (count,) for count in counts
    ]
    chosen = assign(replace(scheme, keep_last=False), [(str(i), shape) for i, shape in enumerate(shapes)])
    sizes: dict[str, float] = defaultdict(float)
    spent = 0.0
    for coded, shape in zip(chosen.values(), shapes, strict=True):
        for exchange in exchanges(coded, shape):
            sizes[exchange.collective] += exchange.bytes * (
                ranks if exchange.collective == "all_gather" else 1
            )
        if coded.name != "fp32":
            spent += encode_s(coded, shape, step.chip, step.cluster.device)
            spent += decode_s(coded, shape, ranks, step.chip, step.cluster.device)
    total = sum(counts)
    return {op: size / total for op, size in sizes.items()}, spent / total
