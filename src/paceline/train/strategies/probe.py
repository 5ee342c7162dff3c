"""What strategies need to know of the machine they run on: the link between ranks and the device's arithmetic, measured in a moment."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from paceline.train.comm import Collective, Engine, Job
from paceline.train.strategies.base import agree


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Seconds before the first byte, bytes per second that a rank sends, and float32 operations per second of a matrix product."""

    latency_s: float
    link_Bps: float
    flops: float


def probe(engine: Engine, device: torch.device) -> Machine:
    """Measures, with everyone taking part; what rank 0 found."""
    if engine.world == 1:
        return Machine(latency_s=0.0, link_Bps=math.inf, flops=_flops(device))
    engine.submit("probe", _exchange(engine.world, 256, device)).wait()
    latency = min(_timed(engine, 256, device) for _ in range(5))
    size = 64 * 1024
    while True:  # until a message takes long against the latency
        seconds = _timed(engine, size, device)
        if agree(seconds > max(20 * latency, 0.02) or size >= 16 << 20):
            break
        size *= 4
    seconds = agree(max(min(seconds, _timed(engine, size, device)) - latency, 1e-9))
    sent = size * (engine.world - 1) / engine.world
    return agree(Machine(latency_s=latency, link_Bps=sent / seconds, flops=_flops(device)))


def _timed(engine: Engine, size: int, device: torch.device) -> float:
    start = time.perf_counter()
    engine.submit("probe", _exchange(engine.world, size, device)).wait()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _exchange(world: int, size: int, device: torch.device) -> Job:
    """`size` bytes to and from everyone, in four messages: one alone would use one direction at a time."""
    count = max(world, size // 16 // world * world)
    yield [Collective("exchange", [torch.zeros(count, device=device).view(world, -1)]) for _ in range(4)]


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
