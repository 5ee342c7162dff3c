"""Gradients as they are, or in half the bits: what an all-reduce can sum by itself."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from paceline.spec.compression import Scheme

from .base import Arrived, Compressor, flat, writing

#: elements that stay in a cache between two operators
PIECE = 1 << 16


class Cast(Compressor):
    """float32, float16 or bfloat16 all-reduce.

    Half-precision parts are divided by the number of ranks before they are summed, so that a sum overflows no
    sooner than a part.
    """

    _DTYPES: ClassVar[dict[str, torch.dtype]] = {
        "fp32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
    }

    def __init__(
        self, scheme: Scheme, *, rank: int = 0, world: int = 1, seed: int = 0, fused: bool = True
    ) -> None:
        super().__init__(scheme, rank=rank, world=world, seed=seed, fused=fused)
        self._buffers: dict[str, Tensor] = {}

    def encode(self, key: str, grad: Tensor, shared: Tensor | None = None) -> list[Tensor]:
        source = flat(grad)
        payload = self._buffer(key, source)
        if self.name == "fp32" or self.world == 1:
            return [payload.copy_(source)]
        if source.device.type != "cpu":
            return [torch.mul(source, 1.0 / self.world, out=payload)]
        # piece by piece through the cache: an operator that scales and rounds at once goes through memory
        # twice
        scaled = torch.empty(min(PIECE, source.numel()), dtype=torch.float32)
        for part, target in zip(source.split(PIECE), payload.split(PIECE), strict=True):
            target.copy_(torch.mul(part, 1.0 / self.world, out=scaled[: part.numel()]))
        return [payload]

    def _buffer(self, key: str, like: Tensor) -> Tensor:
        """Memory for the payload, used again in the next step: fresh pages would cost more than the copy."""
        found = self._buffers.get(key)
        if found is None or found.numel() != like.numel() or found.device != like.device:
            found = self._buffers[key] = torch.empty(
                like.numel(), dtype=self._DTYPES[self.name], device=like.device
            )
        return found

    def decode(self, key: str, gathered: Arrived, out: Tensor) -> None:
        with writing(out) as target:
            if self.name == "fp32":
                torch.mul(gathered[0][0], 1.0 / self.world, out=target)
            else:
                target.copy_(gathered[0][0])
