"""Vision Transformers (Dosovitskiy et al. 2020), as torchvision lays them out; no dropout."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from .cnn import images
from .layers import Attention, Built, FeedForward, TransformerBlock, require


class VisionTransformer(nn.Module):
    """Patches and a class token through pre-norm blocks; the class token is classified."""

    def __init__(self, *, image: int, patch: int, width: int, depth: int, heads: int, classes: int) -> None:
        super().__init__()
        norm = partial(nn.LayerNorm, width, eps=1e-6)
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (image // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(
            TransformerBlock(Attention(width, heads), FeedForward(width, 4 * width, nn.GELU()), norm)
            for _ in range(depth)
        )
        self.norm = norm()
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x)[:, 0])
        return scores


def vit(
    *,
    batch: int,
    image: int = 224,
    patch: int = 16,
    width: int = 768,
    depth: int = 12,
    heads: int = 12,
    classes: int = 1000,
) -> Built:
    """Vision Transformer; ViT-B/16 unless told otherwise."""
    require(
        image % patch == 0,
        f"this ViT cuts images into {patch}x{patch} patches; "
        f"got image={image}, which is not a multiple of {patch}",
    )
    net = VisionTransformer(image=image, patch=patch, width=width, depth=depth, heads=heads, classes=classes)
    return net, images(batch, image), None
