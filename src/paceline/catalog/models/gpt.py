"""GPT-2 (Radford et al. 2019) and GPT-3 (Brown et al. 2020); output projection tied to the embedding.

GPT-3 alternates dense and locally banded sparse attention; every layer is dense here.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from .layers import (
    Attention,
    Built,
    FeedForward,
    TransformerBlock,
    dropout,
    require,
    tied_head,
    token_ids,
    token_loss,
)


class Gpt(nn.Module):
    """Pre-norm causal decoder with learned positions."""

    def __init__(self, *, vocab: int, context: int, width: int, depth: int, heads: int, p: float) -> None:
        super().__init__()
        norm = partial(nn.LayerNorm, width)
        self.embed, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.drop = dropout(p)
        self.blocks = nn.ModuleList(
            TransformerBlock(
                Attention(width, heads, causal=True, p=p),
                FeedForward(width, 4 * width, nn.GELU(approximate="tanh")),
                norm,
                p=p,
            )
            for _ in range(depth)
        )
        self.norm = norm()
        self.head = tied_head(self.embed)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.drop(self.embed(ids) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def gpt(
    *,
    batch: int,
    seq: int = 1024,
    width: int = 768,
    depth: int = 12,
    heads: int = 12,
    vocab: int = 50_257,
    context: int = 1024,
    p: float = 0.0,
) -> Built:
    """GPT with `context` learned positions, of which `seq` are used; GPT-2 124M unless told otherwise."""
    require(seq <= context, f"this GPT has {context} learned positions; got seq={seq}")
    ids = token_ids(batch, seq)
    net = Gpt(vocab=vocab, context=context, width=width, depth=depth, heads=heads, p=p)
    return net, (ids,), token_loss(ids)
