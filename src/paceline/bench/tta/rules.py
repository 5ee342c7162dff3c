"""Rules of races to a target, as `contests.toml` has them: contestants, tuning, targets and limits, all fixed
before the runs.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from importlib.resources import files
from pathlib import Path
from typing import Any

from paceline.errors import SpecError, UnknownName
from paceline.spec.facts import read_text

#: the rules that ship, and the table of tasks that these do not name
SHIPPED, OTHERS = "contests.toml", "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """How gradients become updates: a strategy of `paceline.train` and an optimizer."""

    name: str
    strategy: str
    optimizer: str = "sgd"
    #: of the task's learning rate
    rate: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceRules:
    """A task's target and limits; `every` (between evaluations) and `most` in samples, `warmup` in steps."""

    task: str
    target: float
    #: the day on which the target was fixed, and why it is this one
    fixed: str
    why: str
    #: learning rate of plain SGD at `rate_batch`; it grows with the cube root of the batch
    rate: float
    rate_batch: int
    every: int
    warmup: int
    most: int

    def steps(self, name: str, batch: int) -> int:
        """`every` or `most` as steps of a batch, at least one."""
        return max(1, int(getattr(self, name) // batch))

    def base_rate(self, contestant: Contestant, batch: int) -> float:
        """The rate that the factors of the tuning multiply."""
        return self.rate * contestant.rate * math.cbrt(batch / self.rate_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """All of a file."""

    contestants: Mapping[str, Contestant]
    tasks: Mapping[str, RaceRules]
    #: words of tasks that are not named
    others: Mapping[str, Any]
    #: learning rates that every contestant tries on every batch, as factors, and the seed of these trials
    factors: tuple[float, ...]
    tuning_seed: int

    def contestant(self, name: str) -> Contestant:
        """One by its name, or any strategy of `paceline.train` with SGD."""
        if name in self.contestants:
            return self.contestants[name]
        from paceline.train.parallel import name_of
        from paceline.train.strategies import names

        known = tuple(dict.fromkeys([*self.contestants, *names()]))
        if name_of(name) not in known:
            raise UnknownName("contestant", name, known, f"contestants: {', '.join(known)}")
        return Contestant(name=name, strategy=name)

    def race(self, task: str, target: float | None = None) -> RaceRules:
        """The rules of a task; a target that is given here counts as fixed today."""
        if target is not None and not 0 < target <= 1:
            raise SpecError(f"a target is a share of right answers above 0 and up to 1, got {target:g}")
        found = self.tasks.get(task)
        if found is not None and target in (None, found.target):
            return found
        if target is None:
            known = ", ".join(self.tasks)
            raise SpecError(f"{task} has no target in the rules, which have {known}; give one with --target")
        words = {**self.others, "rate": _usual_rate(task)} if found is None else _words(found)
        given = {"target": target, "fixed": date.today().isoformat(), "why": "given with the command"}
        return RaceRules(**{**words, "task": task, **given})


def _words(rules: RaceRules) -> dict[str, Any]:
    return {name: getattr(rules, name) for name in RaceRules.__dataclass_fields__}


def _usual_rate(task: str) -> float:
    from paceline.train.tasks import get

    return get(task).lr


def read(path: Path | None = None) -> Rules:
    """The rules in a file, or those that ship."""
    where = str(path or SHIPPED)
    text = (
        files(__package__).joinpath(SHIPPED).read_text(encoding="utf-8")
        if path is None
        else read_text(path, "rules")
    )
    try:
        data = tomllib.loads(text)
        tasks = dict(data["tasks"])
        others = tasks.pop(OTHERS, {})
        return Rules(
            contestants={name: Contestant(name=name, **words) for name, words in data["contestants"].items()},
            tasks={name: RaceRules(task=name, **words) for name, words in tasks.items()},
            others=others,
            factors=tuple(data["tuning"]["factors"]),
            tuning_seed=data["tuning"]["seed"],
        )
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{where}: not valid TOML: {error}") from None
    except KeyError as error:
        raise SpecError(f"{where}: no {error}; rules have [contestants], [tuning] and [tasks.NAME]") from None
    except TypeError as error:
        said = str(error).partition(" ")[2] or str(error)
        raise SpecError(f"{where}: {said}; start from the rules that ship ({SHIPPED})") from None
