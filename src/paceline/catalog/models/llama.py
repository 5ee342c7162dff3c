"""Llama 2 (Touvron et al.

2023), Llama 3, 3.1 and 3.2 (Llama team 2024): RMSNorm, rotary positions, SwiGLU, GQA.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from .layers import Attention, Built, SwiGLU, TransformerBlock, rotary_table, tied_head, token_ids, token_loss


class Llama(nn.Module):
    """Pre-norm causal decoder with rotary positions; `feed` makes each block's feed-forward."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        *,
        vocab: int,
        seq: int,
        width: int,
        depth: int,
        heads: int,
        kv_heads: int,
        feed: Callable[[], nn.Module],
        theta: float,
        tied: bool,
    ) -> None:
        super().__init__()
        norm = partial(nn.RMSNorm, width, eps=1e-5)
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            TransformerBlock(
                Attention(width, heads, kv_heads=kv_heads, bias=False, causal=True, fused=False), feed(), norm
            )
            for _ in range(depth)
        )
        self.norm = norm()
        self.head = tied_head(self.embed) if tied else nn.Linear(width, vocab, bias=False)
        cos, sin = rotary_table(seq, width // heads, theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


def llama(
    *,
    batch: int,
    seq: int = 4096,
    width: int = 4096,
    depth: int = 32,
    heads: int = 32,
    kv_heads: int | None = None,
    inner: int = 11_008,
    vocab: int = 32_000,
    theta: float = 10_000.0,
    tied: bool = False,
) -> Built:
    """Llama at any sequence length; Llama 2 7B unless told otherwise."""
    ids = token_ids(batch, seq)
    net = Llama(
        vocab=vocab,
        seq=seq,
        width=width,
        depth=depth,
        heads=heads,
        kv_heads=kv_heads or heads,
        feed=partial(SwiGLU, width, inner),
        theta=theta,
        tied=tied,
    )
    return net, (ids,), token_loss(ids)
