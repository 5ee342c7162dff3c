"""Gradients as they are, or in half the bits: what an all-reduce can sum by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Arrived, Compressor, flat, writing


class Cast(Compressor):
    """float32, float16 or bfloat16 all-reduce.

    Half-precision parts are divided by the number of ranks before they are summed, so that a sum overflows no sooner than a part.
    """

    _DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}  # noqa: RUF012

    def encode(self, key: str, grad: Tensor, shared: Tensor | None = None) -> list[Tensor]:
        dtype = self._DTYPES[self.name]
        if dtype is torch.float32:
            return [flat(grad).clone()]  # reduced in place, while `grad` is left as it is
        source = flat(grad)
        return [torch.mul(source, 1.0 / self.world, out=torch.empty(source.numel(), dtype=dtype, device=grad.device))]

    def decode(self, key: str, gathered: Arrived, out: Tensor) -> None:
        with writing(out) as target:
            if self.name == "fp32":
                torch.mul(gathered[0][0], 1.0 / self.world, out=target)
            else:
                target.copy_(gathered[0][0])
