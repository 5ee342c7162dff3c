"""Run it: strategies round the user's own model, optimizer and loop, on torch.distributed.

    import paceline.train as pt

    model, optimizer = pt.parallelize(model, optimizer, plan="terngrad")

Names load what they need on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.train.parallel import close, of, parallelize

__all__ = ["close", "of", "parallelize"]

_EXPORTS = {"close": "paceline.train.parallel", "of": "paceline.train.parallel", "parallelize": "paceline.train.parallel"}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
