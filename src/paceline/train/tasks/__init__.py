"""Ready-made tasks: real data that is here already, a network, a target; for time to accuracy and for trying
strategies out.

    digits-cnn    handwritten digits of scikit-learn (1,797 images of 8 x 8), a small convolutional network
    digits-deep   the same digits, a deeper network without normalisation: harder to train with large or
                  compressed steps
    text-mlp      the next character of the Python language reference that ships with Python, a feed-forward
                  language model
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import UnknownName

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Data as tensors, and what to train on them; batches are of all ranks together."""

    name: str
    model: Callable[[], nn.Module]
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    batch: int
    epochs: int
    lr: float
    momentum: float
    #: share of right answers that counts as learnt
    target: float
    weight_decay: float = 0.0
    #: share of the steps over which the learning rate rises; then it falls to zero along a cosine
    warmup: float = 0.05


TASKS = ("digits-cnn", "digits-deep", "text-mlp")


def get(name: str) -> Task:
    """The task called `name`, its data loaded."""
    if name in ("digits-cnn", "digits-deep"):
        from paceline.train.tasks.digits import task as digits

        return digits(name)
    if name == "text-mlp":
        from paceline.train.tasks.text import task

        return task()
    raise UnknownName("task", name, TASKS, f"tasks: {', '.join(TASKS)}")
