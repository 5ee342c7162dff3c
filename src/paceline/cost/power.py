"""Sustained clocks: matrix units at full rate draw more than a board may for longer than some milliseconds.

Short benchmarks do not see it; training does, on one device and on many. Power beyond what the board leaves
lowers the clock, and with it the voltage, so that power falls faster than the rate:

    products     take t seconds and E joules at the boost clock, everything else u seconds and M joules
    slowdown s   (E / s + w M) / (t s + w u) = limit - idle    of products, at least 1
    weight w     window / (window + seconds of a product)

The board is steered by its average over a window: norms between short products leave these more, long
products fill the window alone. A product slowed by s takes s times as long and, with the voltage, 1/s of the
energy.

Joules per FLOP are fitted to published training steps (`python -m paceline.bench.fit.power`), one number per
architecture: steps in bf16 and fp8, and on boards with different limits (H100 at 500 and 700 W), agree on it.
An architecture without such steps takes the number of one made in a similar process; where not even the limit
of the board is known, nothing is slowed. Both widen the interval (`sigma`), and the provenance of an answer
says so (`rule`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.catalog import architectures
from paceline.spec.device import Device
from paceline.spec.vocabulary import DeviceKind

#: share of the limit that leakage, fans, links and idle memory take
IDLE_SHARE = 0.15
#: joules of a FLOP over those of a 16-bit one, by precision, where an architecture has no others
RELATIVE = {"fp8": 0.5, "fp4": 0.25, "fp16": 1.0, "bf16": 1.0, "tf32": 2.0}
#: joules per byte that an operator moves, DRAM and caches together
BYTE_J = 40e-12
#: seconds over which a board averages what it draws: fitted once to eager steps on an H200, whose products
#: take 0.02 to
#: 0.4 ms, beside published steps of large models, whose products take milliseconds
WINDOW_S = 1.5e-4
#: standard deviation of the logarithm of joules per FLOP taken from a similar process; the fitted ones differ
#: by 1.25
SIMILAR_SIGMA = 0.3
#: of the logarithm of the slowdown where no rule applies: boards whose limit is known are slowed by 1 to 1.6
#: in products
UNKNOWN_SIGMA = 0.2


@dataclass(frozen=True, slots=True)
class PowerLimit:
    """Joules per FLOP of 16-bit products of a device (None: no limit is applied), how that is known, and how
    far off a limited product's time may be: the standard deviation of its logarithm."""

    flop_J: float | None
    kind: str
    source: str
    sigma: float


def rule(device: Device) -> PowerLimit | None:
    """How the power limit of a device acts on its matrix units; None where it has none of them."""
    architecture = architectures.get(device.architecture)
    if device.kind is DeviceKind.CPU or not architecture.matrix_units:
        return None
    if device.tdp_w is None:
        return PowerLimit(
            None, "guessed", "no source for the board's limit: products are not slowed", UNKNOWN_SIGMA
        )
    if (joules := architecture.product_J) is not None:
        source = f"{joules * 1e12:.2g} pJ per 16-bit FLOP, from published steps of {architecture.name}"
        return PowerLimit(joules, "fitted", source, 0.0)
    if (joules := architectures.get(architecture.similar).product_J) is not None:
        source = f"{joules * 1e12:.2g} pJ per 16-bit FLOP: {architecture.similar_source}"
        return PowerLimit(joules, "guessed", source, SIMILAR_SIGMA / 2)
    return PowerLimit(
        None,
        "guessed",
        f"no joules per FLOP known of {device.architecture}: products are not slowed",
        UNKNOWN_SIGMA,
    )


def relative(device: Device) -> Mapping[str, float]:
    """Joules of a FLOP over those of a 16-bit one, by precision of the matrix units; vector products have a
    limit of their own (`cost/chip.py`)."""
    return {**RELATIVE, **architectures.get(device.architecture).relative}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductMix:
    """The mean product of a step at the boost clock: FLOPs (each at its joules over those of a 16-bit one),
    bytes moved and seconds; and the bytes and seconds of everything else, per product."""

    flops: float
    moved: float
    seconds: float
    other_moved: float = 0.0
    other_s: float = 0.0


def slowdown(device: Device, mix: ProductMix) -> float:
    """By how much the board's limit slows the products of a step."""
    found = rule(device)
    if found is None or found.flop_J is None or device.tdp_w is None:
        return 1.0
    product = mix.flops * found.flop_J + mix.moved * BYTE_J
    limit = device.tdp_w * (1 - IDLE_SHARE)
    # joules that everything else in the window leaves over, or takes beyond its time
    spare = WINDOW_S / (WINDOW_S + mix.seconds) * (limit * mix.other_s - mix.other_moved * BYTE_J)
    root = math.sqrt(spare**2 + 4 * limit * mix.seconds * product)
    return max(1.0, (root - spare) / (2 * limit * mix.seconds))
