"""A gradient compressor: eight bits an element, in equal steps up to the largest magnitude of each tensor.

    paceline --extend examples/extend/compressor.py compare resnet50 \
        --cluster 4x1xp100-sxm@10Gb/s --plans ddp,terngrad,linear8
    paceline --extend examples/extend/compressor.py train --strategy ddp,linear8 --steps 100

In a program, `import compressor` is all; then `pt.parallelize(model, optimizer, plan="linear8")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.spec.compression import Scheme, Shape, Work, numel, register
from paceline.train.compress import Arrived, Compressor

#: codes go from minus to plus this
LEVELS = 127


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Linear8(Scheme):
    """What it sends, what that takes, and what is known of accuracy: for predictions and the search."""

    name: ClassVar[str] = "linear8"
    title: ClassVar[str] = "8-bit linear quantization"
    accuracy: ClassVar[str] = "none seen with 8 bits on MNIST, CIFAR-10 and ImageNet"
    evidence: ClassVar[str] = "Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016"
    encoder: ClassVar[str] = f"{__name__}:Encoder"

    def payload_bytes(self, shape: Shape, step: int) -> int:
        return numel(shape) + 4  # a code for each element, and the scale

    def encode_work(self, shape: Shape) -> Work:
        return self.per_element(shape, flops=4, read=8, written=0, passes=2)  # the largest, then the codes

    def decode_work(self, shape: Shape, world: int) -> Work:
        return self.added_up(shape, world, flops=2)


class Encoder(Compressor):
    """Does it: for training."""

    def encode(self, key: str, grad: Tensor, shared: Tensor | None = None) -> list[Tensor]:
        x = grad.detach().reshape(-1).float()
        scale = x.abs().amax() / LEVELS
        scale = torch.where(scale.isfinite(), scale, torch.nan)  # so that every rank skips the step
        codes = (x / scale.clamp_min(1e-38)).round().nan_to_num(0.0)
        return [codes.to(torch.int8), scale.reshape(1)]

    def decode(self, key: str, gathered: Arrived, out: Tensor) -> None:
        total = sum(codes.float() * scale for codes, scale in gathered)
        out.copy_((total / len(gathered)).view_as(out))
