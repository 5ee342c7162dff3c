"""Averaging hidden under both passes: scattered and gathered layer by layer (Lee et al. 2018), or by
priority.

    overlap     reduce-scatter under the backward pass, each rank updates its shard, all-gather under the
                next forward pass; of a fully connected layer activations and errors are exchanged in place of
                the gradient where they are fewer
    priority    of the gradients that are ready, the one that the next forward pass needs first; what the
                backward pass does not hide, that one does
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from paceline.sim.program import Label
from paceline.sim.work import GATHERS, REDUCTION, Exchange
from paceline.spec.synchronisation import Relaxation
from paceline.sync.accuracy import reordered
from paceline.sync.factors import LinearShape
from paceline.sync.way import Gradient, Message, Side, Way, by_layer, full_bytes


def overlapped(relax: Relaxation) -> Way:
    """Scattered behind each layer, gathered ahead of it."""
    return Way(
        messages=scattered,
        accuracy=reordered("Lee et al., MLHPC 2018"),
        update_share=lambda replicas: 1 / replicas,
    )


def scattered(side: Side, gradients: Sequence[Gradient]) -> Iterator[Message]:
    """A layer's gradient, or its activations and errors where these take less time; then its parameters."""
    for layer in by_layer(gradients):
        axis = layer[0].axis
        whole: list[Exchange] = [("reduce_scatter", full_bytes(layer), axis)]
        trade = traded(side, layer)
        cheaper = bool(trade) and side.mesh.total(trade) < side.mesh.total(whole)
        kept = sum(gradient.parameter_bytes for gradient in layer)
        yield Message(
            gradients=layer,
            reduce=side.mesh.labels(trade if cheaper else whole, REDUCTION),
            gather=(side.mesh.label(("all_gather", kept, axis), GATHERS),),
            spared_s=spared_s(side, layer) if cheaper else 0.0,
        )


def traded(side: Side, layer: Sequence[Gradient]) -> list[Exchange]:
    """A fully connected layer's activations to all ranks, and its errors to those that hold their rows;
    nothing of others.
    """
    matrix = _matrix(layer)
    if matrix is None:
        return []
    outputs, inputs = matrix.shape
    shape = LinearShape(n_in=inputs, n_out=outputs, rows=matrix.rows)
    *trade, _ = shape.exchanges("rows", side.mesh.group(matrix.axis).size)
    element_bytes = matrix.parameter_bytes / matrix.numel
    return [(op, elements * element_bytes, matrix.axis) for op, elements in trade]


def spared_s(side: Side, layer: Sequence[Gradient]) -> float:
    """Seconds that the product of a traded gradient saves: as many FLOPs, but what is written is a shard."""
    matrix = _matrix(layer)
    if matrix is None:
        return 0.0
    whole, arithmetic = matrix.product_s
    return max(0.0, whole - max(whole / side.mesh.group(matrix.axis).size, arithmetic))


def _matrix(layer: Sequence[Gradient]) -> Gradient | None:
    """The weight of a fully connected layer."""
    return next((g for g in layer if g.rows and len(g.shape) == 2), None)


def prioritised(relax: Relaxation) -> Way:
    """All-reduce of layers; those that the next forward pass needs first go first."""
    return Way(
        messages=in_priority, accuracy=reordered("Jayarajan et al., MLSys 2019; Peng et al., SOSP 2019")
    )


def in_priority(side: Side, gradients: Sequence[Gradient]) -> Iterator[Message]:
    """Of each layer's all-reduce, what the backward pass hides; and what is left, as it is needed."""
    layers = list(by_layer(gradients))
    sends = [side.mesh.label(("all_reduce", full_bytes(layer), layer[0].axis), REDUCTION) for layer in layers]
    left = _left(side, layers, [send.seconds for send in sends])
    for layer, send, rest in zip(layers, sends, left, strict=True):
        hidden = replace(send, seconds=send.seconds - rest)
        later = Label(REDUCTION, REDUCTION, rest, crowds=True)
        yield Message(gradients=layer, reduce=(hidden,), gather=(later,) if rest else ())


def _left(side: Side, layers: Sequence[Sequence[Gradient]], whole: Sequence[float]) -> list[float]:
    """Seconds of each layer's all-reduce that are not done when the backward pass ends."""
    ready = [max(gradient.ready_s for gradient in layer) for layer in layers]
    needed = [min(gradient.needed for gradient in layer) for layer in layers]
    left, at = list(whole), 0.0
    # a stage whose parameters are frozen has nothing to send
    for i, (begin, until) in enumerate(zip(ready, [*ready[1:], side.backward_s], strict=False)):
        at = max(at, begin)
        # of what is ready, the layer that the forward pass needs first is the one that became ready last
        for j in sorted(range(i + 1), key=lambda j: needed[j]):
            sent = max(0.0, min(left[j], until - at))
            left[j] -= sent
            at += sent
    return left
