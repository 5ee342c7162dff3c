"""What strategies need to know of the machine they run on: the link between ranks and the device's arithmetic, measured in a moment."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, replace

import torch

from paceline.train.comm import Collective, Engine, Job
from paceline.train.strategies.base import agree


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What carries and computes.

    Seconds before the first byte; bytes per second that a rank sends, in exchanges and in reductions (which add on the way), of float32 and
    of half precision (None: as of float32); float32 operations per second of a matrix product.
    """

    latency_s: float
    link_Bps: float
    flops: float
    reduce_Bps: float
    half_Bps: float | None = None

    def behind(self, link_Bps: float) -> Machine:  # noqa: N803
        """The same machine on a link of that rate, where it is slower than what was measured."""
        half = self.reduce_Bps if self.half_Bps is None else self.half_Bps
        return replace(self, link_Bps=min(self.link_Bps, link_Bps), reduce_Bps=min(self.reduce_Bps, link_Bps), half_Bps=min(half, link_Bps))


def probe(engine: Engine, device: torch.device) -> Machine:
    """Measures, with everyone taking part; what rank 0 found."""
    if engine.world == 1:
        return Machine(latency_s=0.0, link_Bps=math.inf, flops=_flops(device), reduce_Bps=math.inf)
    _timed(engine, "exchange", 256, device)
    latency = min(_timed(engine, "exchange", 256, device) for _ in range(5))
    share = (engine.world - 1) / engine.world
    return agree(Machine(latency_s=latency, link_Bps=_rate(engine, "exchange", latency, device) * share, flops=_flops(device),
                         reduce_Bps=_rate(engine, "sum", latency, device) * 2 * share, half_Bps=_rate(engine, "half", latency, device) * 2 * share))


def _rate(engine: Engine, op: str, latency: float, device: torch.device) -> float:
    """Bytes of a tensor per second: what four times as much takes longer, so that neither latency nor what a link lets through at once counts."""
    size = 64 * 1024
    while True:
        seconds = _timed(engine, op, size, device)
        if agree(seconds > max(20 * latency, 0.02) or size >= 4 << 20):
            break
        size *= 4
    turns = range(agree(3 if seconds < 0.1 else 1))
    longer, seconds = (min(_timed(engine, op, count, device) for _ in turns) for count in (4 * size, size))
    return 3 * size / max(longer - seconds, 1e-9)


def _timed(engine: Engine, op: str, size: int, device: torch.device) -> float:
    """Seconds for `size` bytes to and from everyone, in messages of up to a megabyte, as strategies send them, in memory that is in use."""
    world = engine.world
    parts = max(1, size >> 20)
    dtype = torch.float16 if op == "half" else torch.float32
    tensors = [torch.zeros(world, max(1, size // dtype.itemsize // parts // world), device=device, dtype=dtype) for _ in range(parts)]
    outs = [torch.zeros_like(tensor) for tensor in tensors]

    def job() -> Job:
        yield [Collective("sum", [sent]) if op in ("sum", "half") else Collective("exchange", [sent], [out], own=False)
               for sent, out in zip(tensors, outs, strict=True)]

    start = time.perf_counter()
    engine.submit("probe", job()).wait()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _flops(device: torch.device) -> float:
    n = 384 if device.type == "cpu" else 4096
    a = torch.ones(n, n, device=device)
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2.0 * n**3 / best


def cores(device: torch.device) -> int:
    """Cores that a rank has to itself, as far as is known; on a GPU, passes and communication do not share any."""
    if device.type == "cuda":
        return 2
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, own // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
