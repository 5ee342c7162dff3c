"""Run it: strategies round the user's own model, optimizer and loop, on torch.distributed.

    import paceline.train as pt

    model, optimizer = pt.parallelize(model, optimizer, plan="terngrad")

Names load what they need on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.train.checkpoint import Checkpoints
    from paceline.train.job import Job, join
    from paceline.train.memory import recompute
    from paceline.train.optim import LAMB, LARS, BatchGrowth, NoiseScale, scaled_lr, warmup
    from paceline.train.parallel import close, of, parallelize
    from paceline.train.pipeline import Pipeline
    from paceline.train.precision import Scaler
    from paceline.train.ranges import Ranges

__all__ = [
    "LAMB",
    "LARS",
    "BatchGrowth",
    "Checkpoints",
    "Job",
    "NoiseScale",
    "Pipeline",
    "Ranges",
    "Scaler",
    "close",
    "join",
    "of",
    "parallelize",
    "recompute",
    "scaled_lr",
    "warmup",
]

_EXPORTS = {
    "Checkpoints": "checkpoint",
    "LAMB": "optim",
    "LARS": "optim",
    "BatchGrowth": "optim",
    "NoiseScale": "optim",
    "scaled_lr": "optim",
    "warmup": "optim",
    "close": "parallel",
    "of": "parallel",
    "parallelize": "parallel",
    "recompute": "memory",
    "Ranges": "ranges",
    "Scaler": "precision",
    "Pipeline": "pipeline",
    "Job": "job",
    "join": "job",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
