"""Mixtral (Jiang et al. 2024): a Llama-like decoder whose feed-forwards are mixtures of experts.

Dispatch is balanced, so that every shape is static: the (token, expert) pairs are sorted by expert
and cut into equal shares, one for each expert. Work and memory are those of a perfectly balanced
router; the values are not Mixtral's wherever its router would be unbalanced.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .layers import Built, SwiGLU, token_ids, token_loss
from .llama import Llama


class BalancedExperts(nn.Module):
    """Each token goes to `chosen` of the experts, and each expert takes an equal share of the pairs."""

    def __init__(self, width: int, inner: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(width, inner) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, picks = F.softmax(self.router(tokens), dim=-1).topk(self.chosen, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        order = picks.flatten().argsort()
        rows = order // self.chosen
        shares = tokens[rows].tensor_split(len(self.experts))
        out = torch.cat([expert(share) for expert, share in zip(self.experts, shares, strict=True)])
        out = out * weights.flatten()[order].unsqueeze(-1).to(out.dtype)
        return torch.zeros_like(tokens, dtype=out.dtype).index_add(0, rows, out).view_as(x)


def mixtral(
    *,
    batch: int,
    seq: int = 4096,
    width: int = 4096,
    depth: int = 32,
    heads: int = 32,
    kv_heads: int = 8,
    inner: int = 14_336,
    experts: int = 8,
    chosen: int = 2,
    vocab: int = 32_000,
    theta: float = 1e6,
) -> Built:
    """Mixtral with balanced dispatch and no load-balancing loss; 8x7B unless told otherwise."""
    ids = token_ids(batch, seq)
    net = Llama(
        vocab=vocab,
        seq=seq,
        width=width,
        depth=depth,
        heads=heads,
        kv_heads=kv_heads,
        feed=partial(BalancedExperts, width, inner, experts, chosen),
        theta=theta,
        tied=False,
    )
    return net, (ids,), token_loss(ids)
