"""Exchanges between compressors of one process: every rank's part, without a network."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from .base import Arrived, Compressor, Round


def lockstep(compressors: Sequence[Compressor], key: str, grads: Sequence[Tensor]) -> list[Tensor]:
    """What each rank decodes, given each rank's compressor and gradient."""
    outs = [torch.empty_like(grad) for grad in grads]
    running = [c.exchange(key, grad, out) for c, grad, out in zip(compressors, grads, outs, strict=True)]
    asked: list[Round | None] = [next(one) for one in running]
    while requests := [request for request in asked if request is not None]:
        arrived = carry_out(requests)
        asked = [_advance(one, arrived) for one in running]
    return outs


def carry_out(requests: Sequence[Round]) -> Arrived:
    """What a collective brings to each rank, given what all of them ask for."""
    columns = list(zip(*(request.payload for request in requests), strict=True))
    if requests[0].op == "gather":
        return [request.payload for request in requests]
    if requests[0].op == "max":
        return [[torch.stack(column).amax(dim=0) for column in columns]]
    return [[torch.stack(column).sum(dim=0) for column in columns]]


def _advance(running: Generator[Round, Arrived, None], arrived: Arrived) -> Round | None:
    try:
        return running.send(arrived)
    except StopIteration:
        return None
