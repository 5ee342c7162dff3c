"""Convolutional networks: AlexNet, VGG, ResNet (v1.5 and its variants) and MobileNetV2.

The layer lists are those of torchvision, whose parameter counts they match.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .layers import Built, named


def images(batch: int, image: int) -> tuple[Tensor]:
    """A batch of square RGB images."""
    return (torch.empty(batch, 3, image, image),)


class ConvNorm(nn.Sequential):
    """Convolution without bias, batch norm and, unless None, an activation."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int | tuple[int, int],
        *,
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
        groups: int = 1,
        eps: float = 1e-5,
        activation: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(outputs, eps=eps)
        if activation is not None:
            self.act = activation


def _classifier(inputs: int, inner: int, classes: int, p: float, *, drop_first: bool) -> nn.Sequential:
    """Three linear layers with dropout, as AlexNet (dropout first) and VGG end."""
    first: list[nn.Module] = [nn.Linear(inputs, inner), nn.ReLU(inplace=True)]
    second: list[nn.Module] = [nn.Linear(inner, inner), nn.ReLU(inplace=True)]
    hidden = (
        [nn.Dropout(p), *first, nn.Dropout(p), *second]
        if drop_first
        else [*first, nn.Dropout(p), *second, nn.Dropout(p)]
    )
    return nn.Sequential(*hidden, nn.Linear(inner, classes))


def alexnet(*, batch: int, image: int = 224, classes: int = 1000) -> Built:
    """AlexNet in the one-tower form (Krizhevsky 2014)."""
    features: list[nn.Module] = []
    width = 3
    for outputs, kernel, stride, padding, pool in (
        (64, 11, 4, 2, True),
        (192, 5, 1, 2, True),
        (384, 3, 1, 1, False),
        (256, 3, 1, 1, False),
        (256, 3, 1, 1, True),
    ):
        features += [nn.Conv2d(width, outputs, kernel, stride, padding), nn.ReLU(inplace=True)]
        if pool:
            features.append(nn.MaxPool2d(3, 2))
        width = outputs
    net = named(
        features=nn.Sequential(*features),
        pool=nn.AdaptiveAvgPool2d(6),
        flatten=nn.Flatten(),
        classifier=_classifier(width * 36, 4096, classes, 0.5, drop_first=True),
    )
    return net, images(batch, image), None


def vgg(
    *, batch: int, image: int = 224, stages: Sequence[int] = (2, 2, 3, 3, 3), classes: int = 1000
) -> Built:
    """VGG without batch norm (Simonyan and Zisserman 2014); `stages` gives the 3x3 convolutions of each
    stage.
    """
    features: list[nn.Module] = []
    width = 3
    for depth, outputs in zip(stages, (64, 128, 256, 512, 512), strict=True):
        for _ in range(depth):
            features += [nn.Conv2d(width, outputs, 3, padding=1), nn.ReLU(inplace=True)]
            width = outputs
        features.append(nn.MaxPool2d(2, 2))
    net = named(
        features=nn.Sequential(*features),
        pool=nn.AdaptiveAvgPool2d(7),
        flatten=nn.Flatten(),
        classifier=_classifier(width * 49, 4096, classes, 0.5, drop_first=False),
    )
    return net, images(batch, image), None


class Residual(nn.Module):
    """A residual block of ResNet: `body` plus a shortcut, projected where the shape changes, then ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else ConvNorm(inputs, outputs, 1, stride=stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return out


def _basic(inputs: int, width: int, stride: int) -> Residual:
    """Two 3x3 convolutions, as in ResNet-18 and -34."""
    body = nn.Sequential(
        ConvNorm(inputs, width, 3, stride=stride, padding=1, activation=nn.ReLU(inplace=True)),
        ConvNorm(width, width, 3, padding=1),
    )
    return Residual(inputs, width, stride, body)


def _bottleneck(inputs: int, width: int, stride: int, groups: int, group_width: int) -> Residual:
    """1x1, 3x3, 1x1; v1.5 strides in the 3x3."""
    inner = width * group_width // 64 * groups
    body = nn.Sequential(
        ConvNorm(inputs, inner, 1, activation=nn.ReLU(inplace=True)),
        ConvNorm(inner, inner, 3, stride=stride, padding=1, groups=groups, activation=nn.ReLU(inplace=True)),
        ConvNorm(inner, width * 4, 1),
    )
    return Residual(inputs, width * 4, stride, body)


def resnet(
    *,
    batch: int,
    image: int = 224,
    layers: Sequence[int] = (3, 4, 6, 3),
    bottleneck: bool = True,
    groups: int = 1,
    group_width: int = 64,
    classes: int = 1000,
) -> Built:
    """ResNet (He et al. 2015), ResNeXt (groups > 1) or Wide ResNet (group_width > 64)."""
    stages: dict[str, nn.Module] = {}
    inputs = 64
    for stage, (depth, width) in enumerate(zip(layers, (64, 128, 256, 512), strict=True)):
        blocks = nn.Sequential()
        for i in range(depth):
            stride = 2 if stage > 0 and i == 0 else 1
            blocks.append(
                _bottleneck(inputs, width, stride, groups, group_width)
                if bottleneck
                else _basic(inputs, width, stride)
            )
            inputs = width * 4 if bottleneck else width
        stages[f"stage{stage + 1}"] = blocks
    net = named(
        stem=ConvNorm(3, 64, 7, stride=2, padding=3, activation=nn.ReLU(inplace=True)),
        stem_pool=nn.MaxPool2d(3, 2, 1),
        **stages,
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        head=nn.Linear(inputs, classes),
    )
    return net, images(batch, image), None


class InvertedResidual(nn.Module):
    """Expand by 1x1, depthwise 3x3, project by 1x1 without activation."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand: int) -> None:
        super().__init__()
        inner = inputs * expand
        self.body = nn.Sequential()
        if expand != 1:
            self.body.append(ConvNorm(inputs, inner, 1, activation=nn.ReLU6(inplace=True)))
        self.body.append(
            ConvNorm(
                inner, inner, 3, stride=stride, padding=1, groups=inner, activation=nn.ReLU6(inplace=True)
            )
        )
        self.body.append(ConvNorm(inner, outputs, 1))
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return x + out if self.residual else out


def mobilenet_v2(*, batch: int, image: int = 224, classes: int = 1000) -> Built:
    """MobileNetV2 at width 1.0 (Sandler et al. 2018)."""
    blocks = nn.Sequential()
    inputs = 32
    for expand, outputs, depth, first_stride in (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):
        for i in range(depth):
            blocks.append(InvertedResidual(inputs, outputs, first_stride if i == 0 else 1, expand))
            inputs = outputs
    net = named(
        stem=ConvNorm(3, 32, 3, stride=2, padding=1, activation=nn.ReLU6(inplace=True)),
        blocks=blocks,
        last=ConvNorm(inputs, 1280, 1, activation=nn.ReLU6(inplace=True)),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        drop=nn.Dropout(0.2),
        head=nn.Linear(1280, classes),
    )
    return net, images(batch, image), None
