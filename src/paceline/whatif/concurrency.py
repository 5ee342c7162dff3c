"""How much concurrency a training step has, and where each form of parallelism ends.

Work and depth are those of `cost.work_depth`, over every operator of a captured step; the depth of a pass is
its longest chain over the data (`critical_path`). What forms of parallelism send is in `cost.parallel_forms`,
where they end in `parallel_ends`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from paceline.cost import parallel_forms as pf
from paceline.cost import work_depth as wd
from paceline.cost.operator_depth import MOVES, convolution_size, evaluation
from paceline.errors import SpecError
from paceline.spec.cluster import Cluster
from paceline.spec.concurrency import ChainStretch, Concurrency, ConvolutionChoice, ParallelForm, Passes
from paceline.spec.device import Device
from paceline.spec.workload import PHASES, Op, Workload
from paceline.whatif.critical_path import Chain, CostedOp, folded, longest, nodes, one_after_another
from paceline.whatif.layer_chain import BACKWARD, ChainedLayer, chain_of_layers, gradient_bytes
from paceline.whatif.parallel_ends import parallel_ends

#: kinds of operators -> what a table calls them
KINDS = {
    "conv": "convolution",
    "gemm": "fully connected",
    "attention": "attention",
    "rnn": "recurrent",
    "pool": "pooling",
    "batchnorm": "batch norm",
    "norm": "layer norm",
    "softmax": "softmax",
    "reduce": "reduction",
    "elementwise": "pointwise",
    "optimizer": "update",
    **dict.fromkeys(MOVES, "data movement"),
}


def concurrency(workload: Workload, cluster: Cluster | None = None) -> Concurrency:
    """Work, depth and average parallelism of a step; with a cluster, also where each form ends on its
    devices, and on some ten times as fast.
    """
    if any(op.kind == "fused" for segment in workload.segments for op in segment.ops):
        raise SpecError(
            f"{workload.name} was captured with --compile: fused kernels hide the operators that depth is"
            " counted from; capture it without"
        )
    every = nodes(workload)
    # blocks that were captured once are no chain of layers
    layers = [] if folded(workload) else list(chain_of_layers(every))
    step = _stretch("step", workload, every, PHASES)
    return Concurrency(
        model=workload.name,
        batch=workload.batch,
        seq=workload.seq,
        precision=workload.precision,
        folded=folded(workload),
        forward=_stretch("forward", workload, every, ("forward",)),
        backward=_stretch("backward", workload, every, BACKWARD),
        step=step,
        kinds=tuple(_by_kind(every)),
        layers=tuple(_by_layer(every)),
        convolutions=tuple(_convolutions(every)),
        forms=tuple(_forms(workload, layers)) if layers else (),
        hardware=cluster.name if cluster is not None else "",
        devices_filled=None if cluster is None else _filled(step, workload, cluster.device),
        ends=tuple(parallel_ends(workload, layers, cluster)) if layers and cluster is not None else (),
    )


def _filled(step: ChainStretch, workload: Workload, device: Device) -> float | None:
    """Devices whose multiply-adds of one cycle the average parallelism of a step fills."""
    if not device.clock_hz:
        return None
    dtype = workload.precision.removeprefix("amp_")
    each_cycle = device.peak(dtype) / 2 / device.clock_hz
    return step.parallelism / each_cycle


def _stretch(name: str, workload: Workload, every: Sequence[CostedOp], phases: Sequence[str]) -> ChainStretch:
    chosen = [node for node in every if node.op.phase in phases]
    found: Chain = one_after_another(workload, phases) if folded(workload) else longest(chosen)
    shares: dict[str, float] = defaultdict(float)
    for node in found.operators:
        shares[KINDS.get(node.op.kind, node.op.kind)] += node.cost.depth
    return ChainStretch(
        name=name,
        work=sum(node.cost.work for node in chosen),
        depth=found.depth,
        chain=tuple(sorted(shares.items(), key=lambda pair: -pair[1])),
    )


def _module(op: Op) -> str:
    return op.module or "(outside modules)"


def _grouped(every: Sequence[CostedOp], name_of: Callable[[Op], str]) -> dict[str, list[CostedOp]]:
    groups: dict[str, list[CostedOp]] = defaultdict(list)
    for node in every:
        groups[name_of(node.op)].append(node)
    return groups


def _by_kind(every: Sequence[CostedOp]) -> list[Passes]:
    """Kinds of operators, most work first."""
    groups = _grouped(every, lambda op: KINDS.get(op.kind, op.kind))
    return _passes(groups, lambda part: max((node.cost.depth for node in part), default=0.0), sum)


def _by_layer(every: Sequence[CostedOp]) -> list[Passes]:
    """Modules, most work first."""
    groups = _grouped([node for node in every if node.op.phase != "optimizer"], _module)
    return _passes(groups, lambda part: longest(part).depth, None)


def _passes(
    groups: Mapping[str, Sequence[CostedOp]],
    depth_of: Callable[[Sequence[CostedOp]], float],
    together: Callable[[Iterable[float]], float] | None,
) -> list[Passes]:
    """Both passes of each group; `together` makes the depth behind the average parallelism from those of all
    operators, where it is not that of the two passes.
    """
    found = []
    for name, group in groups.items():
        ahead = [node for node in group if node.op.phase not in BACKWARD]
        behind = [node for node in group if node.op.phase in BACKWARD]
        depths = [depth_of(ahead), depth_of(behind)]
        depth = sum(depths) if together is None else together(node.cost.depth for node in group)
        found.append(
            Passes(
                name=name,
                operators=len(ahead),
                forward_work=_work(ahead),
                forward_depth=depths[0],
                backward_work=_work(behind),
                backward_depth=depths[1],
                parallelism=_work(group) / depth if depth else 0.0,
            )
        )
    return sorted(found, key=lambda passes: -(passes.forward_work + passes.backward_work))


def _work(group: Iterable[CostedOp]) -> float:
    return sum(node.cost.work for node in group)


# -- convolutions by algorithm ---------------------------------------------------------------------

Formula = Callable[[wd.ConvolutionSize, wd.Evaluation], wd.WorkDepth | None]


def _convolutions(every: Sequence[CostedOp]) -> Iterator[ConvolutionChoice]:
    """What other algorithms would make of the convolutions; the gradient of the input and that of the weights
    are two.
    """
    mine = [node.op for node in every if node.op.kind == "conv"]
    forward = [op for op in mine if op.phase not in BACKWARD]
    for name, formula in ALGORITHMS.items() if forward else ():
        ahead = [_by(formula, op) for op in forward]
        behind = [_by(formula, op) for op in mine if op.phase in BACKWARD]
        yield ConvolutionChoice(
            algorithm=name,
            fits=sum(formula(convolution_size(op), evaluation(op)) is not None for op in forward),
            convolutions=len(forward),
            forward_work=sum(cost.work for cost in ahead),
            forward_depth=sum(cost.depth for cost in ahead),
            backward_work=sum(cost.work for cost in behind),
            backward_depth=sum(cost.depth for cost in behind),
        )


def _by(formula: Formula, op: Op) -> wd.WorkDepth:
    """A convolution by an algorithm, or the direct one where it does not apply."""
    size, which = convolution_size(op), evaluation(op)
    return formula(size, which) or wd.convolution_direct(size, which)


def _winograd(size: wd.ConvolutionSize, which: wd.Evaluation, tile: int) -> wd.WorkDepth | None:
    return wd.convolution_winograd(size, which, tile) if wd.winograd_fits(size) else None


def _fourier(size: wd.ConvolutionSize, which: wd.Evaluation) -> wd.WorkDepth | None:
    return wd.convolution_fft(size, which) if size.taps > 1 else None


#: algorithm -> its cost for a convolution; None where it does not apply
ALGORITHMS: dict[str, Formula] = {
    "direct": wd.convolution_direct,
    "im2col": wd.convolution_im2col,
    "Winograd F(2x2)": partial(_winograd, tile=2),
    "Winograd F(4x4)": partial(_winograd, tile=4),
    "FFT": _fourier,
}


# -- forms of parallelism --------------------------------------------------------------------------


def _forms(workload: Workload, layers: Sequence[ChainedLayer]) -> Iterator[ParallelForm]:
    batch, gradients = workload.batch, gradient_bytes(workload)
    widths = {layer.name: layer.width for layer in layers if layer.width}
    wide, deep = max(widths.values(), default=1), len(widths)
    yield ParallelForm(
        name="data",
        most=batch,
        limit=f"one sample a rank: the batch of {batch}",
        bytes_two=pf.data_sending(2, gradients).bytes,
        bytes_most=pf.data_sending(max(2, batch), gradients).bytes,
    )
    yield ParallelForm(
        name="model",
        most=wide,
        limit=f"one output feature a rank; {_narrowest(widths)}",
        bytes_two=_model(2, layers).bytes,
        bytes_most=_model(wide, layers).bytes,
    )
    yield ParallelForm(
        name="pipeline",
        most=deep,
        limit=f"one of {deep} layers with products a rank; at most {batch} micro-batches fill it",
        bytes_two=2 * _halfway(layers),
        bytes_most=2 * max((layer.cut_bytes for layer in layers[1:]), default=0.0),
    )
    yield ParallelForm(
        name="hybrid",
        most=float(batch) * wide * deep,
        limit="the product of the others; what it sends is the sum of theirs, each on a part of the model",
        bytes_two=None,
        bytes_most=None,
    )


def _narrowest(widths: Mapping[str, int]) -> str:
    name = min(widths, key=lambda name: widths[name], default="")
    return f"beyond {widths[name]} ranks ({name}) some layers are too narrow" if name else "no products"


def _halfway(layers: Sequence[ChainedLayer]) -> float:
    """Bytes that cross the cut into two stages of equal arithmetic."""
    cuts = pf.balanced_cuts([layer.flops for layer in layers], 2)
    return layers[cuts[0]].cut_bytes if cuts else 0.0


def _model(ranks: int, layers: Sequence[ChainedLayer]) -> pf.Sending:
    cut = [layer for layer in layers if layer.output_bytes]
    return pf.model_sending(
        ranks, [layer.output_bytes for layer in cut], [layer.input_bytes for layer in cut]
    )
