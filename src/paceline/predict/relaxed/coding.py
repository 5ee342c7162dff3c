"""Seconds that encoders and decoders take of a device.

Where a scheme was measured (`benchmarks/encoders.py`), as so many copies of its gradient; else from the work counted for it.
"""

from __future__ import annotations

from paceline.cost.chip import Chip
from paceline.cost.compression import Shape, Work, decode_work, encode_work, numel
from paceline.spec.compression import Scheme
from paceline.spec.device import Device

#: copies of a gradient that encoding it, and decoding what two ranks sent, take as long as: H200 (bench/data/h200_encoders.jsonl), and
#: one thread of a host (docs/compression.md)
COPIES: dict[str, dict[str, tuple[float, float]]] = {
    "gpu": {
        "fp16": (0.9, 1.4), "bf16": (1.0, 1.4), "terngrad": (1.3, 0.8), "signsgd": (2.2, 3.3), "onebit": (5.3, 2.9), "powersgd": (5.5, 2.3),
        "qsgd": (3.9, 8.5), "randomk": (4.1, 0.9), "dgc": (25.0, 13.0), "topk": (31.0, 16.0),
    },
    "cpu": {
        "fp16": (1.7, 0.7), "bf16": (1.7, 0.8), "terngrad": (1.8, 1.7), "qsgd": (2.4, 1.3), "signsgd": (1.7, 2.0), "onebit": (2.9, 1.3),
        "powersgd": (2.7, 2.9), "randomk": (2.0, 1.2), "dgc": (3.4, 0.9), "topk": (7.9, 1.9),
    },
}
#: share of the memory's rate that a copy reaches (100 MB in 0.051 ms on an H200), and that loops which were not measured do
COPY_SHARE, LOOP_SHARE = 0.82, 0.7
#: seconds of a launch where a device's file does not say
LAUNCH_S = 2e-6


def encode_s(scheme: Scheme, shape: Shape, chip: Chip, device: Device) -> float:
    """Device seconds to encode a float32 gradient of that shape."""
    work = encode_work(scheme, shape)
    measured = COPIES.get(device.kind, {}).get(scheme.name)
    if measured is None or not work.passes:
        return _counted_s(work, chip, device)
    return measured[0] * _copy_s(shape, chip) + _launches_s(work, device)


def decode_s(scheme: Scheme, shape: Shape, world: int, chip: Chip, device: Device) -> float:
    """Device seconds to decode what `world` ranks sent of it."""
    work = decode_work(scheme, shape, world)
    measured = COPIES.get(device.kind, {}).get(scheme.name)
    if measured is None:
        return _counted_s(work, chip, device)
    return measured[1] * _copy_s(shape, chip) * work.bytes / decode_work(scheme, shape, 2).bytes + _launches_s(work, device)


def _copy_s(shape: Shape, chip: Chip) -> float:
    return 8 * numel(shape) / (COPY_SHARE * chip.bandwidth)


def _counted_s(work: Work, chip: Chip, device: Device) -> float:
    """Arithmetic or memory traffic, whichever takes longer."""
    return max(work.flops / chip.peaks["fp32"], work.bytes / chip.bandwidth) / LOOP_SHARE + _launches_s(work, device)


def _launches_s(work: Work, device: Device) -> float:
    return work.passes * (device.launch_s or LAUNCH_S)
