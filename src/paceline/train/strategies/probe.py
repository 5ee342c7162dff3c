"""What strategies need to know of the machine they run on: the link between ranks and the device's
arithmetic, measured in a moment.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

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

    Seconds before the first byte; bytes per second that a rank sends, in exchanges and in reductions (which
    add on the way), of float32 and of half precision (None: as of float32), and in reductions of a whole
    bucket by one call, as DDP has them (None: not measured, as of pieces several of which are in flight);
    float32 operations per second of a matrix product. A reduction that is not small goes round the ring
    twice, one rank after another: seconds of its own (None: not measured, as of so many exchanges). After a
    pause a link may let a burst of bytes through at once. Whatever carries them, messages take processor time
    of a rank: seconds of each, and of a byte sent, by what is done with it.
    """

    latency_s: float
    link_Bps: float
    flops: float
    reduce_Bps: float
    half_Bps: float | None = None
    whole_Bps: float | None = None
    reduce_latency_s: float | None = None
    burst_bytes: float = 0.0
    message_s: float = 0.0
    byte_s: Mapping[str, float] = field(default_factory=dict)

    def behind(self, link_Bps: float, burst_bytes: float = 0.0) -> Machine:
        """The same machine on a link of that rate and burst, where it is slower than what was measured."""
        half, whole = (self.reduce_Bps if rate is None else rate for rate in (self.half_Bps, self.whole_Bps))
        return replace(
            self,
            link_Bps=min(self.link_Bps, link_Bps),
            reduce_Bps=min(self.reduce_Bps, link_Bps),
            half_Bps=min(half, link_Bps),
            whole_Bps=min(whole, link_Bps),
            burst_bytes=burst_bytes,
        )


def probe(
    engine: Engine, device: torch.device, link_Bps: float | None = None, *, whole: bool = False
) -> Machine:
    """Measures, with everyone taking part; what rank 0 found. A link whose rate is given is not measured.
    `whole`: also of whole buckets.
    """
    if engine.world == 1 or link_Bps is not None:
        rate = math.inf if link_Bps is None else link_Bps
        return agree(Machine(latency_s=0.0, link_Bps=rate, flops=_flops(device), reduce_Bps=rate))
    pause, reduction = (
        _least([_timed(engine, op, size, device) for _ in range(6)][1:])
        for op, size in (("exchange", 256), ("sum", _RING_BYTES))
    )
    latency, share = pause.wall_s, (engine.world - 1) / engine.world
    #: bytes that a rank sends for one of a tensor
    sent = {"exchange": share, "sum": 2 * share, "half": 2 * share, **({"whole": 2 * share} if whole else {})}
    each = {op: _per_byte(engine, op, latency, device) for op in sent}
    rates = {op: sent[op] / each[op].wall_s for op in sent}
    return agree(
        Machine(
            latency_s=latency,
            reduce_latency_s=max(latency, reduction.wall_s - 2 * share * _RING_BYTES / rates["sum"]),
            link_Bps=rates["exchange"],
            flops=_flops(device),
            reduce_Bps=rates["sum"],
            half_Bps=rates["half"],
            whole_Bps=rates.get("whole"),
            message_s=pause.processor_s,
            byte_s={op: each[op].processor_s / sent[op] for op in sent},
        )
    )


@dataclass(frozen=True, slots=True)
class _Took:
    """Seconds that something took, and seconds of processor time of this rank, all threads together."""

    wall_s: float
    processor_s: float


def _least(found: Sequence[_Took]) -> _Took:
    return _Took(min(one.wall_s for one in found), min(one.processor_s for one in found))


def _per_byte(engine: Engine, op: str, latency: float, device: torch.device) -> _Took:
    """Of one byte of a tensor: what four times as much takes longer, so that neither latency nor what a link
    lets through at once counts.
    """
    size = 64 * 1024
    while True:
        seconds = _timed(engine, op, size, device).wall_s
        if agree(seconds > max(20 * latency, 0.02) or size >= 4 << 20):
            break
        size *= 4
    turns = range(agree(3 if seconds < 0.1 else 1))
    longer, shorter = (
        _least([_timed(engine, op, count, device) for _ in turns]) for count in (4 * size, size)
    )
    return _Took(
        max(longer.wall_s - shorter.wall_s, 1e-9) / (3 * size),
        max(longer.processor_s - shorter.processor_s, 0.0) / (3 * size),
    )


def _timed(engine: Engine, op: str, size: int, device: torch.device) -> _Took:
    """What `size` bytes take to and from everyone, in messages of up to a megabyte, as strategies send them,
    in memory that is in use.
    """
    world = engine.world
    parts = 1 if op == "whole" else max(1, size >> 20)
    dtype = torch.float16 if op == "half" else torch.float32
    tensors = [
        torch.zeros(world, max(1, size // dtype.itemsize // parts // world), device=device, dtype=dtype)
        for _ in range(parts)
    ]
    outs = [torch.zeros_like(tensor) for tensor in tensors]

    def job() -> Job:
        yield [
            Collective("sum", [sent])
            if op in ("sum", "half")
            else Collective("exchange", [sent], [out], own=False)
            for sent, out in zip(tensors, outs, strict=True)
        ]

    start, worked = time.perf_counter(), time.process_time()
    if op == "whole":
        dist.all_reduce(tensors[0])
    else:
        engine.submit("probe", job()).wait()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return _Took(time.perf_counter() - start, time.process_time() - worked)


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
    """Cores that a rank has to itself, as far as is known, and how many of them an encoder takes; on a GPU,
    passes and communication share none.
    """
    return (2, 1) if device.type == "cuda" else (native.cores(), native.threads())
