"""Measures a table of times to a target: tuning first, then the reported runs, seed by seed, so that what
disturbs the machine disturbs all contestants alike.

Ranks are started once for the tuning and once for the runs. Each line of `runs.jsonl` is a run that has
ended; a table that was interrupted goes on behind the last.
"""

from __future__ import annotations

import gzip
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench.tta.rules import Contestant, RaceRules, Rules
from paceline.errors import DataError, SpecError
from paceline.spec.compression import SCHEMES

#: lines of finished runs, in the folder of a table
RAW = "runs.jsonl"
#: what names a run among the lines
_NAMES = ("kind", "task", "contestant", "batch", "seed")
_TIMEOUT_S = 3600.0
#: memory of gradients stays with the process, or steps would be slow at random
_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """What is measured: every contestant at every batch on every task, with seeds from 0."""

    races: tuple[RaceRules, ...]
    contestants: tuple[Contestant, ...]
    batches: tuple[int, ...]
    seeds: int
    world: int
    rules: Rules

    def __post_init__(self) -> None:
        if not self.races or not self.contestants or not self.batches:
            raise SpecError("name at least one task, one strategy and one batch")
        if min(self.seeds, self.world - 1) < 1:
            raise SpecError(f"seeds count from 1 and ranks from 2; got {self.seeds} and {self.world}")
        for batch in self.batches:
            if batch % self.world:
                raise SpecError(f"a batch is shared by {self.world} ranks; {batch} is no multiple of that")

    def tuning(self) -> list[dict[str, Any]]:
        """Trials of learning rates, the same number for every contestant at every batch."""
        found = []
        for race in self.races:
            for batch in self.batches:
                for one in self.contestants:
                    base = race.base_rate(one, batch)
                    rates = [base * factor for factor in self.rules.factors]
                    words = self._words(race, one, batch, self.rules.tuning_seed)
                    found.append({"kind": "tuning", **words, "data": "validation", "rates": rates})
        return found

    def reported(self, rates: Mapping[tuple[str, str, int], float]) -> list[dict[str, Any]]:
        """Runs seed by seed, and before those of a task and batch what their times are predicted from; every
        seed begins with another contestant.
        """
        found: list[dict[str, Any]] = []
        for seed in range(self.seeds):
            turn = seed % len(self.contestants)
            order = (*self.contestants[turn:], *self.contestants[:turn])
            for race in self.races:
                for batch in self.batches:
                    found.append(self._facts(race, batch, seed))
                    for one in order:
                        rate = rates[race.task, one.name, batch]
                        words = self._words(race, one, batch, seed)
                        found.append({"kind": "run", **words, "lr": rate})
        return found

    def noise(self, rates: Mapping[tuple[str, str, int], float]) -> list[dict[str, Any]]:
        """Runs of plain SGD that measure the gradient noise scale, which costs them time: they are not
        reported.
        """
        plain = [one for one in self.contestants if (one.strategy, one.optimizer) == ("ddp", "sgd")]
        found = []
        for race in self.races:
            for one in plain[:1]:
                for batch in self.batches:
                    words = self._words(race, one, batch, self.rules.tuning_seed)
                    rate = rates[race.task, one.name, batch]
                    found.append({"kind": "noise", **words, "lr": rate, "noise": True})
        return found

    def _words(self, race: RaceRules, one: Contestant, batch: int, seed: int) -> dict[str, Any]:
        return {
            "task": race.task,
            "contestant": one.name,
            "strategy": one.strategy,
            "optimizer": one.optimizer,
            "batch": batch,
            "seed": seed,
            "target": race.target,
            "every": race.steps("every", batch),
            "warmup": race.warmup,
            "most": race.steps("most", batch),
        }

    def _facts(self, race: RaceRules, batch: int, seed: int) -> dict[str, Any]:
        schemes = {one.strategy for one in self.contestants}
        return {
            "kind": "facts",
            "task": race.task,
            "batch": batch,
            "seed": seed,
            "on": machine(),
            "optimizers": sorted({one.optimizer for one in self.contestants}),
            "schemes": sorted(name for name in schemes if name.partition(":")[0] in SCHEMES),
        }


def measure(field: Field, folder: Path) -> list[dict[str, Any]]:
    """All lines of a table; runs that the folder holds are not done again."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"cannot make the folder {str(folder)!r}: {error.strerror}") from None
    raw = folder / RAW
    _end_line(raw)
    _run(field.tuning(), raw, field.world)
    rates = {(one["task"], one["contestant"], one["batch"]): chosen_rate(one) for one in _tuned(field, raw)}
    _run([*field.noise(rates), *field.reported(rates)], raw, field.world)
    wanted = [*field.tuning(), *field.noise(rates), *field.reported(rates)]
    known = {_name(line): line for line in lines(raw)}
    return [known[_name(one)] for one in wanted]


def _end_line(raw: Path) -> None:
    """Ends the line that a killed run has cut off, so that the next begins on its own."""
    if raw.exists() and (whole := raw.read_bytes()) and not whole.endswith(b"\n"):
        raw.write_bytes(whole + b"\n")


def _tuned(field: Field, raw: Path) -> list[dict[str, Any]]:
    known = {_name(line): line for line in lines(raw)}
    return [known[_name(one)] for one in field.tuning()]


def _run(wanted: Sequence[Mapping[str, Any]], raw: Path, world: int) -> None:
    from paceline.train.launch import run

    known = {_name(line): line for line in lines(raw)}
    for one in wanted:
        _same(one, known.get(_name(one), one), raw)
    missing = [dict(one) for one in wanted if _name(one) not in known]
    if missing:
        arguments = {"runs": missing, "raw": str(raw.resolve())}
        run(
            "paceline.bench.tta.race:several",
            world=world,
            arguments=arguments,
            environment=_MEMORY,
            timeout_s=_TIMEOUT_S,
        )


def _same(wanted: Mapping[str, Any], known: Mapping[str, Any], raw: Path) -> None:
    """Raises where a run that was done before was done by other rules."""
    for name, value in wanted.items():
        if name != "on" and known.get(name) != value:
            raise DataError(
                f"{raw} holds {wanted['kind']} of {wanted['task']} with {name} {known.get(name)!r}, not"
                f" {value!r}; give another --output, or remove the file"
            )


def _name(line: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(line.get(name) for name in _NAMES)


def lines(raw: Path) -> list[dict[str, Any]]:
    """The runs of a file, also of one that gzip has packed; none where there is no file. What a run that was
    killed cut off is left out.
    """
    if not raw.exists():
        return []
    found = []
    whole = gzip.decompress(raw.read_bytes()) if raw.suffix == ".gz" else raw.read_bytes()
    for text in whole.decode().splitlines():
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    return found


def chosen_rate(tuned: Mapping[str, Any]) -> float:
    """The rate whose trial met the target in the fewest steps; where none did, that which came nearest."""

    def merit(trial: Mapping[str, Any]) -> tuple[bool, float, float]:
        return trial["reached_s"] is None, float(trial["steps"]), -float(trial["metric"])

    return float(min(tuned["trials"], key=merit)["lr"])


def machine() -> str:
    """This machine in words."""
    return f"{os.cpu_count()} cores, Python {platform.python_version()}, {platform.system()}"
