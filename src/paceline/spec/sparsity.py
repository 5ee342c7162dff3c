"""Zeros in a network: where a run finds them, what pruning leaves, and what a device gains from them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

from paceline.errors import SpecError
from paceline.spec.student import t95
from paceline.spec.vocabulary import Word, member


class Granularity(Word):
    """What pruning removes as one."""

    ELEMENT = "element"
    TWO_FOUR = "2:4"
    VECTOR = "vector"
    KERNEL = "kernel"
    BLOCK = "block"
    FILTER = "filter"

    @staticmethod
    def of(word: str) -> Granularity:
        """The granularity called `word`."""
        return member(Granularity, "granularity", word, SpecError)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerZeros:
    """Shares of values that are exactly zero round a layer with weights, as a run found them; None: not
    seen.
    """

    name: str
    kind: str
    #: multiply-adds of the measured passes, forward
    multiply_adds: float
    #: sizes of the weights: outputs, inputs of each (points of a kernel included), points of a kernel
    outputs: int
    inputs_each: int
    points: int
    inputs: float
    #: share of the inputs in groups of eight adjacent features or channels that are all zero
    input_vectors: float
    #: share of the features or channels that were zero in all that was measured
    dead_inputs: float
    output_gradients: float | None
    weight_zeros: float
    weight_gradients: float | None
    #: whether the backward pass computes a gradient of its input
    passes_gradient: bool

    @property
    def skippable(self) -> tuple[float, float]:
        """Multiply-adds with a zero factor, as shares of those of a forward pass: forward, and backward;
        zeros of two factors are taken to be independent.
        """
        kept, weights = 1 - self.inputs, 1 - self.weight_zeros
        gradients = 1 - (self.output_gradients or 0.0)
        forward = 1 - kept * weights
        backward = 1 - kept * gradients
        if self.passes_gradient:
            backward += 1 - gradients * weights
        return forward, backward


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationZeros:
    """The same of the outputs of a module without weights, such as a ReLU or a pooling."""

    name: str
    kind: str
    outputs: float
    output_gradients: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageCost:
    """What a form of storage makes of a pruned tensor."""

    granularity: Granularity
    density: float
    form: str
    #: bits that say where, per kept value
    index_bits: float
    #: bytes over those of the dense tensor
    bytes_share: float
    #: multiply-adds over those of the dense tensor, where every zero is skipped
    multiply_adds_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedRun:
    """A task pruned in one way: accuracy of each seed before pruning, right after it, and retrained."""

    task: str
    granularity: Granularity
    #: share of the weights of pruned layers that is kept, as the masks came out
    density: float
    dense: tuple[float, ...]
    pruned: tuple[float, ...]
    retrained: tuple[float, ...]

    @property
    def lost(self) -> tuple[float, float]:
        """Mean loss of accuracy against the same seed without pruning, and half of its 95 % interval."""
        losses = [before - after for before, after in zip(self.dense, self.retrained, strict=True)]
        if len(losses) < 2:
            return fmean(losses), math.inf
        return fmean(losses), t95(len(losses) - 1) * stdev(losses) / math.sqrt(len(losses))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductGain:
    """A layer's products on a device: seconds as they are and with zeros skipped, and the gain with its 90 %
    interval.
    """

    layer: str
    evaluates: str
    rows: int
    columns: int
    reduction: int
    dense_s: float
    sparse_s: float
    gain_low: float
    gain_high: float

    @property
    def gain(self) -> float:
        return self.dense_s / self.sparse_s


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGain:
    """What a device gains in one way: from 2:4 weights, or from the zeros that were measured."""

    way: str
    device: str
    products: tuple[ProductGain, ...]
    #: device seconds of a step or a forward pass, as it is and with zeros skipped
    dense_s: float
    sparse_s: float
    low: float
    high: float
    notes: tuple[str, ...] = ()

    @property
    def gain(self) -> float:
        return self.dense_s / self.sparse_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparsity:
    """The zeros of one network."""

    model: str
    batch: int
    #: samples of the passes in which zeros were counted, and updates before them
    samples: int
    steps: int
    layers: tuple[LayerZeros, ...]
    activations: tuple[ActivationZeros, ...]
    storage: tuple[StorageCost, ...]
    pruned: tuple[PrunedRun, ...] = ()
    gains: tuple[DeviceGain, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def skippable(self) -> tuple[float, float]:
        """Share of the multiply-adds with a zero factor, forward and backward."""
        forward = sum(layer.multiply_adds for layer in self.layers) or 1.0
        backward = sum((1 + layer.passes_gradient) * layer.multiply_adds for layer in self.layers) or 1.0
        found = [(layer.multiply_adds, *layer.skippable) for layer in self.layers]
        return (
            sum(size * ahead for size, ahead, _ in found) / forward,
            sum(size * behind for size, _, behind in found) / backward,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        gains = [
            {
                **asdict(way),
                "gain": way.gain,
                "products": [{**asdict(product), "gain": product.gain} for product in way.products],
            }
            for way in self.gains
        ]
        pruned = [{**asdict(run), "lost": run.lost} for run in self.pruned]
        return {**asdict(self), "skippable": self.skippable, "gains": gains, "pruned": pruned}

    def __rich__(self) -> Any:
        from paceline.report.sparsity import sparsity_view

        return sparsity_view(self)
