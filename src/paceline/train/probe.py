"""What strategies need to know of the machine they run on: the link between ranks and the device's
arithmetic, measured in a moment.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from paceline.spec.compression import Scheme, parse
from paceline.train.comm import Collective, Engine, Job, agree
from paceline.train.compress import Round, make, native

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
        return replace(
            self,
            link_Bps=min(self.link_Bps, link_Bps),
            reduce_Bps=min(self.reduce_Bps, link_Bps),
            half_Bps=min(self.rate("half"), link_Bps),
            whole_Bps=min(self.rate("whole"), link_Bps),
            burst_bytes=burst_bytes,
        )

    def rate(self, way: str) -> float:
        """Bytes per second, by what is done with them on their way; of float32 where not measured."""
        rate: float | None = getattr(self, _RATES[way])
        return self.reduce_Bps if rate is None else rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Seconds that encoding and decoding take by name of the scheme, per gradient element and per call; per
    element, of a copy (float32).
    """

    encode_s: Mapping[str, float] = field(default_factory=dict)
    decode_s: Mapping[str, float] = field(default_factory=dict)
    encode_call_s: Mapping[str, float] = field(default_factory=dict)
    decode_call_s: Mapping[str, float] = field(default_factory=dict)
    copy_s: float = 1e-9


def probe(
    engine: Engine, device: torch.device, link_Bps: float | None = None, *, whole: bool = False
) -> Machine:
    """Measures, with everyone taking part; what rank 0 found. A link whose rate is given is not measured.
    `whole`: also of whole buckets.
    """
    if engine.world == 1 or link_Bps is not None:
        rate = math.inf if link_Bps is None else link_Bps
        return agree(Machine(latency_s=0.0, link_Bps=rate, flops=_flops(device), reduce_Bps=rate))
    latency, message = _least(_timed(engine, "exchange", 256, device) for _ in range(6))
    share = (engine.world - 1) / engine.world
    #: bytes that a rank sends for one of a tensor
    sent = {"exchange": share, "sum": 2 * share, "half": 2 * share, **({"whole": 2 * share} if whole else {})}
    each = {op: (_per_byte(engine, op, latency, device) / sent[op]).tolist() for op in sent}
    ring, _ = _least(_timed(engine, "sum", _RING_BYTES, device) for _ in range(6))
    return agree(
        Machine(
            latency_s=latency,
            reduce_latency_s=max(latency, ring - sent["sum"] * _RING_BYTES * each["sum"][0]),
            flops=_flops(device),
            **{_RATES[op]: 1 / wall for op, (wall, _) in each.items()},
            message_s=message,
            byte_s={op: processor for op, (_, processor) in each.items()},
        )
    )


#: the rates of a machine that are measured, by what is done with the bytes
_RATES = {"exchange": "link_Bps", "sum": "reduce_Bps", "half": "half_Bps", "whole": "whole_Bps"}
#: seconds that something took, and seconds of processor time of this rank, all threads together
_Took = tuple[float, float]


def _least(found: Iterable[_Took]) -> list[float]:
    """Of a few, the first of which may pay for what is done once."""
    least: list[float] = np.min([*found][1:], axis=0).tolist()
    return least


def _per_byte(engine: Engine, op: str, latency: float, device: torch.device) -> NDArray[np.float64]:
    """Of one byte of a tensor: what four times as much takes longer, so that neither latency nor what a link
    lets through at once counts.
    """
    size = 64 * 1024
    while True:
        seconds, _ = _timed(engine, op, size, device)
        if agree(seconds > max(20 * latency, 0.02) or size >= 4 << 20):
            break
        size *= 4
    turns = range(agree(3 if seconds < 0.1 else 1))
    longer, shorter = (
        np.min([_timed(engine, op, count, device) for _ in turns], axis=0) for count in (4 * size, size)
    )
    each: NDArray[np.float64] = np.maximum(longer - shorter, (1e-9, 0.0)) / (3 * size)
    return each


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
    return _now(device) - start, time.process_time() - worked


def _flops(device: torch.device) -> float:
    n = 384 if device.type == "cpu" else 4096
    a = torch.ones(n, n, device=device)
    best = float("inf")
    for _ in range(4):
        start = _now(device)
        a @ a
        best = min(best, _now(device) - start)
    return 2.0 * n**3 / best


def cores(device: torch.device) -> tuple[int, int]:
    """Cores that a rank has to itself, as far as is known, and how many of them an encoder takes; on a GPU,
    passes and communication share none.
    """
    return (2, 1) if device.type == "cuda" else (native.cores(), native.threads())


# -- encoders --------------------------------------------------------------------------------------

#: elements on which encoders are timed
_LARGE, _SMALL = 1 << 22, 1 << 14
#: numbers that a step touches for every parameter (itself, its gradient, momentum, what a compressor keeps),
#: and at most: more than caches hold
_TOUCHED, _MOST_TOUCHED = 4, 1 << 26


def rates(schemes: Sequence[str], sizes: Sequence[int], world: int, device: torch.device) -> Rates:
    """Times encoders and decoders for gradients of these sizes, on a tensor like the largest and on a small
    one: seconds per element, and per call.

    Caches hold what a step leaves in them: between two calls for one gradient, all parameters and what
    belongs to them were touched.
    """
    large, small = (min(max(sizes), most) for most in (_LARGE, _SMALL))
    others = torch.empty(min(_TOUCHED * sum(sizes), _MOST_TOUCHED) if device.type == "cpu" else 0)

    found: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for scheme in map(parse, schemes):
        timed = {count: _coded(scheme, count, world, device, others) for count in (large, small)}
        for kind, longer, shorter in zip(("encode", "decode"), timed[large], timed[small], strict=True):
            each = max(1e-12, (longer - shorter) / max(1, large - small))
            found[f"{kind}_s"][scheme.name] = each
            found[f"{kind}_call_s"][scheme.name] = max(0.0, shorter - each * small)
    return Rates(**found, copy_s=max(1e-11, _copied(large, device, others) / large))


def _copied(count: int, device: torch.device, others: Tensor) -> float:
    """Seconds of a copy, the least of a few."""
    gradient, copy = torch.randn(2, count, device=device)
    seconds = []
    for _ in range(3):
        others.fill_(0.0)
        gradient.neg_()
        start = _now(device)
        copy.copy_(gradient)
        seconds.append(_now(device) - start)
    return min(seconds)


def _coded(scheme: Scheme, count: int, world: int, device: torch.device, others: Tensor) -> list[float]:
    """Seconds of encoding and of decoding what `world` ranks sent, the least of a few; `others` lie in the
    caches before, and a new gradient.
    """
    compressor = make(scheme, world=world)
    gradient = torch.randn(count, device=device)
    out, runs = torch.empty_like(gradient), []
    for _ in range(4):  # the first compiles and allocates
        others.fill_(0.0)
        gradient.neg_()
        *encode, decode = _stages(compressor.exchange("probe", gradient, out), world, device)
        runs.append((sum(encode), decode))
        compressor.end_step()
    return [min(seconds) for seconds in zip(*runs, strict=True)]


def _stages(exchange: Generator[Round, Any, None], world: int, device: torch.device) -> list[float]:
    """Seconds up to each message of an exchange, and behind the last."""
    seconds: list[float] = []
    arrived = None
    while True:
        start = _now(device)
        try:
            request = exchange.send(arrived)
        except StopIteration:
            return seconds
        finally:
            seconds.append(_now(device) - start)
        arrived = [request.payload] * (world if request.op == "gather" else 1)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
