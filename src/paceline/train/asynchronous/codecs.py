"""Fewer bytes between workers and servers: what a payload looks like on the wire, each way.

Up, a codec may keep what it left out and add it to the next gradient (error feedback): such state is the
worker's own. Down, parameters are sent whole or rounded: a worker that missed an update must not drift.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from paceline.errors import SpecError, UnknownName


class Codec(ABC):
    """Turns a flat fp32 tensor into bytes and back."""

    #: whether parameters may be sent this way too
    down = True

    @abstractmethod
    def encode(self, value: Tensor) -> Tensor:
        """Bytes (uint8) of a flat fp32 tensor."""

    @abstractmethod
    def decode(self, raw: Tensor, count: int) -> Tensor:
        """The tensor of `count` elements that those bytes stand for."""


class Whole(Codec):
    """fp32 as it is: 4 bytes per element."""

    def encode(self, value: Tensor) -> Tensor:
        return value.contiguous().view(torch.uint8)

    def decode(self, raw: Tensor, count: int) -> Tensor:
        return raw.view(torch.float32)


class Rounded(Codec):
    """fp16 or bf16: 2 bytes per element."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def encode(self, value: Tensor) -> Tensor:
        return value.to(self.dtype).view(torch.uint8)

    def decode(self, raw: Tensor, count: int) -> Tensor:
        return raw.view(self.dtype).float()


class Int8(Codec):
    """A scale and one signed byte per element, rounded at random so that the mean is right."""

    def encode(self, value: Tensor) -> Tensor:
        scale = value.abs().max().clamp_min(1e-30) / 127
        levels = torch.floor(value / scale + torch.rand_like(value)).clamp_(-127, 127).to(torch.int8)
        return torch.cat([scale.reshape(1).view(torch.uint8), levels.view(torch.uint8)])

    def decode(self, raw: Tensor, count: int) -> Tensor:
        scale = raw[:4].clone().view(torch.float32)
        return raw[4:].view(torch.int8).float() * scale


class Largest(Codec):
    """The largest share of elements by magnitude, as indices and values; what is left out is added to the
    next gradient.
    """

    down = False

    def __init__(self, share: float) -> None:
        if not 0 < share <= 1:
            raise SpecError(f"top-k keeps a share of elements in (0, 1], got {share}")
        self.share = share
        self._left: Tensor | None = None

    def encode(self, value: Tensor) -> Tensor:
        value = value + self._left if self._left is not None else value.clone()
        kept = value.abs().topk(max(1, round(self.share * value.numel())), sorted=False).indices
        values = value[kept]
        value[kept] = 0.0
        self._left = value
        return torch.cat([kept.to(torch.int32).view(torch.uint8), values.view(torch.uint8)])

    def decode(self, raw: Tensor, count: int) -> Tensor:
        half = raw.numel() // 2
        out = torch.zeros(count)
        out[raw[:half].view(torch.int32).long()] = raw[half:].clone().view(torch.float32)
        return out


_NAMES = ("none", "fp16", "bf16", "int8", "topk:SHARE")


def codec(name: str) -> Codec:
    """A codec by name: none, fp16, bf16, int8, or topk:0.01 for the largest hundredth."""
    kind, _, share = name.partition(":")
    if kind == "topk":
        try:
            return Largest(float(share or 0.01))
        except ValueError as error:
            raise SpecError(f"cannot read codec {name!r}: {error}; write topk:0.01") from None
    simple = {"none": Whole, "int8": Int8}
    if kind in simple and not share:
        return simple[kind]()
    if kind in ("fp16", "bf16") and not share:
        return Rounded(torch.float16 if kind == "fp16" else torch.bfloat16)
    raise UnknownName("codec", name, _NAMES, f"known: {', '.join(_NAMES)}")
