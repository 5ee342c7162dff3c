"""Energy: what a device draws while it trains, from joules per operation and byte where these are known.

    watts = idle + FLOP/s * joules per FLOP + B/s * joules per byte        at most the limit of the board

Joules per FLOP are those that explain the clocks of published steps (`cost/power.py`). Where an architecture
has none, a device is taken to draw its limit while it computes. Hosts, network and cooling come on top, as
factors with a range.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.cost.power import BYTE_J, IDLE_SHARE, relative, rule
from paceline.spec.device import Device

#: a node's power over that of its devices, usual, least and most: DGX A100 and H100 are rated at 2.0 and 1.8
#: when all is at its limit
NODE_FACTOR = (1.5, 1.2, 2.0)
#: power usage effectiveness of data centres, usual, least and most (Uptime Institute surveys; hyperscalers
#: report 1.1)
PUE = (1.3, 1.1, 1.6)
#: share of memory bandwidth that operators draw on while they run, where it is not counted
TYPICAL_TRAFFIC = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerDraw:
    """Watts of one device on average, with a range; and how it is known."""

    watts: float
    low: float
    high: float
    kind: str
    source: str


def power(
    device: Device, flops_per_s: float, busy: float, precision: str, moved_per_s: float | None = None
) -> PowerDraw | None:
    """Average power of a device that computes `flops_per_s` and is busy for a share of the time; None where
    its limit is unknown.
    """
    if device.tdp_w is None:
        return None
    idle = IDLE_SHARE * device.tdp_w
    known, dtype = rule(device), precision.removeprefix("amp_")
    if known is None or known.flop_J is None or dtype not in relative(device):
        watts = idle + (device.tdp_w - idle) * busy
        return PowerDraw(
            watts=watts,
            low=0.7 * watts,
            high=device.tdp_w,
            kind="guessed",
            source="the board's limit while it computes",
        )
    moved = moved_per_s if moved_per_s is not None else TYPICAL_TRAFFIC * busy * device.memory_bandwidth_Bps
    watts = min(device.tdp_w, idle + flops_per_s * known.flop_J * relative(device)[dtype] + moved * BYTE_J)
    return PowerDraw(
        watts=watts,
        low=0.8 * watts,
        high=min(device.tdp_w, 1.3 * watts),
        kind=known.kind,
        source=known.source,
    )
