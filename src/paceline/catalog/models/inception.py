"""Inception networks: GoogLeNet and Inception v3, in torchvision's variants (batch norm throughout).

In training both also return the scores of their auxiliary classifiers, which their losses weight as
the papers do; in evaluation they return the class scores alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .cnn import ConvNorm, images
from .layers import Built, require, weighted_class_loss


def _conv(
    inputs: int,
    outputs: int,
    kernel: int | tuple[int, int],
    *,
    stride: int = 1,
    padding: int | tuple[int, int] = 0,
) -> ConvNorm:
    return ConvNorm(
        inputs, outputs, kernel, stride=stride, padding=padding, eps=1e-3, activation=nn.ReLU(inplace=True)
    )


class Branches(nn.ModuleList):
    """Modules applied to one input, their outputs concatenated by channel."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self], dim=1)


class Inception(nn.Module):
    """A trunk in segments; after each but the last, an auxiliary classifier runs in training."""

    def __init__(
        self, segments: list[nn.Sequential], auxiliary: list[nn.Sequential], head: nn.Sequential
    ) -> None:
        super().__init__()
        self.segments, self.auxiliary = nn.ModuleList(segments), nn.ModuleList(auxiliary)
        self.head = head

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        extra: list[Tensor] = []
        for i, segment in enumerate(self.segments):
            x = segment(x)
            if self.training and i < len(self.auxiliary):
                extra.append(self.auxiliary[i](x))
        out: Tensor = self.head(x)
        return (out, *extra) if extra else out


def _mixed(inputs: int, one: int, reduce3: int, three: int, reduce5: int, five: int, pool: int) -> Branches:
    """A GoogLeNet module; its "5x5" branch has a 3x3 kernel, as in torchvision."""
    return Branches(
        [
            _conv(inputs, one, 1),
            nn.Sequential(_conv(inputs, reduce3, 1), _conv(reduce3, three, 3, padding=1)),
            nn.Sequential(_conv(inputs, reduce5, 1), _conv(reduce5, five, 3, padding=1)),
            nn.Sequential(nn.MaxPool2d(3, 1, 1, ceil_mode=True), _conv(inputs, pool, 1)),
        ]
    )


def googlenet(*, batch: int, image: int = 224, classes: int = 1000) -> Built:
    """GoogLeNet (Szegedy et al. 2014) with batch norm and both auxiliary classifiers, each weighted 0.3."""

    def auxiliary(inputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.AdaptiveAvgPool2d(4),
            _conv(inputs, 128, 1),
            nn.Flatten(),
            nn.Linear(2048, 1024),
            nn.ReLU(inplace=True),
            nn.Dropout(0.7),
            nn.Linear(1024, classes),
        )

    stem = nn.Sequential(
        _conv(3, 64, 7, stride=2, padding=3),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        _conv(64, 64, 1),
        _conv(64, 192, 3, padding=1),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        _mixed(192, 64, 96, 128, 16, 32, 32),
        _mixed(256, 128, 128, 192, 32, 96, 64),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        _mixed(480, 192, 96, 208, 16, 48, 64),
    )
    middle = nn.Sequential(
        _mixed(512, 160, 112, 224, 24, 64, 64),
        _mixed(512, 128, 128, 256, 24, 64, 64),
        _mixed(512, 112, 144, 288, 32, 64, 64),
    )
    last = nn.Sequential(
        _mixed(528, 256, 160, 320, 32, 128, 128),
        nn.MaxPool2d(2, 2, ceil_mode=True),
        _mixed(832, 256, 160, 320, 32, 128, 128),
        _mixed(832, 384, 192, 384, 48, 128, 128),
    )
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1024, classes))
    net = Inception([stem, middle, last], [auxiliary(512), auxiliary(528)], head)
    return net, images(batch, image), weighted_class_loss(torch.zeros(batch, dtype=torch.int64), 0.3)


def _pooled(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), _conv(inputs, outputs, 1))


