"""Small networks that differ in what bounds them: bytes of parameters against seconds of compute on one
core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchNetwork:
    """A model and the shape of its data; `compute_s` is a rough figure, only to choose how long to
    measure.
    """

    name: str
    build: Callable[[], nn.Module]
    sample: tuple[int, ...]
    batch: int
    compute_s: float
    #: integers below this are the input, where it is not an image
    vocabulary: int = 0

    def data(self, seed: int) -> tuple[Tensor, Tensor]:
        """One batch: inputs, and labels of ten classes."""
        source = torch.Generator().manual_seed(seed)
        shape = (self.batch, *self.sample)
        x = (
            torch.randint(self.vocabulary, shape, generator=source)
            if self.vocabulary
            else torch.randn(shape, generator=source)
        )
        return x, torch.randint(10, (self.batch,), generator=source)


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


class _Last(nn.Module):
    """The last state of a recurrent network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rnn = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0][:, -1]  # type: ignore[no-any-return]


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(256, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 10)
    )


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 96, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(384, 10),
    )


def _resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 48, 3, stride=2, padding=1),
        nn.ReLU(),
        *[_Block(48) for _ in range(4)],
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(48, 10),
    )


def _transformer() -> nn.Module:
    layer = [nn.TransformerEncoderLayer(128, 4, 384, dropout=0.0, batch_first=True) for _ in range(2)]
    return nn.Sequential(nn.Embedding(256, 128), *layer, _Mean(), nn.Linear(128, 10))


def _lstm() -> nn.Module:
    return nn.Sequential(nn.Embedding(512, 144), _Last(144), nn.Linear(144, 10))


JOBS: dict[str, BenchNetwork] = {
    job.name: job
    for job in (
        BenchNetwork(name="mlp", build=_mlp, sample=(256,), batch=128, compute_s=0.004),
        BenchNetwork(name="cnn", build=_cnn, sample=(3, 32, 32), batch=32, compute_s=0.035),
        BenchNetwork(name="resnet", build=_resnet, sample=(3, 32, 32), batch=24, compute_s=0.06),
        BenchNetwork(
            name="transformer", build=_transformer, sample=(32,), batch=24, compute_s=0.035, vocabulary=256
        ),
        BenchNetwork(name="lstm", build=_lstm, sample=(20,), batch=48, compute_s=0.02, vocabulary=512),
    )
}
