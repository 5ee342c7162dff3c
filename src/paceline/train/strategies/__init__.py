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

import ast
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from paceline.errors import SpecError, UnknownName
from paceline.spec.compression import SCHEMES
from paceline.train import asynchronous
from paceline.train.strategies.auto import Auto
from paceline.train.strategies.averaging import Averaging
from paceline.train.strategies.base import Strategy
from paceline.train.strategies.deferred import Overlap, Priority
from paceline.train.strategies.lazy import Lazy
from paceline.train.strategies.local import DiLoCo, LocalSGD, PostLocalSGD

T = TypeVar("T")

#: each makes a strategy from keyword options
STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "allreduce": Averaging, "overlap": Overlap, "priority": Priority, "auto": Auto,
    "lazy": Lazy, "local": LocalSGD, "post-local": PostLocalSGD, "diloco": DiLoCo,
}


def names() -> list[str]:
    """Every name that `paceline.train.parallelize` takes for a plan."""
    return ["ddp", *STRATEGIES, *SCHEMES, *asynchronous.NAMES]


def make(text: str, **options: Any) -> Strategy:
    """The strategy called `name`, with options as keywords or in words: `overlap:fc=rows`, `dgc:ratio=0.01` (settings of the scheme)."""
    name, _, given = text.partition(":")
    if name in STRATEGIES:
        return called(name, STRATEGIES[name], **{**_read(name, given), **options})
    if name in SCHEMES:
        return called(name, Averaging, text, **options)
    raise UnknownName("strategy", name, names(), f"known: {', '.join(names())}")


def called(name: str, make: Callable[..., T], *args: Any, **options: Any) -> T:
    """What `make` returns; an option that it does not take is one line that says which it has."""
    taken: list[str] = []
    for kind in getattr(make, "__mro__", (make,)):
        parameters = inspect.signature(kind).parameters.values()
        taken += [one.name for one in parameters if one.kind is not one.VAR_KEYWORD]
        if all(one.kind is not one.VAR_KEYWORD for one in parameters):  # it hands none on to the class that it is made of
            break
    taken = taken[len(args) :]
    for key in options:
        if key not in taken:
            raise UnknownName(f"option of strategy {name!r}", key, taken, f"it has {', '.join(taken)}")
    return make(*args, **options)


def _read(name: str, given: str) -> dict[str, Any]:
    """Options in words: `fc=rows,most_bytes=1000000`."""
    out: dict[str, Any] = {}
    for part in filter(None, given.split(",")):
        key, found, value = part.partition("=")
        if not found:
            raise SpecError(f"strategy {name!r}: options are written option=value, separated by commas; got {part!r}")
        try:
            out[key.strip()] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            out[key.strip()] = {"true": True, "false": False}.get(value, value)
    return out
