"""DLRM (Naumov et al. 2019) on the Criteo data sets: one row of each table per sample, dense gradients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .layers import Built

DENSE_FEATURES = 13

TABLES: dict[str, tuple[int, ...]] = {
    # Criteo 1TB Click Logs, ids hashed modulo 40 million (MLPerf Training v0.7 to v2.1).
    "criteo-1tb": (
        39_884_406,
        39_043,
        17_289,
        7_420,
        20_263,
        3,
        7_120,
        1_543,
        63,
        38_532_951,
        2_953_546,
        403_346,
        10,
        2_208,
        11_938,
        155,
        4,
        976,
        14,
        39_979_771,
        25_641_295,
        39_664_984,
        585_935,
        12_972,
        108,
        36,
    ),
    # Criteo Display Advertising Challenge (Kaggle), uncapped.
    "criteo-kaggle": (
        1_460,
        583,
        10_131_227,
        2_202_608,
        305,
        24,
        12_517,
        633,
        3,
        93_145,
        5_683,
        8_351_593,
        3_194,
        27,
        14_992,
        5_461_306,
        10,
        5_652,
        2_173,
        4,
        7_046_547,
        18,
        15,
        286_181,
        105,
        142_572,
    ),
}
"""Rows of the 26 embedding tables of each data set."""


def _mlp(widths: Sequence[int], *, last_relu: bool) -> nn.Sequential:
    layers = [
        layer for inputs, outputs in pairwise(widths) for layer in (nn.Linear(inputs, outputs), nn.ReLU())
    ]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


class Dlrm(nn.Module):
    """Dense features (batch, 13) and ids (batch, tables) in, one logit per sample out."""

    pairs: Tensor

    def __init__(self, *, rows: Sequence[int], width: int, bottom: Sequence[int], top: Sequence[int]) -> None:
        super().__init__()
        vectors = len(rows) + 1
        self.tables = nn.ModuleList(nn.Embedding(n, width) for n in rows)
        self.bottom = _mlp([DENSE_FEATURES, *bottom, width], last_relu=True)
        self.top = _mlp([width + vectors * (vectors - 1) // 2, *top, 1], last_relu=False)
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        first = self.bottom(dense)
        vectors = torch.stack(
            [first, *(table(i) for table, i in zip(self.tables, ids.unbind(1), strict=True))], dim=1
        )
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits: Tensor = self.top(torch.cat((first, products), dim=1))
        return logits.squeeze(1)


def dlrm(
    *,
    batch: int,
    tables: str = "criteo-1tb",
    width: int = 128,
    bottom: Sequence[int] = (512, 256),
    top: Sequence[int] = (1024, 1024, 512, 256),
) -> Built:
    """DLRM with dot-product interaction and a click loss; MLPerf's model unless told otherwise."""
    rows = TABLES[tables]
    net = Dlrm(rows=rows, width=width, bottom=bottom, top=top)
    clicks = torch.zeros(batch)

    def loss(logits: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, clicks.to(logits.dtype))

    return net, (torch.zeros(batch, DENSE_FEATURES), torch.zeros(batch, len(rows), dtype=torch.int64)), loss