def _row(inputs: int, outputs: int, n: int = 7) -> ConvNorm:
    return _conv(inputs, outputs, (1, n), padding=(0, n // 2))


def _column(inputs: int, outputs: int, n: int = 7) -> ConvNorm:
    return _conv(inputs, outputs, (n, 1), padding=(n // 2, 0))


def _grid35(inputs: int, pool: int) -> Branches:
    """Figure 5: 5x5 and two 3x3 in parallel."""
    return Branches(
        [
            _conv(inputs, 64, 1),
            nn.Sequential(_conv(inputs, 48, 1), _conv(48, 64, 5, padding=2)),
            nn.Sequential(_conv(inputs, 64, 1), _conv(64, 96, 3, padding=1), _conv(96, 96, 3, padding=1)),
            _pooled(inputs, pool),
        ]
    )


def _grid17(inner: int) -> Branches:
    """Figure 6: 7x7 factored into rows and columns."""
    return Branches(
        [
            _conv(768, 192, 1),
            nn.Sequential(_conv(768, inner, 1), _row(inner, inner), _column(inner, 192)),
            nn.Sequential(
                _conv(768, inner, 1),
                _column(inner, inner),
                _row(inner, inner),
                _column(inner, inner),
                _row(inner, 192),
            ),
            _pooled(768, 192),
        ]
    )


def _grid8(inputs: int) -> Branches:
    """Figure 7: branches that fan out into a row and a column."""

    def fan(width: int) -> Branches:
        return Branches([_row(width, 384, 3), _column(width, 384, 3)])

    return Branches(
        [
            _conv(inputs, 320, 1),
            nn.Sequential(_conv(inputs, 384, 1), fan(384)),
            nn.Sequential(_conv(inputs, 448, 1), _conv(448, 384, 3, padding=1), fan(384)),
            _pooled(inputs, 192),
        ]
    )


def inception_v3(*, batch: int, image: int = 299, classes: int = 1000) -> Built:
    """Inception v3 (Szegedy et al. 2015) with its auxiliary classifier, weighted 0.4."""
    require(
        image >= 299, f"inception_v3's auxiliary classifier needs images of 299 or more; got image={image}"
    )
    reduce17 = Branches(
        [
            _conv(288, 384, 3, stride=2),
            nn.Sequential(_conv(288, 64, 1), _conv(64, 96, 3, padding=1), _conv(96, 96, 3, stride=2)),
            nn.MaxPool2d(3, 2),
        ]
    )
    reduce8 = Branches(
        [
            nn.Sequential(_conv(768, 192, 1), _conv(192, 320, 3, stride=2)),
            nn.Sequential(
                _conv(768, 192, 1), _row(192, 192), _column(192, 192), _conv(192, 192, 3, stride=2)
            ),
            nn.MaxPool2d(3, 2),
        ]
    )
    trunk = nn.Sequential(
        _conv(3, 32, 3, stride=2),
        _conv(32, 32, 3),
        _conv(32, 64, 3, padding=1),
        nn.MaxPool2d(3, 2),
        _conv(64, 80, 1),
        _conv(80, 192, 3),
        nn.MaxPool2d(3, 2),
        _grid35(192, 32),
        _grid35(256, 64),
        _grid35(288, 64),
        reduce17,
        _grid17(128),
        _grid17(160),
        _grid17(160),
        _grid17(192),
    )
    last = nn.Sequential(reduce8, _grid8(1280), _grid8(2048))
    auxiliary = nn.Sequential(
        nn.AvgPool2d(5, 3),
        _conv(768, 128, 1),
        _conv(128, 768, 5),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(768, classes),
    )
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Dropout(0.5), nn.Flatten(), nn.Linear(2048, classes))
    net = Inception([trunk, last], [auxiliary], head)
    return net, images(batch, image), weighted_class_loss(torch.zeros(batch, dtype=torch.int64), 0.4)
