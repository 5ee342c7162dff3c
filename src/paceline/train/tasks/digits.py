"""`digits-cnn` and `digits-deep`: handwritten digits of scikit-learn, which ship with it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch
from torch import nn

from paceline.errors import MissingExtra
from paceline.train.tasks import Task


def task(name: str = "digits-cnn") -> Task:
    """Four fifths to train on, one to test; the split is the same in every run."""
    if find_spec("sklearn") is None:
        raise MissingExtra("scikit-learn", "train", f"the task {name}")
    found = import_module("sklearn.datasets").load_digits()  # an extra, without types
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(found.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
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
