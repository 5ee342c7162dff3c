"""Ways to keep the replicas of a model one model, by name.

    ddp           torch's own DistributedDataParallel: the baseline
    allreduce     the same from our engine: buckets reduced during the backward pass
    overlap       gradients exchanged during the backward pass, parameters gathered under the next forward pass
    priority      all-reduce; the layers needed first go first, updates hide under the next forward pass
    lazy          as priority; gradients of bottom layers add up for a few steps first
    local, post-local, diloco     replicas averaged now and then
    auto          watches a few steps, then takes what is fastest here
    terngrad, dgc, powersgd, qsgd, signsgd, onebit, topk, randomk, fp16, bf16     compressed averaging, settings as in `dgc:ratio=0.01`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.errors import SpecError, UnknownName
from paceline.spec.compression import SCHEMES
from paceline.train import asynchronous
from paceline.train.strategies.auto import Auto
from paceline.train.strategies.averaging import Averaging
from paceline.train.strategies.base import Strategy
from paceline.train.strategies.deferred import Overlap, Priority
from paceline.train.strategies.lazy import Lazy
from paceline.train.strategies.local import DiLoCo, LocalSGD, PostLocalSGD

#: each makes a strategy from keyword options
STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "allreduce": Averaging, "overlap": Overlap, "priority": Priority, "auto": Auto,
    "lazy": Lazy, "local": LocalSGD, "post-local": PostLocalSGD, "diloco": DiLoCo,
}


def names() -> list[str]:
    """Every name that `paceline.train.parallelize` takes for a plan."""
    return ["ddp", *STRATEGIES, *SCHEMES, *asynchronous.NAMES]


def make(text: str, **options: Any) -> Strategy:
    """The strategy called `name`, or the compressed averaging that `scheme:setting=value,...` describes."""
    name = text.partition(":")[0]
    if name in STRATEGIES and name == text:
        try:
            return STRATEGIES[name](**options)
        except TypeError as error:
            raise SpecError(f"strategy {name!r}: {str(error).partition('()')[2].strip() or error}") from None
    if name in SCHEMES:
        return Averaging(text, **options)
    raise UnknownName("strategy", name, names(), f"known: {', '.join(names())}")
