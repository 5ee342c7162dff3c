"""What strategies need to know of the machine they run on: the link between ranks and the device's arithmetic, measured in a moment."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from paceline.train.comm import Collective, Engine, Job
from paceline.train.compress import native
from paceline.train.strategies.base import agree

#: of a reduction that goes round a ring with any number of ranks, by which its latency is found
_RING_BYTES = 128 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What carries and computes.

    Seconds before the first byte; bytes per second that a rank sends, in exchanges and in reductions (which add on the way), of float32 and
    of half precision (None: as of float32), and in reductions of a whole bucket by one call, as DDP has them (None: not measured, as of pieces
    several of which are in flight); float32 operations per second of a matrix product. A reduction that is not small goes round the ring twice, one
    rank after another: seconds of its own (None: not measured, as of so many exchanges).
    """

    latency_s: float
    link_Bps: float
    flops: float
    reduce_Bps: float
    half_Bps: float | None = None
    whole_Bps: float | None = None
    reduce_latency_s: float | None = None

    def behind(self, link_Bps: float) -> Machine:  # noqa: N803
        """The same machine on a link of that rate, where it is slower than what was measured."""
        half, whole = (self.reduce_Bps if rate is None else rate for rate in (self.half_Bps, self.whole_Bps))
        return replace(self, link_Bps=min(self.link_Bps, link_Bps), reduce_Bps=min(self.reduce_Bps, link_Bps), half_Bps=min(half, link_Bps),
                       whole_Bps=min(whole, link_Bps))


def probe(engine: Engine, device: torch.device, link_Bps: float | None = None, *, whole: bool = False) -> Machine:  # noqa: N803
    """Measures, with everyone taking part; what rank 0 found. A link whose rate is given is not measured. `whole`: also of whole buckets."""
    if engine.world == 1 or link_Bps is not None:
        rate = math.inf if link_Bps is None else link_Bps
        return agree(Machine(latency_s=0.0, link_Bps=rate, flops=_flops(device), reduce_Bps=rate))
    latency, reduction = (min([_timed(engine, op, size, device) for _ in range(6)][1:]) for op, size in (("exchange", 256), ("sum", _RING_BYTES)))
    share = (engine.world - 1) / engine.world
    rates = {op: 2 * share * _rate(engine, op, latency, device) for op in ("sum", "half", *(("whole",) if whole else ()))}
    return agree(Machine(latency_s=latency, reduce_latency_s=max(latency, reduction - 2 * share * _RING_BYTES / rates["sum"]),
                         link_Bps=share * _rate(engine, "exchange", latency, device), flops=_flops(device), reduce_Bps=rates["sum"],
                         half_Bps=rates["half"], whole_Bps=rates.get("whole")))


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
    parts = 1 if op == "whole" else max(1, size >> 20)
    dtype = torch.float16 if op == "half" else torch.float32
    tensors = [torch.zeros(world, max(1, size // dtype.itemsize // parts // world), device=device, dtype=dtype) for _ in range(parts)]
    outs = [torch.zeros_like(tensor) for tensor in tensors]

    def job() -> Job:
        yield [Collective("sum", [sent]) if op in ("sum", "half") else Collective("exchange", [sent], [out], own=False)
               for sent, out in zip(tensors, outs, strict=True)]

    start = time.perf_counter()
    if op == "whole":
        dist.all_reduce(tensors[0])
    else:
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


def cores(device: torch.device) -> tuple[int, int]:
    """Cores that a rank has to itself, as far as is known, and how many of them an encoder takes; on a GPU, passes and communication share none."""
    return (2, 1) if device.type == "cuda" else (native.cores(), native.threads())
