"""How fast a job advances on given devices."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

from paceline.errors import SpecError


@lru_cache(maxsize=65536)
def packed(devices: int, node_devices: int) -> tuple[int, ...]:
    """Devices per node when as few nodes as possible are used.

    >>> packed(10, 4)
    (4, 4, 2)
    """
    full, rest = divmod(devices, node_devices)
    return (node_devices,) * full + ((rest,) if rest else ())


@runtime_checkable
class Speed(Protocol):
    """Work per second, by where a job runs.

    Work is split in phases (epochs); inside one the speed at a place is constant.
    """

    def ends(self, work: float) -> tuple[float, ...]:
        """Work done at the end of each phase of a job of that much work; the last is all of it."""

    def rate(self, counts: tuple[int, ...], kind: str, phase: int, adaptive: bool) -> float:
        """Work per second on `counts` devices per node of that kind; 0 where it cannot run. `adaptive`: at
        the batch of the best goodput.
        """

    def seconds(self, left: float, phase: int, devices: int, node_devices: int, adaptive: bool) -> float:
        """Seconds for the rest of the work on so many devices packed onto nodes of `node_devices`."""


class OnePhaseSpeed(ABC):
    """One phase; the rest of the work takes what it takes at the present rate."""

    __slots__ = ()

    def ends(self, work: float) -> tuple[float, ...]:
        return (work,)

    @abstractmethod
    def rate(self, counts: tuple[int, ...], kind: str, phase: int, adaptive: bool) -> float:
        """As `Speed.rate`."""

    def seconds(self, left: float, phase: int, devices: int, node_devices: int, adaptive: bool) -> float:
        rate = self.rate(packed(devices, node_devices), "", phase, adaptive)
        return left / rate if rate > 0 else math.inf


@dataclass(frozen=True, slots=True)
class ScaledSpeed(OnePhaseSpeed):
    """`per_s` of the work each second at the size asked for (1: work is seconds); other sizes scale as
    n / (1 + overhead (n - 1)).

    `overhead` is the share of a step that each further device adds in communication (0: linear speedup). Each
    node beyond those needed costs `spread` of the speed. `kinds` scales by device (1 where a kind is not
    named).
    """

    devices: int = 1
    overhead: float = 0.0
    spread: float = 0.0
    kinds: tuple[tuple[str, float], ...] = ()
    per_s: float = 1.0

    def __post_init__(self) -> None:
        if not (self.devices >= 1 and 0 <= self.overhead < math.inf):
            raise SpecError(
                "the overhead of a further device must be a number that is zero or more, "
                "of at least one device, "
                f"got {self.overhead!r} of {self.devices!r}"
            )

    def rate(self, counts: tuple[int, ...], kind: str, phase: int, adaptive: bool) -> float:
        devices = sum(counts)
        rate = self.per_s * self.speedup(devices) / self.speedup(self.devices)
        if self.spread and len(counts) > 1:
            rate /= 1 + self.spread * (len(counts) - len(packed(devices, max(counts))))
        if self.kinds:
            rate *= dict(self.kinds).get(kind, 1.0)
        return rate

    def speedup(self, devices: int) -> float:
        """Over one device."""
        return devices / (1 + self.overhead * (devices - 1))


@dataclass(frozen=True, slots=True)
class RateTable(OnePhaseSpeed):
    """Measured work per second by kind and number of devices; between sizes a straight line, beyond the
    largest no more speed.
    """

    rates: Mapping[str, Mapping[int, float]]

    def rate(self, counts: tuple[int, ...], kind: str, phase: int, adaptive: bool) -> float:
        table = self.rates.get(kind) or (next(iter(self.rates.values())) if not kind else None)
        if not table:
            return 0.0
        devices = sum(counts)
        if devices in table:
            return table[devices]
        below = [n for n in table if n < devices]
        above = [n for n in table if n > devices]
        if not below:
            return 0.0
        low = max(below)
        if not above:
            return table[low]
        high = min(above)
        return table[low] + (table[high] - table[low]) * (devices - low) / (high - low)


def checked(rate: float, name: str) -> float:
    """A rate that can be simulated, or one line that says why not."""
    if not rate >= 0 or math.isinf(rate):
        raise SpecError(f"job {name!r}: its speed must be a finite number that is not negative, got {rate!r}")
    return rate
