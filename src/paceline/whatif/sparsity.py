"""What a device gains from zeros: 2:4 weights, and the zeros that a run found on hardware that skips them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.catalog import architectures, frameworks
from paceline.cost.chip import Chip, chip
from paceline.cost.curves import Curves, curves_for
from paceline.cost.index_overhead import SparseLayout, StoredForm, forms, unit_shape
from paceline.cost.operators import sustained, times
from paceline.cost.pack import pack_ops
from paceline.cost.sparse_products import (
    ZeroOperand,
    dense_seconds,
    skipping_seconds,
    two_four_curve,
    two_four_seconds,
)
from paceline.cost.work_depth import Evaluation
from paceline.errors import SpecError
from paceline.predict.interval import around, module_errors
from paceline.spec.device import Device
from paceline.spec.sparsity import DeviceGain, Granularity, LayerZeros, ProductGain, StorageCost
from paceline.spec.workload import ITEMSIZE, Op, Workload

Array = NDArray[np.float64]

#: shares of the weights that tables show
DENSITIES = (0.5, 0.25, 0.1)
#: types of products that 2:4 kernels exist for, and what inputs and outputs have to be multiples of
TWO_FOUR_TYPES = ("bf16", "fp16", "fp8", "int8")
TWO_FOUR_MULTIPLE = 16


# -- storage ---------------------------------------------------------------------------------------


def storage(
    layers: Sequence[LayerZeros], value_bits: int, densities: Sequence[float] = DENSITIES
) -> Iterator[StorageCost]:
    """Index overhead and savings of the layers' weights, pruned in units kept at random, by granularity,
    density and form of storage. Kernels are those of convolutions alone.
    """
    for granularity in Granularity:
        chosen = [layer for layer in layers if granularity is not Granularity.KERNEL or layer.points > 1]
        if not chosen:
            continue
        for density in (0.5,) if granularity is Granularity.TWO_FOUR else densities:
            layouts = [_layout(layer, granularity, density, value_bits) for layer in chosen]
            yield from _stored(granularity, layouts)


def _layout(layer: LayerZeros, granularity: Granularity, density: float, value_bits: int) -> SparseLayout:
    height, width = unit_shape(granularity, layer.outputs, layer.inputs_each, layer.points)
    rows, columns = -(-layer.outputs // height), -(-layer.inputs_each // width)
    kept = max(1, round(density * rows * columns))
    return SparseLayout(rows=rows, columns=columns, kept=kept, size=height * width, value_bits=value_bits)


def _stored(granularity: Granularity, layouts: Sequence[SparseLayout]) -> Iterator[StorageCost]:
    structured = granularity is Granularity.TWO_FOUR
    by_form: dict[str, list[StoredForm]] = {}
    for layout in layouts:
        for stored in forms(layout, structured=structured):
            by_form.setdefault(stored.form.partition(",")[0], []).append(stored)
    kept = sum(layout.kept * layout.size for layout in layouts)
    values = sum(layout.units * layout.size for layout in layouts)
    dense = sum(layout.dense_bits for layout in layouts)
    for form, found in by_form.items():
        # zeros that a run-length code has to store are overhead too
        overhead = sum(one.bits for one in found) - kept * layouts[0].value_bits
        yield StorageCost(
            granularity=granularity,
            density=kept / values,
            form=form,
            index_bits=overhead / kept,
            bytes_share=sum(one.bits for one in found) / dense,
            multiply_adds_share=kept / values,
        )


# -- gains -----------------------------------------------------------------------------------------


def device_gains(workload: Workload, layers: Sequence[LayerZeros], device: Device) -> list[DeviceGain]:
    """What zeros gain in a step of the workload on a device: with 2:4 weights where it has units for them,
    and with the zeros of `layers` where it skips any.
    """
    step = _StepOnDevice.of(workload, {layer.name: layer for layer in layers}, device)
    found = []
    rate = two_four_rate(device)
    if rate is not None:
        found.append(step.two_four("2:4 weights, forward pass", ("forward",), rate))
        found.append(step.two_four("2:4 weights, training step", _STEP, rate))
    if device.weight_skips or device.activation_skips:
        found.append(step.skipping("zeros as measured, training step"))
    if not found:
        raise SpecError(
            f"nothing is known of zeros that {device.name} skips: it has no 2:4 units; in a device file say"
            f' like = "{device.name}" and, under [sparsity], two_four, weights or activations'
        )
    return found


def two_four_rate(device: Device) -> float | None:
    """Peak of products with 2:4 weights over the dense one; None where the device has no such units."""
    if device.two_four_rate is not None:
        return device.two_four_rate
    return architectures.get(device.architecture).two_four_rate


_STEP = ("forward", "backward", "recompute", "optimizer")


@dataclass(frozen=True, slots=True)
class _LayerProduct:
    """A product of a layer with weights: its place among the operators of the step, and what it computes."""

    place: int
    op: Op
    layer: LayerZeros
    evaluates: Evaluation


@dataclass(frozen=True, slots=True)
class _StepOnDevice:
    """The operators of a step on a device, with the products of its layers."""

    device: Device
    chip: Chip
    curves: Curves
    ops: tuple[Op, ...]
    #: seconds of each operator at the clock that the device sustains
    seconds: Array
    products: tuple[_LayerProduct, ...]

    @staticmethod
    def of(workload: Workload, layers: Mapping[str, LayerZeros], device: Device) -> _StepOnDevice:
        target, curves = chip(device), curves_for(device)
        ops = tuple(op for index in workload.order for op in workload.segments[index].ops)
        packed = pack_ops(ops)
        seconds = sustained(times(packed, target, curves), packed, device).seconds
        products = tuple(
            _LayerProduct(place, op, layers[op.module], _evaluation(op, layers[op.module]))
            for place, op in enumerate(ops)
            if op.kind in ("gemm", "conv") and op.module in layers
        )
        return _StepOnDevice(device, target, curves, ops, seconds, products)

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm of a gain: of shapes never seen and, on other devices than the
        one that the constants were fitted on, of the device.
        """
        fitted = two_four_curve()
        if self.device.name == fitted.device:
            return fitted.sigma
        errors = module_errors(self.device, self.curves, frameworks.get(frameworks.USUAL))
        return math.hypot(fitted.sigma, errors.common[0][1].sigma)

    def two_four(self, way: str, phases: Sequence[str], rate: float) -> DeviceGain:
        """With weights pruned 2:4, where that is faster: products with them, forward and for gradients of
        inputs.
        """
        mine = [one for one in self.products if one.op.phase in phases and _takes_two_four(one)]
        sparse = two_four_seconds([one.op for one in mine], self.chip, self.curves, rate)
        notes = [_TRANSPOSED] if "backward" in phases else []
        if not mine:
            notes.append(
                f"no product of this step can be 2:4: linear layers in {', '.join(TWO_FOUR_TYPES)}, with"
                f" inputs and outputs in multiples of {TWO_FOUR_MULTIPLE}; --precision bf16 makes them so"
            )
        return self._gain(way, phases, mine, sparse, notes)

    def skipping(self, way: str) -> DeviceGain:
        """With the zeros that were measured, as the device skips them."""
        weights, activations = self.device.weight_skips, self.device.activation_skips
        operands = [_operands(one, weights, activations) for one in self.products]
        ops = [one.op for one in self.products]
        sparse = skipping_seconds(ops, operands, self.chip, self.curves)
        return self._gain(way, _STEP, list(self.products), sparse, [_ASSUMED])

    def _gain(
        self,
        way: str,
        phases: Sequence[str],
        mine: Sequence[_LayerProduct],
        sparse: Array,
        notes: Sequence[str],
    ) -> DeviceGain:
        sigma = self.sigma
        dense = dense_seconds([one.op for one in mine], self.chip, self.curves)
        products = tuple(
            _product(one, float(before), float(after), sigma)
            for one, before, after in zip(mine, dense, sparse, strict=True)
        )
        chosen = np.array([op.phase in phases for op in self.ops])
        total = float(self.seconds[chosen].sum())
        likely = self._without(mine, [product.gain for product in products], total)
        low = self._without(mine, [product.gain_low for product in products], total)
        high = self._without(mine, [product.gain_high for product in products], total)
        return DeviceGain(
            way=way,
            device=self.device.name,
            products=products,
            dense_s=total,
            sparse_s=likely,
            low=total / low,
            high=total / high,
            notes=(*notes, *_left_dense(products)),
        )

    def _without(self, mine: Sequence[_LayerProduct], gains: Iterable[float], total: float) -> float:
        """Seconds with each product as much faster as its gain says, if it is."""
        for one, gain in zip(mine, gains, strict=True):
            total -= float(self.seconds[one.place]) * (1 - 1 / max(1.0, gain))
        return total


