"""BERT (Devlin et al. 2018) with its masked-language-model head, the decoder tied to the embedding."""

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


class Bert(nn.Module):
    """Token and segment ids in, logits at every position out; no pooler and no next-sentence head."""

    def __init__(self, *, vocab: int, context: int, width: int, depth: int, heads: int, p: float) -> None:
        super().__init__()
        norm = partial(nn.LayerNorm, width, eps=1e-12)
        self.embed, self.positions, self.segments = (nn.Embedding(n, width) for n in (vocab, context, 2))
        self.norm, self.drop = norm(), dropout(p)
        self.blocks = nn.ModuleList(
            TransformerBlock(
                Attention(width, heads, fused=False, p=p),
                FeedForward(width, 4 * width, nn.GELU()),
                norm,
                post=True,
                p=p,
            )
            for _ in range(depth)
        )
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), norm())
        self.head = tied_head(self.embed, bias=True)

    def forward(self, ids: Tensor, segments: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.drop(self.norm(self.embed(ids) + self.segments(segments) + self.positions(places)))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.transform(x))
        return logits


def bert(
    *,
    batch: int,
    seq: int = 512,
    width: int = 768,
    depth: int = 12,
    heads: int = 12,
    vocab: int = 30_522,
    context: int = 512,
    p: float = 0.1,
) -> Built:
    """BERT for masked language modelling; base unless told otherwise. The loss covers every position."""
    require(seq <= context, f"this BERT has {context} learned positions; got seq={seq}")
    ids = token_ids(batch, seq)
    net = Bert(vocab=vocab, context=context, width=width, depth=depth, heads=heads, p=p)
    return net, (ids, token_ids(batch, seq)), token_loss(ids)
