"""Many questions planned in one go: models x clusters x batches x sequences, on this machine or over a Ray
cluster.

A study is written as lists on the command line, or as a file:

    models = ["llama3-8b", "llama3-70b"]
    clusters = ["8xdgx-h100", "8xdgx-a100"]        # or gpus = "64..512" and device = "h100-sxm"
    gbs = [256, 512]
    seq = [8192]
    objective = "time"                             # and whatever else `paceline.plan` takes: fix, forbid,
                                                   # allow, top, most...
    [[question]]                                   # besides the products: single ones, with what they change
    model = "vgg16"
    cluster = "8xp100-node-10gbe"
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from paceline import on_ray
from paceline.errors import DoesNotFit, PlanError, SpecError, UnknownName
from paceline.plan.workers import Interrupted
from paceline.spec.facts import read_text
from paceline.spec.planned import Answer, Question, Study

#: keys of a file that hold what is multiplied, and the word of a question that each gives
_AXES = {"models": "model", "clusters": "cluster", "gbs": "gbs", "seq": "seq"}
_WORDS = ("gpus", "device")
#: what else a question may set: words of `paceline.plan`
_OPTIONS = (
    "objective",
    "fix",
    "forbid",
    "allow",
    "tokens",
    "deadline_s",
    "price_per_s",
    "top",
    "pareto",
    "most",
    "image",
    "precision",
    "optimizer",
)


def questions(
    models: Sequence[str],
    clusters: Sequence[str] = (),
    gbs: Sequence[int] = (),
    seq: Sequence[int] = (),
    *,
    gpus: str | None = None,
    device: str | None = None,
    **options: Any,
) -> list[Question]:
    """Every model on every cluster with every batch (samples) and sequence (tokens)."""
    nothing = (None,)
    return [
        Question(
            model=model, cluster=cluster, gbs=batch, seq=length, gpus=gpus, device=device, options=options
        )
        for model, cluster, batch, length in product(
            models, clusters or nothing, gbs or nothing, seq or nothing
        )
    ]


def read(path: Path | str, said: Mapping[str, Any] | None = None) -> list[Question]:
    """The questions of a study's file; what was `said` beside it counts as written at its top."""
    try:
        data = tomllib.loads(read_text(path, "study"))
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{path}: not valid TOML: {error}") from None
    both = next((key for key in said or () if key in data), None)
    if both:
        raise SpecError(f"{both} is given twice: by {path} and beside it; leave one of them out")
    data |= said or {}
    single = data.pop("question", [])
    _known(path, data, (*_AXES, *_WORDS, *_OPTIONS))
    shared = {key: value for key, value in data.items() if key not in _AXES}
    models, clusters, gbs, seq = (_list(data.get(key, [])) for key in _AXES)
    out = questions(models, clusters, gbs, seq, **shared)
    for entry in single if isinstance(single, list) else [single]:
        _known(path, entry, (*_AXES.values(), *_WORDS, *_OPTIONS))
        where = (
            {} if {"cluster", *_WORDS} & {*entry} else {key: shared[key] for key in _WORDS if key in shared}
        )
        rest = {key: value for key, value in shared.items() if key not in _WORDS}
        own = {**where, **rest, **entry}
        words = {key: own.pop(key, None) for key in (*_AXES.values(), *_WORDS)}
        if not words["model"]:
            raise SpecError(f"{path}: a [[question]] needs a model")
        out.append(Question(**words, options=own))
    if not out:
        raise SpecError(f"{path}: no question; a study has models = [...] or [[question]]")
    return out


def _known(path: Path | str, table: Mapping[str, Any], allowed: Sequence[str]) -> None:
    for key in table:
        if key not in allowed:
            raise UnknownName(f"key of the study {path}", key, allowed, f"allowed: {', '.join(allowed)}")


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def study(
    asked: Sequence[Question],
    answer: Callable[[Question], Answer],
    *,
    engine: str = "local",
    progress: Callable[[int, int], None] | None = None,
) -> Study:
    """The answers to some questions, in their order; `answer` is a function of a module. The engine changes
    when they come, not what they are.
    """
    on_ray.check(engine)
    begun = time.monotonic()

    def tell(done: int) -> None:
        if progress:
            progress(done, len(asked))

    interrupted = False
    if engine == "ray":
        found = on_ray.over(answer, asked, tell)
    else:
        found = []
        for question in asked:
            try:
                found.append(answer(question))
            except KeyboardInterrupt as stop:
                if not found:
                    raise Interrupted(
                        f"the first of {len(asked)} questions has no answer yet; {stop}".removesuffix("; ")
                    ) from None
                interrupted = True
                break
            tell(len(found))
            planned = found[-1].planned
            if planned is not None and planned.interrupted:
                interrupted = True
                break
    if all(one.planned is None for one in found):
        kind = PlanError if any(one.fits for one in found) else DoesNotFit
        first = found[0].error
        if len(found) > 1:
            first = f"none of the {len(found)} questions has a plan; the first: {first}"
        raise kind(first)
    return Study(
        answers=tuple(found), engine=engine, elapsed_s=time.monotonic() - begun, interrupted=interrupted
    )
