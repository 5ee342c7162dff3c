"""`text-mlp` and `text-small`: the next character of the Python language reference, as `pydoc_data` ships it
with every Python.

The network is that of Bengio et al., A Neural Probabilistic Language Model, 2003, over characters.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch import nn

from paceline.train.tasks import Task

CONTEXT = 16
#: characters that are kept; all others become the first
_ALPHABET = "\0\n abcdefghijklmnopqrstuvwxyz0123456789.,:;()[]{}<>=+-*/\"'_`|"
#: of the text, samples to train on and to test on
_TRAIN, _TEST = 60_000, 20_000
#: of `text-small`, samples to test on, and as many to choose settings on
_HELD = 5_000
#: and characters of a page
_PAGE = 2_000
#: units of the hidden layer
_HIDDEN, _SMALL_HIDDEN = 256, 128


def task() -> Task:
    """Samples drawn once from the first nine tenths and the last tenth of the text."""
    codes = _codes()
    cut = len(codes) * 9 // 10
    return Task(
        name="text-mlp",
        model=model,
        train=_samples(codes[:cut], _TRAIN, 0),
        test=_samples(codes[cut:], _TEST, 1),
        batch=512,
        epochs=32,
        lr=0.2,
        momentum=0.9,
        weight_decay=1e-3,
        target=0.5,
    )


def small() -> Task:
    """Eight tenths of the text's pages to train on, one to choose settings on, one to test on: pages by
    chance, as neighbours are alike.
    """
    codes = _codes()
    pages = list(codes.split(_PAGE))
    order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(0)).tolist()
    ends = [0, len(pages) * 8 // 10, len(pages) * 9 // 10, len(pages)]
    train, validation, test = (
        torch.cat([pages[place] for place in order[start:end]]) for start, end in pairwise(ends)
    )
    return Task(
        name="text-small",
        model=partial(model, _SMALL_HIDDEN),
        train=_samples(train, _TRAIN, 0),
        validation=_samples(validation, _HELD, 2),
        test=_samples(test, _HELD, 1),
        batch=512,
        epochs=8,
        lr=0.2,
        momentum=0.9,
        target=0.4,
    )


def _codes() -> torch.Tensor:
    """The text as places in the alphabet."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[key] for key in sorted(topics)).lower()
    place = {character: i for i, character in enumerate(_ALPHABET)}
    return torch.tensor([place.get(character, 0) for character in text], dtype=torch.int64)


def _samples(codes: torch.Tensor, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randperm(len(codes) - CONTEXT, generator=torch.Generator().manual_seed(seed))[:count]
    return codes[starts[:, None] + torch.arange(CONTEXT)], codes[starts + CONTEXT]


def model(hidden: int = _HIDDEN) -> nn.Module:
    """Embeddings of the last characters, a hidden layer; 120,000 parameters, half as many with half of it."""
    return nn.Sequential(
        nn.Embedding(len(_ALPHABET), 24),
        nn.Flatten(),
        nn.Linear(24 * CONTEXT, hidden),
        nn.Tanh(),
        nn.Linear(hidden, len(_ALPHABET)),
    )
