"""Training in which workers do not wait for each other, or not for all: parameter servers, elastic averaging,
Hogwild, gossip.

    model, optimizer = strategies()["ps-async"](model, optimizer, servers=2)
    for x, y in loader:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

Processes find each other through `PACELINE_RENDEZVOUS` (set by `launch.Local`) or torchrun's variables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: (model, optimizer, options) -> the model and optimizer to use in the loop
Factory = Callable[..., "tuple[torch.nn.Module, Any]"]

NAMES = ("ps-async", "ps-sync", "ps-bounded", "ps-backup", "easgd", "easgd-sync", "hogwild", "gossip")


def world() -> int:
    """Workers of a run, as the launcher says."""
    from paceline.train.asynchronous import meeting

    return meeting.world(None)


def strategies() -> dict[str, Factory]:
    """Every strategy by name; each takes the model, the optimizer and keyword options, and returns both ready
    for the loop.
    """
    from paceline.train.asynchronous import wrap

    return wrap.FACTORIES


__all__ = ["NAMES", "Factory", "strategies", "world"]
