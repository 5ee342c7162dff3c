"""What two or more model families share: attention, feed-forwards, residual blocks, losses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import SpecError

Loss: TypeAlias = Callable[[Any], Tensor]
"""Module output -> scalar."""

Built: TypeAlias = tuple[nn.Module, tuple[Tensor, ...], Loss | None]
"""Module, its positional inputs, and its loss (None: cross-entropy of class scores)."""


def token_ids(batch: int, seq: int) -> Tensor:
    """Token ids for one step; only their shape matters."""
    return torch.zeros(batch, seq, dtype=torch.int64)


def token_loss(labels: Tensor) -> Loss:
    """Cross-entropy of logits (batch, seq, vocabulary) against labels (batch, seq)."""

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return loss


def weighted_class_loss(labels: Tensor, weight: float) -> Loss:
    """Cross-entropy of class scores; of a tuple, those after the first are auxiliary and count `weight`."""

    def loss(output: Tensor | tuple[Tensor, ...]) -> Tensor:
        main, *extra = (output,) if isinstance(output, Tensor) else output
        total = F.cross_entropy(main, labels)
        for scores in extra:
            total = total + weight * F.cross_entropy(scores, labels)
        return total

    return loss


def named(**modules: nn.Module) -> nn.Sequential:
    """A sequence whose members have names."""
    return nn.Sequential(OrderedDict(modules))


def require(fits: bool, problem: str) -> None:
    """Refuses sizes that an architecture cannot take."""
    if not fits:
        raise SpecError(problem)


def tied_head(embed: nn.Embedding, *, bias: bool = False) -> nn.Linear:
    """Output projection whose weight is the embedding's own."""
    head = nn.Linear(embed.embedding_dim, embed.num_embeddings, bias=bias)
    head.weight = embed.weight
    return head


def dropout(p: float) -> nn.Module:
    """Dropout, or nothing at all where p is 0."""
    return nn.Dropout(p) if p else nn.Identity()


def rotary_table(seq: int, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles, each (seq, width); scaled variants differ in values only."""
    rates = theta ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    angles = torch.outer(torch.arange(seq, dtype=torch.float32), rates).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x (batch, heads, seq, width), pairing each half with the other."""
    low, high = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-high, low), dim=-1) * sin.to(x.dtype)


class Attention(nn.Module):
    """Multi-head attention; grouped where kv_heads < heads, rotary where cos and sin are given.

    Queries, keys and values come from one projection where `fused`, else from three. With `memory`,
    keys and values come from it (cross-attention), which needs `fused=False`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        bias: bool = True,
        causal: bool = False,
        fused: bool = True,
        p: float = 0.0,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = heads, kv_heads or heads, width // heads
        self.causal, self.p = causal, p
        inner, shared = heads * self.head_width, self.kv_heads * self.head_width
        self.split = [inner, shared, shared]
        if fused:
            self.qkv = nn.Linear(width, sum(self.split), bias=bias)
        else:
            self.q, self.k, self.v = (nn.Linear(width, n, bias=bias) for n in self.split)
        self.fused = fused
        self.out = nn.Linear(inner, width, bias=bias)

    def forward(
        self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, memory: Tensor | None = None
    ) -> Tensor:
        source = x if memory is None else memory
        parts = (
            self.qkv(x).split(self.split, dim=-1)
            if self.fused
            else (self.q(x), self.k(source), self.v(source))
        )
        q, k, v = (part.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in parts)
        if cos is not None and sin is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(
            q,
            k,
            v,
            dropout_p=self.p if self.training else 0.0,
            is_causal=self.causal,
            enable_gqa=self.kv_heads != self.heads,
        )
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Sequential):
    """Two linear layers with an activation between them."""

    def __init__(self, width: int, inner: int, activation: nn.Module) -> None:
        super().__init__(
            OrderedDict(up=nn.Linear(width, inner), act=activation, down=nn.Linear(inner, width))
        )


class SwiGLU(nn.Module):
    """Gated feed-forward without biases: down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each with a residual connection; norms before them, or after if `post`.

    Further arguments of `forward` go to the attention.
    """

    def __init__(
        self,
        attention: nn.Module,
        feed: nn.Module,
        norm: Callable[[], nn.Module],
        *,
        post: bool = False,
        p: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention, self.feed = attention, feed
        self.norm1, self.norm2 = norm(), norm()
        self.drop = dropout(p)
        self.post = post

    def forward(self, x: Tensor, *args: Tensor) -> Tensor:
        if self.post:
            x = self.norm1(x + self.drop(self.attention(x, *args)))
            x = self.norm2(x + self.drop(self.feed(x)))
            return x
        x = x + self.drop(self.attention(self.norm1(x), *args))
        x = x + self.drop(self.feed(self.norm2(x)))
        return x
