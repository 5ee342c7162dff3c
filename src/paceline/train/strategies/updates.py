"""The user's optimizer on flat stretches of parameters: a clone of it per piece, with the state of just that
piece.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from paceline.train.layout import Slot


def clone(optimizer: Optimizer, group: int, flat: Tensor) -> Optimizer:
    """An optimizer of the same kind for one flat tensor; its settings are set before each step."""
    twin = copy.copy(optimizer)
    for name in ("step", "state_dict", "load_state_dict", "_paceline"):  # the strategy's, on the instance
        twin.__dict__.pop(name, None)
    twin.state = defaultdict(dict)
    twin.param_groups = [{**optimizer.param_groups[group], "params": [flat]}]
    return twin


def settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Learning rate and the like of each group, as they are now."""
    return [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]


def update(twin: Optimizer, now: Mapping[str, Any], gradient: Tensor) -> None:
    """One step of a clone."""
    (flat,) = twin.param_groups[0]["params"]
    twin.param_groups[0].update(now)
    flat.grad = gradient
    twin.step()
    flat.grad = None


def take_state(
    twin: Optimizer, full: Mapping[Any, Mapping[str, Any]], slots: list[Slot], start: int, stop: int
) -> None:
    """Fills a clone's state for elements [start, stop) of a buffer from the state of whole parameters."""
    (flat,) = twin.param_groups[0]["params"]
    found = [
        (slot, full[slot.parameter])
        for slot in slots
        if full.get(slot.parameter) and slot.start < stop and slot.stop > start
    ]
    for slot, entries in found:
        for name, value in entries.items():
            own = twin.state[flat]
            if isinstance(value, Tensor) and value.shape == slot.parameter.shape and value.dim() > 0:
                if name not in own:
                    own[name] = flat.new_zeros(stop - start, dtype=value.dtype)
                low, high = max(slot.start, start), min(slot.stop, stop)
                own[name][low - start : high - start] = value.reshape(-1)[
                    low - slot.start : high - slot.start
                ]
            else:
                own.setdefault(name, value.clone() if isinstance(value, Tensor) else copy.copy(value))


def spread_state(
    entries: Mapping[str, Any],
    whole: Mapping[str, Tensor],
    slots: list[Slot],
    start: int,
    into: dict[Any, dict[str, Any]],
) -> None:
    """The reverse for one piece: `whole` holds the piece's state tensors gathered from all ranks, from
    element `start` of the buffer on.
    """
    stop = start + (next(iter(whole.values())).numel() if whole else 0)
    for slot in slots:
        target = into.setdefault(slot.parameter, {})
        for name, value in entries.items():
            if name not in whole:
                target.setdefault(name, value.clone() if isinstance(value, Tensor) else copy.copy(value))
                continue
            if name not in target:
                target[name] = slot.parameter.new_zeros(slot.parameter.shape, dtype=whole[name].dtype)
            low, high = max(slot.start, start), min(slot.stop, stop)
            target[name].view(-1)[low - slot.start : high - slot.start] = whole[name][
                low - start : high - start
            ]
