"""Capture a live module without touching it: its state is exchanged for a copy while the step is traced.

Every submodule stays the same object, so that closures and hooks which refer to it work. For the time of the
capture its `__dict__` (parameters, buffers, hooks, training mode, plain attributes) is a deep copy with
floating-point parameters and buffers on meta. What the step changes or leaves behind goes with the copy.
"""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from paceline.capture.build import SMALL, as_meta
from paceline.errors import CaptureError

_IMMUTABLE = (bool, int, float, str, type(None))
_TABLES = (dict, OrderedDict, set)


@contextmanager
def stand_ins(modules: Sequence[nn.Module], dtype: torch.dtype | None, channels_last: bool) -> Iterator[None]:
    """Within it, the modules hold copies of their state: floating-point tensors on meta, tied ones tied."""
    every = list({id(sub): sub for module in modules for sub in module.modules()}.values())
    memo: dict[int, Any] = {id(sub): sub for sub in every}
    for sub in every:
        for name, old in [*sub._parameters.items(), *sub._buffers.items()]:
            if old is not None and id(old) not in memo:
                memo[id(old)] = _stand_in(name, old, dtype, channels_last)
    with _CopyOfTensors():
        copies = [
            {name: _copied(_untrained(name, value), memo) for name, value in vars(sub).items()}
            for sub in every
        ]
    originals = [vars(sub) for sub in every]
    # a hook may take itself away by a handle that it has from outside the module
    values = [value for state in originals for value in state.values()]
    tables = [(value, dict(value)) for value in values if type(value) in (dict, OrderedDict)]
    try:
        for sub, state in zip(every, copies, strict=True):
            object.__setattr__(sub, "__dict__", state)  # a module's own __setattr__ sorts values into tables
        yield
    finally:
        for sub, state in zip(every, originals, strict=True):
            object.__setattr__(sub, "__dict__", state)
        for table, entries in tables:
            table.clear()
            table.update(entries)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Within it, random numbers may be drawn from torch, numpy and Python that later draws do not miss."""
    python, legacy_numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy_numpy)


class _CopyOfTensors(TorchFunctionMode):
    """Deep copies of plain tensors: large floating-point ones are empty on meta, others keep their values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        old, memo = args
        if id(old) not in memo:
            memo[id(old)] = _plain_copy(old)
        return memo[id(old)]


def _plain_copy(old: torch.Tensor) -> torch.Tensor:
    if old.is_floating_point() and old.numel() > SMALL:
        return as_meta(old, None, False)
    return old.detach().clone()


def _stand_in(name: str, old: torch.Tensor, dtype: torch.dtype | None, channels_last: bool) -> torch.Tensor:
    """What takes the place of a registered tensor; integers keep their values."""
    if nn.parameter.is_lazy(old):
        raise CaptureError(f"{name!r} of a lazy module has no shape; run one batch through the module first")
    if hasattr(old, "device_mesh"):  # importing DTensor, to ask for its type, takes seconds
        raise CaptureError(
            f"{name!r} is a DTensor: the module is sharded already (by FSDP2 or tensor parallelism); capture"
            " it before, or a second instance"
        )
    if not old.is_floating_point():
        kept = old.detach() if old.is_meta else old.detach().to("cpu", copy=True)
        return nn.Parameter(kept, requires_grad=False) if isinstance(old, nn.Parameter) else kept
    fresh = as_meta(old, dtype, channels_last)
    return nn.Parameter(fresh, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else fresh


def _untrained(name: str, value: Any) -> Any:
    """Of a table of hooks, those that are not of a training strategy: it would send tensors without data."""
    if not name.endswith("_hooks") or type(value) not in (dict, OrderedDict) or not value:
        return value
    return type(value)((key, hook) for key, hook in value.items() if not _of_training(hook))


def _of_training(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith("paceline.train.")


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy; what cannot be copied (a lock, a process group) is shared."""
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if kind in _TABLES and not value:  # most tables of hooks; deepcopy is slow on them
        return kind()
    known = len(memo)
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        while len(memo) > known:  # halves of copies that were begun
            memo.popitem()
        return value
