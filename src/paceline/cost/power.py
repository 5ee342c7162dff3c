"""Sustained clocks: matrix units at full rate draw more than a board may for longer than some milliseconds.

Short benchmarks do not see it; training does. Power beyond what the board leaves lowers the clock, and with it
the voltage, so that power falls faster than the rate:

    draw     = (FLOPs * joules per FLOP + bytes * joules per byte) / seconds            at the boost clock
    slowdown = (draw / (limit - idle))^(1/exponent)                                     of what the clock bounds

Joules per FLOP are fitted to published training steps (`paceline validate`), one number per architecture and
precision: steps of one kind on boards with different limits (H100 at 500 and 700 W, GB200 and GB300) agree.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.spec.device import Device

#: power over frequency where voltage follows it
EXPONENT = 2.0
#: share of the limit that leakage, fans, links and idle memory take
IDLE_SHARE = 0.15
#: joules per FLOP of the matrix units at the boost clock, by architecture and precision
FLOP_J: dict[str, dict[str, float]] = {
    "volta": {"fp16": 1.8e-12},
    "ampere": {"fp16": 1.5e-12, "bf16": 1.5e-12},
    "hopper": {"fp16": 1.15e-12, "bf16": 1.15e-12, "fp8": 0.62e-12},
    "blackwell": {"fp16": 1.2e-12, "bf16": 1.2e-12, "fp8": 0.5e-12},
}
#: joules per byte that an operator moves, DRAM and caches together
BYTE_J = 40e-12


def slowdown(device: Device, flops: Mapping[str, float], moved: float, seconds: float) -> float:
    """By how much a mix of operators (FLOPs by precision, bytes, seconds at the boost clock) slows what the clock bounds."""
    energy = FLOP_J.get(device.architecture)
    if energy is None or device.tdp_w is None or seconds <= 0:
        return 1.0
    most = max(energy.values())
    drawn = sum(count * energy.get(dtype, most) for dtype, count in flops.items()) + moved * BYTE_J
    return float(max(1.0, drawn / seconds / (device.tdp_w * (1 - IDLE_SHARE))) ** (1 / EXPONENT))
