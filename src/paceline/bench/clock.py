"""A stopwatch for calls on a CPU or a GPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

#: seconds that one sample of a short operator lasts, so that the stopwatch's own cost does not show
SAMPLE_S = 2e-4
#: seconds that issuing one call takes a slow host, about
ISSUE_S = 2e-4
MOST_SAMPLES = 200

Run = Callable[[], Any]


class Clock:
    """Times calls on one device."""

    def __init__(self, target: torch.device) -> None:
        self.target = target
        self.filler_s = 0.0  # none is needed yet
        if target.type == "cuda":
            self.filler = torch.zeros(4096, 4096, device=target)
            self.filler_s = min(self._events(lambda: self.filler @ self.filler, 1) for _ in range(3))

    def seconds(self, run: Run, budget: float) -> float:
        """The median time of a call, over about `budget`; of three calls at least, after one that is not
        counted.
        """
        end = time.perf_counter() + budget
        run()
        samples = [self._sample(run, 1)]
        calls = max(1, min(100, round(SAMPLE_S / max(samples[0], 1e-9))))
        while len(samples) < 3 or (len(samples) < MOST_SAMPLES and time.perf_counter() < end):
            samples.append(self._sample(run, calls) / calls)
        return median(samples)

    def _sample(self, run: Run, calls: int) -> float:
        if self.target.type == "cuda":
            return self._events(run, calls)
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return time.perf_counter() - start

    def _events(self, run: Run, calls: int) -> float:
        """Device seconds.

        Products ahead of the calls keep the device busy for as long as the host takes to issue them.
        """
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(math.ceil(calls * ISSUE_S / self.filler_s) if self.filler_s else 0):
            torch.mm(self.filler, self.filler)
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
