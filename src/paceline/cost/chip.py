"""The few numbers of a device that cost formulas use, with stated fallbacks for those no source gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.catalog import architectures
from paceline.spec.device import Device

#: fp32 lanes of the multiprocessor that the curves count cycles of: turns a peak into a count where a file
#: for a new chip gives none, and other cores (a TPU's vector unit has thousands of lanes) into so many
#: multiprocessors
LANES = 128
DEFAULT_CLOCK_HZ = 1.5e9
#: cache of a GPU for which no size is known
DEFAULT_L2_BYTES = 8e6


@dataclass(frozen=True, slots=True)
class Chip:
    """A device as the formulas see it. FLOP/s, bytes/s, bytes, Hz."""

    peaks: Mapping[str, float]
    bandwidth: float
    l2: float
    sms: float
    clock: float
    assumed: tuple[str, ...] = ()
    #: per cycle, over those of the first chips of its architecture
    exponentials: float = 1.0

    @property
    def sm_hz(self) -> float:
        """Multiprocessor cycles per second of the whole chip."""
        return self.sms * self.clock


def chip(device: Device) -> Chip:
    """The chip of a device; `assumed` names what had to be guessed."""
    assumed = []
    clock = device.clock_hz
    if clock is None:
        clock = DEFAULT_CLOCK_HZ
        assumed.append("chip.clock")
    sms = device.sm_count  # of LANES lanes each
    if sms is None:
        # as many multiprocessors as the vector peak needs at that clock
        sms = max(1, round(device.peak("fp32") / (2 * LANES * clock)))
        assumed.append("chip.sms")
    elif device.sm_lanes is not None:
        sms = max(1, round(sms * device.sm_lanes / LANES))
    l2 = device.l2_bytes
    if l2 is None:
        l2 = DEFAULT_L2_BYTES
        assumed.append("cache.l2")
    peaks = {dtype: device.peak(dtype) for dtype in ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4")}
    per_flop = architectures.get(device.architecture).vector_J
    if device.tdp_w is not None and per_flop is not None:  # a board given less power lowers its clock
        peaks["fp32"] = min(peaks["fp32"], device.tdp_w / per_flop)
    return Chip(
        peaks, device.memory_bandwidth_Bps, l2, float(sms), clock, tuple(assumed), device.exponentials
    )