def _left_dense(products: Sequence[ProductGain]) -> list[str]:
    slower = sum(product.gain <= 1 for product in products)
    return [f"{slower} of {len(products)} products are no faster and stay dense"] if slower else []


_TRANSPOSED = (
    "gradients of inputs are 2:4 only where masks are so along rows and along columns; gradients of weights"
    " stay dense; pruning again after each update is not counted"
)
_ASSUMED = (
    "the device file's shares are what its designer claims; zeros of two operands are taken to be independent"
)


def _product(one: _LayerProduct, dense_s: float, sparse_s: float, sigma: float) -> ProductGain:
    low, high = around(dense_s / sparse_s, sigma)
    rows, columns, reduction = _dims(one.op)
    return ProductGain(
        layer=one.layer.name,
        evaluates=one.evaluates.value,
        rows=rows,
        columns=columns,
        reduction=reduction,
        dense_s=dense_s,
        sparse_s=sparse_s,
        gain_low=low,
        gain_high=high,
    )


def _dims(op: Op) -> tuple[int, int, int]:
    """Rows, columns and reduction of a product; of a convolution, of its implicit forward product."""
    if op.kind == "gemm":
        return op.dims[1], op.dims[2], op.dims[3]
    samples, c_in, c_out, groups, _, outputs, taps, _ = op.dims
    return samples * outputs, c_out, c_in // groups * taps


