"""What each form of parallelism sends and how long a step then takes, from a few sizes.

The forms are those of Ben-Nun and Hoefler (arXiv:1802.09941): data, model and pipeline parallelism, and their
combination. Sizes are bytes and seconds; P is the number of ranks. A ring or halving-doubling all-reduce of s
bytes sends 2 (P - 1) / P s bytes a rank, an all-gather or reduce-scatter half of that, which is the least
possible (Patarasuk and Yuan, 2009). At best an all-gather takes ceil(log2 P) messages in a row, an all-reduce
twice as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cost.work_depth import levels


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """What a rank sends in a step: bytes, and messages that follow one another."""

    bytes: float
    messages: float

    def seconds(self, bandwidth_Bps: float, latency_s: float) -> float:
        """Alpha-beta: latency of each message, and bytes over the rate of the link."""
        return self.messages * latency_s + self.bytes / bandwidth_Bps


def data_sending(ranks: int, gradient_bytes: float) -> Sending:
    """An all-reduce of the gradients: 2 (P - 1) / P |w| bytes, 2 ceil(log2 P) messages."""
    return Sending(bytes=2 * _others(ranks) * gradient_bytes, messages=2 * levels(ranks))


def model_sending(ranks: int, outputs: Sequence[float], inputs: Sequence[float]) -> Sending:
    """Layers cut by output features: each gathers its outputs forward, and backward sums the gradient of its
    inputs over the ranks.

    Bytes: (P - 1) / P sum_l (out_l + 2 in_l); messages: ceil(log2 P) and 2 ceil(log2 P) a layer.
    """
    sent = _others(ranks) * (sum(outputs) + 2 * sum(inputs))
    return Sending(bytes=sent, messages=levels(ranks) * (len(outputs) + 2 * len(inputs)))


def pipeline_sending(cut_bytes: Sequence[float], micro_batches: int) -> Sending:
    """Activations over a cut, and their gradients back: at most 2 max(cut) bytes a rank (of the whole batch),
    two messages a micro-batch, of which those of the filling pipeline are waited for at every cut.
    """
    if not cut_bytes:
        return Sending(bytes=0.0, messages=0.0)
    return Sending(bytes=2 * max(cut_bytes), messages=2 * (micro_batches + len(cut_bytes) - 1))


def _others(ranks: int) -> float:
    return (ranks - 1) / ranks


def model_seconds(ranks: int, layer_s: Sequence[float], widths: Sequence[float]) -> float:
    """Computation of layers that are cut no finer than one output feature a rank: sum_l t_l / min(P, C_l)."""
    return sum(seconds / min(ranks, width) for seconds, width in zip(layer_s, widths, strict=True))


def pipeline_seconds(slowest_stage_s: float, stages: int, micro_batches: int) -> float:
    """Computation of a pipeline: (M + S - 1) / M of the slowest stage's time for the whole batch."""
    return slowest_stage_s * (micro_batches + stages - 1) / micro_batches


def balanced_cuts(layer_s: Sequence[float], stages: int) -> list[int]:
    """Where to cut a chain of layers into at most so many stages, the slowest as fast as possible: the index
    of the first layer of each stage but the first.
    """
    low, high = max(layer_s, default=0.0), sum(layer_s)
    for _ in range(60):
        middle = (low + high) / 2
        if len(_greedy(layer_s, middle)) < stages:
            high = middle
        else:
            low = middle
    return _greedy(layer_s, high)


def _greedy(layer_s: Sequence[float], most_s: float) -> list[int]:
    """First layers of the stages behind the first, each stage filled up to `most_s`."""
    cuts: list[int] = []
    filled = 0.0
    for index, seconds in enumerate(layer_s):
        if index and filled + seconds > most_s * (1 + 1e-12):
            cuts.append(index)
            filled = 0.0
        filled += seconds
    return cuts


def slowest_stage(layer_s: Sequence[float], cuts: Sequence[int]) -> float:
    """Seconds of the slowest stage."""
    ends = [*cuts, len(layer_s)]
    starts = [0, *cuts]
    return max(sum(layer_s[start:end]) for start, end in zip(starts, ends, strict=True))
