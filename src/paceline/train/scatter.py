"""Compressed gradients under FSDP2: its reduce-scatter replaced by an all-to-all of encoded parts, each
decoded and averaged where it belongs.

Each rank sends every other the encoding of that rank's part: (P-1) wire_bytes(N / P) instead of (P-1)/P N 4.
Schemes whose messages are gathered qualify: a sum of codes is not the code of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from paceline.errors import PlanError
from paceline.spec import compression as spec
from paceline.train.compress import make


class CompressedReduceScatter:
    """What `FSDPModule.set_custom_reduce_scatter` takes; one per sharded module, with the state of its
    parts.
    """

    def __init__(self, scheme: spec.Scheme, rank: int, world: int) -> None:
        self.compressor = make(scheme, rank=rank, world=world)
        self.rank, self.world = rank, world

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Memory for what FSDP2 puts in."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """The mean (or sum) over ranks of this rank's part of `input_tensor`."""
        compressor = self.compressor
        compressor.begin_step()
        parts = input_tensor.float().view(self.world, -1)
        payloads = [compressor.encode(str(r), part) for r, part in enumerate(parts)]
        rows = torch.stack(
            [
                torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in _wide_first(payload)])
                for payload in payloads
            ]
        )
        came = torch.empty_like(rows)
        dist.all_to_all_single(came.view(-1), rows.view(-1), group=group)
        out = torch.empty_like(parts[0])
        compressor.decode(str(self.rank), [_apart(row.clone(), payloads[self.rank]) for row in came], out)
        compressor.end_step()
        if op == dist.ReduceOp.SUM:
            out *= self.world
        output_tensor.copy_(out)


def _wide_first(payload: Sequence[Tensor]) -> list[Tensor]:
    """Long elements first, so that each tensor begins at a multiple of its own."""
    return sorted(payload, key=lambda t: -t.element_size())


def _apart(row: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    found, at = {}, 0
    for tensor in _wide_first(like):
        count = tensor.numel() * tensor.element_size()
        found[id(tensor)] = row[at : at + count].view(tensor.dtype).view(tensor.shape)
        at += count
    return [found[id(tensor)] for tensor in like]


def check(scheme: spec.Scheme) -> None:
    """Raises where gradients of sharded parameters cannot be sent in that scheme."""
    if scheme.collective != "all_gather" or isinstance(scheme, spec.DGC):
        allowed = ", ".join(
            name
            for name, kind in spec.SCHEMES.items()
            if kind.collective == "all_gather" and kind is not spec.DGC
        )
        raise PlanError(
            f"{scheme.name} does not go with sharded parameters; allowed: {allowed} (FSDP2 itself reduces in"
            " bf16)"
        )


def compress(model: nn.Module, scheme: spec.Scheme) -> None:
    """Has every sharded module of an FSDP2 model send its gradients in that scheme."""
    check(scheme)
    if isinstance(scheme, spec.TernGrad):
        # each part has a scaler of its own: there is no time to agree on one
        scheme = replace(scheme, share=False)
    rank, world = dist.get_rank(), dist.get_world_size()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(CompressedReduceScatter(scheme, rank, world))  # type: ignore[arg-type]
