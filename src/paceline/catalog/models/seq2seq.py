"""Encoder-decoder Transformer (Vaswani et al. 2017).

Post-norm, sinusoidal positions, one embedding shared by source, target and output projection, and
no biases in the attention projections, as in the authors' tensor2tensor.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from .layers import Attention, Built, FeedForward, TransformerBlock, dropout, tied_head, token_ids, token_loss


def sinusoids(seq: int, width: int) -> Tensor:
    """Fixed position encodings (seq, width): sines, then cosines."""
    rates = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10_000.0) / width))
    angles = torch.outer(torch.arange(seq, dtype=torch.float32), rates)
    return torch.cat((angles.sin(), angles.cos()), dim=1)


class CrossBlock(nn.Module):
    """A decoder block: causal self-attention, attention to the encoder's output, feed-forward; post-norm."""

    def __init__(self, width: int, heads: int, inner: int, p: float) -> None:
        super().__init__()
        attention = partial(Attention, width, heads, bias=False, fused=False, p=p)
        self.attention, self.cross = attention(causal=True), attention()
        self.feed = FeedForward(width, inner, nn.ReLU())
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.drop = dropout(p)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = self.norm1(x + self.drop(self.attention(x)))
        x = self.norm2(x + self.drop(self.cross(x, memory=memory)))
        x = self.norm3(x + self.drop(self.feed(x)))
        return x


class EncoderDecoder(nn.Module):
    """Source and target ids in, target logits out."""

    positions: Tensor

    def __init__(
        self, *, vocab: int, seq: int, width: int, depth: int, heads: int, inner: int, p: float
    ) -> None:
        super().__init__()
        self.scale = math.sqrt(width)
        self.embed = nn.Embedding(vocab, width)
        self.register_buffer("positions", sinusoids(seq, width), persistent=False)
        self.drop = dropout(p)
        self.encoder = nn.ModuleList(
            TransformerBlock(
                Attention(width, heads, bias=False, fused=False, p=p),
                FeedForward(width, inner, nn.ReLU()),
                partial(nn.LayerNorm, width),
                post=True,
                p=p,
            )
            for _ in range(depth)
        )
        self.decoder = nn.ModuleList(CrossBlock(width, heads, inner, p) for _ in range(depth))
        self.head = tied_head(self.embed)

    def place(self, ids: Tensor) -> Tensor:
        """Embeddings with positions added."""
        out: Tensor = self.drop(self.embed(ids) * self.scale + self.positions)
        return out

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, x = self.place(source), self.place(target)
        for block in self.encoder:
            memory = block(memory)
        for block in self.decoder:
            x = block(x, memory)
        logits: Tensor = self.head(x)
        return logits


def transformer(
    *,
    batch: int,
    seq: int = 64,
    width: int = 512,
    depth: int = 6,
    heads: int = 8,
    inner: int = 2048,
    vocab: int = 37_000,
    p: float = 0.1,
) -> Built:
    """Encoder-decoder Transformer; source and target are both `seq` long. The base model unless told
    otherwise.
    """
    source, target = token_ids(batch, seq), token_ids(batch, seq)
    net = EncoderDecoder(vocab=vocab, seq=seq, width=width, depth=depth, heads=heads, inner=inner, p=p)
    return net, (source, target), token_loss(target)
