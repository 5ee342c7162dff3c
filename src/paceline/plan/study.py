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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from paceline import on_ray
from paceline.errors import DoesNotFit, PlanError, SpecError, UnknownName
from paceline.plan.workers import Interrupted
from paceline.spec.facts import read_toml
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
    **shared: Any,
) -> list[Question]:
    """Every model on every cluster with every batch (samples) and sequence (tokens); words and options that
    they share.
    """
    several = product(models, *(values or [None] for values in (clusters, gbs, seq)))
    return [_question(shared | dict(zip(_AXES.values(), words, strict=True))) for words in several]


def _question(said: dict[str, Any]) -> Question:
    words = {name: said.pop(name, None) for name in (*_AXES.values(), *_WORDS)}
    return Question(**words, options=said)


def read(path: Path | str, said: Mapping[str, Any] | None = None) -> list[Question]:
    """The questions of a study's file; what was `said` beside it counts as written at its top."""
    data = read_toml(path, "study")
    for key in said or ():
        if key in data:
            raise SpecError(f"{key} is given twice: by {path} and beside it; leave one of them out")
    data |= said or {}
    single = _list(data.pop("question", []))
    _known(path, data, _AXES)
    axes = [_list(data.pop(key, [])) for key in _AXES]
    out = questions(*axes, **data) + [_single(path, entry, data) for entry in single]
    if not out:
        raise SpecError(f"{path}: no question; a study has models = [...] or [[question]]")
    return out


def _single(path: Path | str, entry: dict[str, Any], shared: Mapping[str, Any]) -> Question:
    """A question of its own; where it says where, what all share does not."""
    _known(path, entry, _AXES.values())
    if not entry.get("model"):
        raise SpecError(f"{path}: a [[question]] needs a model")
    placed = not entry.keys().isdisjoint(("cluster", *_WORDS))
    left = {name: value for name, value in shared.items() if not (placed and name in _WORDS)}
    return _question(left | entry)


def _known(path: Path | str, table: Mapping[str, Any], axes: Iterable[str]) -> None:
    allowed = (*axes, *_WORDS, *_OPTIONS)
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

    found = on_ray.over(answer, asked, tell) if engine == "ray" else list(_in_turn(asked, answer, tell))
    if all(one.planned is None for one in found):
        raise _nothing(found)
    last = found[-1].planned
    stopped = len(found) < len(asked) or (last is not None and last.interrupted)
    elapsed_s = time.monotonic() - begun
    return Study(answers=tuple(found), engine=engine, elapsed_s=elapsed_s, interrupted=stopped)


def _nothing(found: Sequence[Answer]) -> PlanError:
    """What no question has an answer for."""
    kind = PlanError if any(one.fits for one in found) else DoesNotFit
    several = f"none of the {len(found)} questions has a plan; the first: " if len(found) > 1 else ""
    return kind(several + found[0].error)


def _in_turn(
    asked: Sequence[Question], answer: Callable[[Question], Answer], tell: Callable[[int], None]
) -> Iterator[Answer]:
    """Answers one after another; Ctrl-C ends them after the first, and so does an answer that was
    interrupted.
    """
    for done, question in enumerate(asked):
        try:
            found = answer(question)
        except KeyboardInterrupt as stop:
            if done:
                return
            text = f"the first of {len(asked)} questions has no answer yet; {stop}"
            raise Interrupted(text.removesuffix("; ")) from None
        yield found
        tell(done + 1)
        if found.planned is not None and found.planned.interrupted:
            return
