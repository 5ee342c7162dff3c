"""Sustained clocks: matrix units at full rate draw more than a board may for longer than some milliseconds.

Short benchmarks do not see it; training does. Power beyond what the board leaves lowers the clock, and with it
the voltage, so that power falls faster than the rate:

    draw     = (FLOPs * joules per FLOP + bytes * joules per byte) / seconds            at the boost clock
    slowdown = (draw / (limit - idle))^(1/exponent)                                     of what the clock bounds

Joules per FLOP are fitted to published training steps (`python -m paceline.bench.fit.power`), one number per
architecture: steps in bf16 and fp8, and on boards with different limits (H100 at 500 and 700 W), agree on it.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.spec.device import Device

#: power over frequency where voltage follows it
EXPONENT = 2.0
#: share of the limit that leakage, fans, links and idle memory take
IDLE_SHARE = 0.15
#: joules per FLOP of 16-bit products at the boost clock, by architecture, and what other precisions take of it; Blackwell's steps
#: in fp8 show less than half
FLOP_J = {"volta": 1.2e-12, "ampere": 1.5e-12, "hopper": 1.2e-12, "blackwell": 1.3e-12}
RELATIVE = {"fp8": 0.5, "fp4": 0.25, "fp16": 1.0, "bf16": 1.0, "tf32": 2.0}
RELATIVE_OF = {"blackwell": {**RELATIVE, "fp8": 0.36, "fp4": 0.18}}
#: joules per byte that an operator moves, DRAM and caches together
BYTE_J = 40e-12


def slowdown(device: Device, flops: Mapping[str, float], moved: float, seconds: float) -> float:
    """By how much a mix of operators (FLOPs by precision, bytes, seconds at the boost clock) slows what the clock bounds."""
    energy = FLOP_J.get(device.architecture)
    if energy is None or device.tdp_w is None or seconds <= 0:
        return 1.0
    # vector products in fp32 have a limit of their own (`cost/chip.py`)
    relative = RELATIVE_OF.get(device.architecture, RELATIVE)
    drawn = sum(count * energy * relative.get(dtype, 0.0) for dtype, count in flops.items()) + moved * BYTE_J
    return float(max(1.0, drawn / seconds / (device.tdp_w * (1 - IDLE_SHARE))) ** (1 / EXPONENT))
