"""Ready-made tasks: real data that is here already, a network, a target; for time to accuracy and for trying
strategies out.

    digits-cnn    handwritten digits of scikit-learn (1,797 images of 8 x 8), a small convolutional network
    digits-deep   the same digits, a deeper network without normalisation: harder to train with large or
                  compressed steps
    digits-shifted
                  25,000 shifted, noisy copies of the digits, a network of which a run takes seconds: for
                  races with large batches
    text-mlp      the next character of the Python language reference that ships with Python, a feed-forward
                  language model
    text-small    the same with half the network, and three parts of the text that do not overlap
    mnist:FOLDER, cifar10:FOLDER, images:FOLDER
                  data that a user has (`files`)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
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
    #: what settings are chosen on, neither trained on nor tested with; None: none was set apart
    validation: tuple[Tensor, Tensor] | None = None


#: data sets that a user has in a folder
FROM_FILES = ("mnist", "cifar10", "images")
TASKS = ("digits-cnn", "digits-deep", "digits-shifted", "text-mlp", "text-small")


def get(name: str) -> Task:
    """The task called `name`, its data loaded."""
    if name in TASKS:
        from paceline.train.tasks import digits, text

        made = {"digits-shifted": digits.shifted, "text-mlp": text.task, "text-small": text.small}
        return made[name]() if name in made else digits.task(name)
    kind, _, folder = name.partition(":")
    if kind in FROM_FILES and folder:
        from paceline.train.tasks.files import task

        return task(kind, Path(folder))
    known = (*TASKS, *(f"{kind}:FOLDER" for kind in FROM_FILES))
    raise UnknownName("task", name, known, f"tasks: {', '.join(known)}")
