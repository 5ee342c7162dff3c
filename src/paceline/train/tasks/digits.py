"""`digits-cnn`, `digits-deep`, `digits-shifted`: handwritten digits of scikit-learn, which ship with it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch
from torch import nn

from paceline.errors import MissingExtra
from paceline.train.tasks import Task

#: of `digits-shifted`: pixels by which digits are moved each way, noisy copies of each, and the noise's
#: standard deviation (of values from -1 to 1)
_SHIFT, _COPIES, _NOISE = 1, 2, 0.3


def _digits(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images, labels, and an order of them that is the same in every run."""
    if find_spec("sklearn") is None:
        raise MissingExtra("scikit-learn", "train", f"the task {name}")
    found = import_module("sklearn.datasets").load_digits()  # an extra, without types
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(found.target, dtype=torch.int64)
    return images, labels, torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))


def task(name: str = "digits-cnn") -> Task:
    """Four fifths to train on, one to test; the split is the same in every run."""
    images, labels, order = _digits(name)
    held = len(labels) // 5
    network = model if name == "digits-cnn" else deep
    return Task(
        name=name,
        model=network,
        train=(images[order[held:]], labels[order[held:]]),
        test=(images[order[:held]], labels[order[:held]]),
        batch=64,
        epochs=30,
        lr=0.05,
        momentum=0.9,
        target=0.97,
    )


def shifted() -> Task:
    """One fifth of the digits to test, a tenth to choose settings on, the rest to train on; then each is
    moved to nine places, with noise, so that copies of a digit are all on one side.
    """
    images, labels, order = _digits("digits-shifted")
    tested, chosen = len(labels) // 5, len(labels) // 10
    ends = {"test": order[:tested], "validation": order[tested : tested + chosen]}
    return Task(
        name="digits-shifted",
        model=small,
        train=_moved(images, labels, order[tested + chosen :], _COPIES, 0),
        test=_moved(images, labels, ends["test"], 1, 1),
        validation=_moved(images, labels, ends["validation"], 1, 2),
        batch=64,
        epochs=10,
        lr=0.05,
        momentum=0.9,
        target=0.95,
    )


def _moved(
    images: torch.Tensor, labels: torch.Tensor, which: torch.Tensor, copies: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of some digits at every place up to `_SHIFT` pixels away, on a dark ground."""
    places = range(-_SHIFT, _SHIFT + 1)
    wide = torch.nn.functional.pad(images[which], [_SHIFT] * 4, value=-1.0)
    size = images.shape[-1]
    starts = [(_SHIFT + down, _SHIFT + right) for down in places for right in places]
    moved = [wide[..., top : top + size, left : left + size] for top, left in starts for _ in range(copies)]
    together = torch.cat(moved)
    noise = torch.randn(together.shape, generator=torch.Generator().manual_seed(seed))
    return together + _NOISE * noise, labels[which].repeat(len(moved))


def small() -> nn.Module:
    """Two convolutions and two fully connected layers, 35,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def model() -> nn.Module:
    """Two convolutions and two fully connected layers, 140,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def deep() -> nn.Module:
    """Four convolutions and three fully connected layers without normalisation, 180,000 parameters: gradients
    shrink on their way down.
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 256),
        nn.ReLU(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
