"""The machine's clocks. Seconds that pass are counted by the monotonic one: the wall clock may be set."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Clocks:
    """What time it is; tests give clocks of their own."""

    def monotonic_s(self) -> float:
        """Seconds since the machine was started, about; nobody sets it."""
        return time.monotonic()

    def wall_s(self) -> float:
        """Unix time."""
        return time.time()

    def boot(self) -> str:
        """Which start of which machine `monotonic_s` counts from; empty where that is not known."""
        try:
            return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        except OSError:
            return ""


class ClockOrigin:
    """A moment from which seconds are counted, by this process and by those that come after it."""

    __slots__ = ("_began_s", "_clocks", "_passed_s")

    def __init__(self, clocks: Clocks, moment: Mapping[str, Any], least_s: float = 0.0) -> None:
        """`moment` as `Origin.now` wrote it; at least `least_s` have passed since then.

        Until the machine is started anew the monotonic clock says how many; after that the wall clock does.
        """
        self._clocks, self._began_s = clocks, clocks.monotonic_s()
        passed_s = -1.0
        if moment.get("boot") and moment["boot"] == clocks.boot():
            passed_s = self._began_s - moment["origin_monotonic_s"]
        if passed_s < 0:
            passed_s = clocks.wall_s() - moment["origin_s"]
        self._passed_s = max(least_s, passed_s)

    @staticmethod
    def now(clocks: Clocks) -> dict[str, Any]:
        """This moment, as plain values."""
        return {
            "origin_s": clocks.wall_s(),
            "origin_monotonic_s": clocks.monotonic_s(),
            "boot": clocks.boot(),
        }

    def passed_s(self) -> float:
        """Seconds since the moment."""
        return self._passed_s + self._clocks.monotonic_s() - self._began_s
