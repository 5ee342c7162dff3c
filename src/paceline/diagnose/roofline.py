"""What matrix products reach of what the device could do with their sizes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.catalog import devices
from paceline.diagnose.activity import Activity
from paceline.diagnose.findings import Finding
from paceline.readers.kineto import Inputs
from paceline.spec.device import Device
from paceline.spec.vocabulary import Precision
from paceline.spec.workload import ITEMSIZE
from paceline.units import show

#: batch, m, n, k and type of a product
Size = tuple[int, int, int, int, str]
#: types as the profiler calls them
_TYPES = {
    "float": "fp32", "c10::Half": "fp16", "c10::BFloat16": "bf16", "double": "fp64",
    "c10::Float8_e4m3fn": "fp8", "c10::Float8_e5m2": "fp8",
}  # fmt: skip
#: places of the two factors among the inputs
_FACTORS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2), "_scaled_mm": (0, 1)}
#: of the peak and of the memory's bandwidth, what good kernels reach
REACHED = 0.75
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Product:
    """Matrix products of one size in a step: seconds they took, and those of good kernels."""

    batch: int
    m: int
    n: int
    k: int
    dtype: str
    count: int
    seconds: float
    good_s: float

    @property
    def flops(self) -> float:
        """Of all of them."""
        return 2.0 * self.batch * self.m * self.n * self.k * self.count


def device_of(name: str) -> Device | None:
    """The device of the catalog that a driver calls so; None where it is not certain which it is."""
    folded = devices.fold(name)
    known = {devices.fold(alias): device for device in _all() for alias in _names(device)}
    for text in (folded, folded.removeprefix("nvidia-"), folded.removeprefix("amd-instinct-")):
        if text in known:
            return known[text]
    return None


def _all() -> Iterator[Device]:
    return (devices.get(name) for name in devices.names())


def _names(device: Device) -> tuple[str, ...]:
    return (device.name, device.title, *device.aliases)


def products(activity: Activity, device: Device) -> tuple[Product, ...]:
    """Products whose sizes the profiler recorded, those with most to gain first."""
    ops, inputs = activity.trace.ops, activity.trace.inputs
    which = activity.select(lambda group: group == "gemm")
    which = which[activity.operator[which] >= 0]
    spent: dict[int, float] = defaultdict(float)
    for place in which.tolist():
        spent[int(activity.operator[place])] += float(activity.exclusive_s[place])
    by_size: dict[Size, list[float]] = defaultdict(list)
    for op, seconds in spent.items():
        size = _size(
            activity.trace.names[ops.name[op]], inputs[ops.detail[op]] if ops.detail[op] >= 0 else None
        )
        if size is not None:
            by_size[size].append(seconds)
    found = [
        Product(*size, len(times), sum(times), len(times) * _good_s(size, device))
        for size, times in by_size.items()
    ]
    return tuple(sorted(found, key=lambda product: product.good_s - product.seconds))


def _size(name: str, inputs: Inputs | None) -> Size | None:
    """batch, m, n, k and type of a product."""
    factors = _FACTORS.get(name.rpartition("::")[2])
    if factors is None or inputs is None or len(inputs.dims) <= factors[1]:
        return None
    first, second = (inputs.dims[place] for place in factors)
    dtype = _TYPES.get(inputs.types[factors[0]] if len(inputs.types) > factors[0] else "")
    shaped = all(isinstance(dims, tuple) and len(dims) in (2, 3) for dims in (first, second))
    if dtype is None or not shaped or not all(type(size) is int for size in (*first, *second)):
        return None
    return math.prod(first[:-2]), first[-2], second[-1], first[-1], dtype


def _good_s(size: Size, device: Device) -> float:
    """Seconds of a product at the share of the peaks that good kernels reach."""
    batch, m, n, k, dtype = size
    compute = 2.0 * batch * m * n * k / device.peak(dtype)
    moved = batch * (m * k + k * n + m * n) * ITEMSIZE[dtype] / device.memory_bandwidth_Bps
    return max(compute, moved) / REACHED


def findings(activity: Activity) -> Iterator[Finding]:
    """Products far from the roofline."""
    device = device_of(activity.trace.device)
    if device is None:
        return
    found = products(activity, device)
    lost = sum(max(0.0, product.seconds - product.good_s) for product in found)
    seconds = sum(product.seconds for product in found)
    if lost <= 0:
        return
    flops = sum(product.flops for product in found)
    evidence = [f"together {show(flops / seconds, 'flops')} over {show(seconds, 'time')}"]
    for product in found[:_SHOWN]:
        share = product.flops / product.seconds / device.peak(product.dtype)
        sizes = f"{product.batch} x " * (product.batch > 1) + f"{product.m} x {product.n} x {product.k}"
        evidence.append(
            f"{sizes} in {product.dtype}, {product.count} times: {show(product.seconds, 'time')},"
            f" {100 * share:.0f} % of the peak of {device.name}"
        )
    yield Finding(
        kind="matrix-products",
        title=(
            f"matrix products reach {100 * (seconds - lost) / seconds:.0f} % of what good kernels do at"
            " their sizes"
        ),
        saves_s=lost,
        basis=f"time above {100 * REACHED:.0f} % of the roofline of {device.name}, by size",
        advice=_advice(found),
        evidence=tuple(evidence),
    )


def _advice(found: tuple[Product, ...]) -> str:
    """What would help the products that lose most."""
    words = []
    worst = found[0]
    if worst.dtype == Precision.FP32:
        words.append("bf16, or TF32 (torch.set_float32_matmul_precision('high'))")
    odd = [size for size in (worst.m, worst.n, worst.k) if size % 64]
    if odd:
        words.append(f"sizes that are multiples of 64 (pad {', '.join(map(str, odd))})")
    return "; ".join([*words, "a larger micro-batch, or fewer and larger products"])
