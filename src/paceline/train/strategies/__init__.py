"""Ways to keep replicas in sync, by name.

ddp           torch's own DistributedDataParallel: the baseline
allreduce     the same from our engine: buckets reduced during the backward pass
overlap       gradients exchanged during the backward pass, parameters gathered under the next forward pass
priority      all-reduce; the layers needed first go first, updates hide under the next forward pass
lazy          as priority; gradients of bottom layers add up for a few steps first
local-sgd, post-local, diloco     replicas averaged now and then
auto          watches a few steps, then takes what is fastest here; exact, unless `loss` allows more
terngrad, dgc, powersgd, qsgd, signsgd, onebit, topk, randomk, fp16, bf16     compressed averaging, settings
as in `dgc:ratio=0.01`
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, get_args

from paceline.errors import SpecError, UnknownName
from paceline.extend import claim, named
from paceline.spec.compression import SCHEMES
from paceline.spec.synchronisation import AVERAGE
from paceline.spec.vocabulary import ALIASES
from paceline.train import asynchronous
from paceline.train.strategies.auto import Auto
from paceline.train.strategies.averaging import Averaging
from paceline.train.strategies.base import Strategy
from paceline.train.strategies.ddp import DDP
from paceline.train.strategies.lazy import Lazy
from paceline.train.strategies.local import DiLoCo, LocalSGD, PostLocalSGD

T = TypeVar("T")

#: kinds of options that can be told apart in words
_KINDS: Mapping[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
#: each makes a strategy from keyword options
STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "ddp": DDP,
    **{name: named(average.strategy) for name, average in AVERAGE.items()},
    "auto": Auto,
    "lazy": Lazy,
    "local-sgd": LocalSGD,
    "post-local": PostLocalSGD,
    "diloco": DiLoCo,
}


def names() -> list[str]:
    """Every name that `paceline.train.parallelize` takes for a plan."""
    return [*STRATEGIES, *SCHEMES, *asynchronous.NAMES]


def register(name: str, make: Callable[..., Strategy]) -> None:
    """Makes `name` a strategy: `make` returns one for keyword options."""
    claim("strategy", name, make, STRATEGIES)
    STRATEGIES[name] = make


def make(text: str, **options: Any) -> Strategy:
    """The strategy called `name`, with options as keywords or in words: `overlap:fc=rows`, `dgc:ratio=0.01`
    (settings of the scheme).
    """
    name, _, given = text.partition(":")
    name = ALIASES.get(name, name)
    if name in STRATEGIES:
        return called(name, STRATEGIES[name], **{**words(name, given, STRATEGIES[name]), **options})
    if name in SCHEMES:
        return called(name, Averaging, text, **options)
    raise UnknownName("strategy", name, names(), f"known: {', '.join(names())}")


def called(name: str, make: Callable[..., T], *args: Any, **options: Any) -> T:
    """What `make` returns; an option that it does not take is one line that says which it has."""
    known(name, options, list(_taken(make))[len(args) :])
    return make(*args, **options)


def known(name: str, options: Iterable[str], taken: Sequence[str]) -> None:
    """Raises where an option is none that the strategy takes."""
    for key in options:
        if key not in taken:
            raise UnknownName(f"option of strategy {name!r}", key, taken, f"it has {', '.join(taken)}")


def words(name: str, given: str, make: Callable[..., Any], first: int = 0) -> dict[str, Any]:
    """Options in words, `fc=rows,most_bytes=1000000`, for what `make` takes behind its `first` arguments;
    each of the kind that it asks for.
    """
    taken = dict(list(_taken(make).items())[first:])
    out: dict[str, Any] = {}
    for part in filter(None, given.split(",")):
        key, found, value = (one.strip() for one in part.partition("="))
        if not found:
            raise SpecError(
                f"strategy {name!r}: options are written option=value, separated by commas; got {part!r}"
            )
        known(name, [key], list(taken))
        out[key] = _value(name, key, value, taken[key])
    return out


def _value(name: str, key: str, text: str, wanted: Any) -> Any:
    """The value of an option, of the kind that is wanted, as far as that can be told in words."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = {"true": True, "false": False}.get(text.lower(), text)
    kinds = {kind for kind in get_args(wanted) or (wanted,) if kind is not type(None)}
    read = {int, float} if type(value) is int else {type(value)}
    if kinds <= _KINDS.keys() and not kinds & read:
        allowed = " or ".join(sorted(_KINDS[kind] for kind in kinds))
        raise SpecError(f"strategy {name!r}: {key} must be {allowed}; got {text!r}")
    return value


def _taken(make: Callable[..., Any]) -> dict[str, Any]:
    """Options by name, with their types as far as they are known; a class may hand some on to the one that it
    is made of.
    """
    taken: dict[str, Any] = {}
    for kind in getattr(make, "__mro__", (make,)):
        try:
            parameters = inspect.signature(kind, eval_str=True).parameters
        except NameError:  # a type is imported for type checkers only
            parameters = inspect.signature(kind).parameters
        own = {p.name: p.annotation for p in parameters.values() if p.kind is not p.VAR_KEYWORD}
        taken |= {name: own[name] for name in own if name not in taken}
        if len(own) == len(parameters):
            break
    return taken
