"""Gradients encoded before they are averaged, every step: each bucket is encoded when it is complete, sent by
the collectives its code needs, and decoded before the update.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial

from paceline.cost.compression import assign, decode_s, encode_s, exchanges
from paceline.sim.work import REDUCTION
from paceline.spec.compression import Scheme
from paceline.spec.synchronisation import Relaxation
from paceline.sync.accuracy import accuracy
from paceline.sync.way import Gradient, Message, Side, Way, in_buckets

#: bytes of a gradient element that the schemes count from
FULL_BYTES = 4
#: tensors of a message that have the same code and shape, and how many they are
Coded = Counter[tuple[Scheme, tuple[int, ...]]]


def compressed(relax: Relaxation) -> Way:
    """Averaged every step, in the code of a scheme."""
    scheme = relax.scheme
    return Way(
        messages=partial(encoded, scheme),
        accuracy=accuracy(relax),
        state_bytes=scheme.state_bytes,
        code=scheme.title,
    )


def encoded(scheme: Scheme, side: Side, gradients: Sequence[Gradient]) -> Iterator[Message]:
    """Buckets as they fill with whole gradients, one collective for each step of the code."""
    codes = codes_of(scheme, gradients)
    for bucket in in_buckets(side, gradients, lambda gradient: FULL_BYTES * gradient.numel):
        axis, tensors = bucket[0].axis, coded(codes, bucket)
        ranks = side.mesh.group(axis).size
        sent = [(op, size, axis) for op, size in payloads(tensors, ranks)]
        yield Message(
            gradients=bucket,
            reduce=side.mesh.labels(sent, REDUCTION),
            early=side.timing.early,
            encode_s=encoding_s(tensors, side) if ranks > 1 else 0.0,
            decode_s=decoding_s(tensors, ranks, side) if ranks > 1 else 0.0,
        )


def codes_of(scheme: Scheme, gradients: Sequence[Gradient]) -> dict[str, Scheme]:
    """The scheme of each gradient by name; small tensors and the last layer may stay as they are."""
    return assign(scheme, [(gradient.name, gradient.shape) for gradient in gradients])


def coded(codes: dict[str, Scheme], bucket: Sequence[Gradient]) -> Coded:
    return Counter((codes[gradient.name], gradient.shape) for gradient in bucket)


def payloads(tensors: Coded, ranks: int) -> Iterator[tuple[str, float]]:
    """Collectives with their bytes: those of one stage of the code together; what is gathered grows with the
    ranks.
    """
    sizes: dict[tuple[str, str, int], float] = defaultdict(float)
    for (scheme, shape), count in tensors.items():
        for stage, exchange in enumerate(exchanges(scheme, shape)):
            gathered = exchange.op == "gather"
            key = exchange.collective, exchange.op, -1 if gathered else stage
            sizes[key] += count * exchange.bytes * (ranks if gathered else 1)
    for (collective, _, _), size in sizes.items():
        yield collective, size


def encoding_s(tensors: Coded, side: Side) -> float:
    """Device seconds to encode them."""
    return sum(
        count * encode_s(scheme, shape, side.chip, side.mesh.cluster.device)
        for (scheme, shape), count in tensors.items()
        if scheme.name != "fp32"
    )


def decoding_s(tensors: Coded, senders: int, side: Side) -> float:
    """Device seconds to decode what so many senders have sent."""
    return sum(
        count * decode_s(scheme, shape, senders, side.chip, side.mesh.cluster.device)
        for (scheme, shape), count in tensors.items()
        if scheme.name != "fp32"
    )
