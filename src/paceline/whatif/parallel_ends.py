"""Where each form of parallelism ends for a model: on hardware as it is, and ten times as fast.

A bound, not a prediction: operators run at the peak of arithmetic or memory, whichever takes longer; a rank's
messages follow its computation, at the rate and latency of the innermost network that joins all ranks; what
the device's memory holds does not count. A form ends at the last power of two of ranks with a parallel
efficiency of at least a half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from paceline.cost import parallel_forms as pf
from paceline.spec.cluster import Cluster
from paceline.spec.concurrency import EndPoint
from paceline.spec.workload import Workload
from paceline.whatif.layer_chain import ChainedLayer, gradient_bytes

#: the least parallel efficiency
WORTH = 0.5
#: seconds of a message on a tier whose file has no latency
USUAL_LATENCY_S = 5e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareScale:
    """Hardware so many times as fast as the cluster's; latencies stay what they are."""

    name: str
    arithmetic: float = 1.0
    network: float = 1.0


SCALES = (
    HardwareScale(name="today"),
    HardwareScale(name="device x10", arithmetic=10),
    HardwareScale(name="network x10", network=10),
    HardwareScale(name="both x10", arithmetic=10, network=10),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormDegrees:
    """Ranks by form."""

    data: int = 1
    model: int = 1
    stages: int = 1


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What the time of a step under each form follows from; seconds are those of one device of today."""

    batch: int
    gradient_bytes: float
    layers: tuple[ChainedLayer, ...]
    layer_s: tuple[float, ...]

    @cached_property
    def widths(self) -> tuple[float, ...]:
        """Ranks among which each layer can be cut; a layer without products goes with the one before it."""
        found, last = [], 1.0
        for layer in self.layers:
            last = float(layer.width or last)
            found.append(last)
        return tuple(found)

    @cached_property
    def deep(self) -> int:
        """Layers with products."""
        return sum(layer.width is not None for layer in self.layers)

    @cached_property
    def _stages(self) -> dict[tuple[int, int], tuple[float, tuple[int, ...]]]:
        return {}

    def slowest(self, model: int, stages: int) -> tuple[float, tuple[int, ...]]:
        """Seconds of the slowest of so many stages, each cut among `model` ranks; and where the cuts are."""
        key = (model, stages)
        if key not in self._stages:
            pairs = zip(self.layer_s, self.widths, strict=True)
            each = [seconds / min(model, width) for seconds, width in pairs]
            cuts = pf.balanced_cuts(each, stages) if stages > 1 else []
            self._stages[key] = (pf.slowest_stage(each, cuts), tuple(cuts))
        return self._stages[key]

    def compute_s(self, degrees: FormDegrees) -> float:
        """Computation of a step on one device of today per rank, bubbles included."""
        slowest, _ = self.slowest(degrees.model, degrees.stages)
        return pf.pipeline_seconds(slowest / degrees.data, degrees.stages, self.micro_batches(degrees))

    def micro_batches(self, degrees: FormDegrees) -> int:
        """One sample each: what fills a pipeline best."""
        return max(1, self.batch // degrees.data)

    def sending(self, degrees: FormDegrees) -> list[pf.Sending]:
        """What a rank sends for each form."""
        _, cuts = self.slowest(degrees.model, degrees.stages)
        cut = [layer for layer in self.layers if layer.output_bytes]
        share = degrees.data * degrees.stages
        found = [pf.data_sending(degrees.data, self.gradient_bytes / (degrees.model * degrees.stages))]
        if degrees.model > 1:
            inside = pf.model_sending(
                degrees.model,
                [layer.output_bytes / share for layer in cut],
                [layer.input_bytes / share for layer in cut],
            )
            found.append(pf.Sending(bytes=inside.bytes, messages=inside.messages / degrees.stages))
        crossing = [self.layers[place].cut_bytes / degrees.data for place in cuts]
        found.append(pf.pipeline_sending(crossing, self.micro_batches(degrees)))
        return found


def step_shape(workload: Workload, layers: Sequence[ChainedLayer], cluster: Cluster) -> StepShape:
    """The shape of a captured step on a cluster's devices."""
    return StepShape(
        batch=workload.batch,
        gradient_bytes=gradient_bytes(workload),
        layers=tuple(layers),
        layer_s=tuple(layer.seconds(cluster.device) for layer in layers),
    )


def link(cluster: Cluster, ranks: int) -> tuple[float, float]:
    """B/s of a device and seconds of a message on the innermost tier that joins so many ranks; the outermost,
    where none does.
    """
    tier = next(
        (one for one in cluster.tiers if one.domain is None or one.domain >= ranks), cluster.tiers[-1]
    )
    rate = tier.bandwidth_Bps
    if tier.node_bandwidth_Bps is not None:
        rate = min(rate, tier.node_bandwidth_Bps / cluster.node_devices)
    latency = USUAL_LATENCY_S if tier.latency_s is None else tier.latency_s
    return rate / tier.oversubscription, latency


def parallel_ends(workload: Workload, layers: Sequence[ChainedLayer], cluster: Cluster) -> Iterator[EndPoint]:
    """The end of each form on each scale of hardware."""
    shape = step_shape(workload, layers, cluster)
    for scale in SCALES:
        for form in FORMS:
            yield _end(shape, cluster, scale, form)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormRule:
    """A form: which degrees so many ranks may have, and what limits it besides messages."""

    name: str
    degrees: Callable[[StepShape, int], Sequence[FormDegrees]]
    structure: str
    losses: str


def _powers(most: float) -> list[int]:
    return [2**i for i in range(int(most).bit_length()) if 2**i <= most]


def _data(shape: StepShape, ranks: int) -> list[FormDegrees]:
    return [FormDegrees(data=ranks)] if ranks <= shape.batch else []


def _model(shape: StepShape, ranks: int) -> list[FormDegrees]:
    return [FormDegrees(model=ranks)] if ranks <= max(shape.widths, default=1) else []


def _pipeline(shape: StepShape, ranks: int) -> list[FormDegrees]:
    return [FormDegrees(stages=ranks)] if ranks <= shape.deep else []


def _hybrid(shape: StepShape, ranks: int) -> list[FormDegrees]:
    found = []
    for data in _powers(min(ranks, shape.batch)):
        for model in _powers(min(ranks // data, max(shape.widths, default=1))):
            stages = ranks // (data * model)
            if stages <= shape.deep and data * model * stages == ranks:
                found.append(FormDegrees(data=data, model=model, stages=stages))
    return found


FORMS = (
    FormRule(name="data", degrees=_data, structure="the batch", losses="the batch"),
    FormRule(name="model", degrees=_model, structure="the widest layer", losses="narrow layers"),
    FormRule(
        name="pipeline",
        degrees=_pipeline,
        structure="the number of layers",
        losses="uneven stages and bubbles",
    ),
    FormRule(
        name="hybrid",
        degrees=_hybrid,
        structure="batch, widths and layers together",
        losses="narrow layers, uneven stages and bubbles",
    ),
)


def _seconds(
    shape: StepShape, cluster: Cluster, scale: HardwareScale, degrees: FormDegrees
) -> tuple[float, float]:
    """Seconds of computation and of messages of a step."""
    bandwidth, latency = link(cluster, degrees.data * degrees.model * degrees.stages)
    sent = sum(one.seconds(bandwidth * scale.network, latency) for one in shape.sending(degrees))
    return shape.compute_s(degrees) / scale.arithmetic, sent


def _end(shape: StepShape, cluster: Cluster, scale: HardwareScale, form: FormRule) -> EndPoint:
    alone = sum(shape.layer_s) / scale.arithmetic
    curve, ranks, stops = [(1, alone)], 1, form.structure
    while True:
        tried = ranks * 2
        options = [_seconds(shape, cluster, scale, degrees) for degrees in form.degrees(shape, tried)]
        if not options:
            break
        computing, sending = min(options, key=sum)
        curve.append((tried, computing + sending))
        if alone / (computing + sending) < WORTH * tried:
            stops = "communication" if sending > computing - alone / tried else form.losses
            break
        ranks = tried
    return EndPoint(
        form=form.name,
        hardware=scale.name,
        ranks=ranks,
        speedup=alone / dict(curve)[ranks],
        stops=stops,
        curve=tuple(curve),
    )