def _evaluation(op: Op, layer: LayerZeros) -> Evaluation:
    """What a layer's product computes: its output, or the gradient of its inputs or of its weights."""
    if op.phase != "backward":
        return Evaluation.OUTPUT
    if op.kind == "conv":
        return Evaluation.WEIGHTS if "wgrad" in op.tags else Evaluation.INPUT
    _, rows, columns, reduction = op.dims
    weights = layer.outputs * layer.inputs_each
    if columns * reduction == weights and rows * columns == weights:  # square on all sides: by its layout
        return Evaluation.INPUT if op.tags[0] == "tn" else Evaluation.WEIGHTS
    return Evaluation.WEIGHTS if rows * columns == weights else Evaluation.INPUT


def _takes_two_four(one: _LayerProduct) -> bool:
    if one.op.kind != "gemm" or one.op.dtype not in TWO_FOUR_TYPES or one.evaluates is Evaluation.WEIGHTS:
        return False
    _, _, columns, reduction = one.op.dims
    return columns % TWO_FOUR_MULTIPLE == 0 and reduction % TWO_FOUR_MULTIPLE == 0


def _operands(one: _LayerProduct, weights: float, activations: float) -> list[ZeroOperand]:
    """The two operands of a product with the zeros that were measured in them."""
    layer, op = one.layer, one.op
    size = ITEMSIZE.get(op.dtype, 4)
    held = layer.outputs * layer.inputs_each * size
    entering, leaving = _activation_bytes(one, size)
    kept = {
        Evaluation.OUTPUT: ((entering, layer.inputs, activations), (held, layer.weight_zeros, weights)),
        Evaluation.INPUT: (
            (leaving, layer.output_gradients or 0.0, activations),
            (held, layer.weight_zeros, weights),
        ),
        Evaluation.WEIGHTS: (
            (entering, layer.inputs, activations),
            (leaving, layer.output_gradients or 0.0, activations),
        ),
    }[one.evaluates]
    return [ZeroOperand(bytes=float(size), zeros=zeros, skips=skips) for size, zeros, skips in kept]


def _activation_bytes(one: _LayerProduct, size: int) -> tuple[float, float]:
    """Bytes of a layer's input and of its output."""
    if one.op.kind == "conv":
        samples, c_in, c_out, _, points, outputs, _, _ = one.op.dims
        return float(samples * c_in * points * size), float(samples * c_out * outputs * size)
    every = one.op.dims[1] * one.op.dims[2] * one.op.dims[3]
    rows = every / (one.layer.outputs * one.layer.inputs_each)
    return rows * one.layer.inputs_each * size, rows * one.layer.outputs * size
