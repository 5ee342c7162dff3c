"""How far off an answer may be: a 90 % interval from the errors that the fits were seen to make.

Groups of operators err independently of one another; within a group the error is common. On top
come the error of a device nobody measured, and the host's, which varies from run to run:

    sigma^2 = sum over groups of (share * group)^2 + device^2 + base^2          device time
    sigma^2 = (device share * sigma)^2 + (host share * host)^2                  step time

Constants are standard deviations of the logarithm, set by cross-validation (`paceline validate`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

#: half-width of a 90 % interval in standard deviations
Z90 = 1.645


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Standard deviations of the logarithm of time."""

    group: float = 0.095
    base: float = 0.033
    device: float = 0.0
    host: float = 0.19


def device_sigma(shares: Mapping[str, float], errors: Errors) -> float:
    """Of device time, given each group's share of it."""
    common = sum((share * errors.group) ** 2 for share in shares.values())
    return math.sqrt(common + errors.base**2 + errors.device**2)


def around(value: float, sigma: float) -> tuple[float, float]:
    """The 90 % interval of a value whose logarithm has this standard deviation."""
    return value * math.exp(-Z90 * sigma), value * math.exp(Z90 * sigma)
