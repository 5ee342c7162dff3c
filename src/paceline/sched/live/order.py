"""What a user submits: a command, and what the scheduler may know of it. In TOML, one job or a list of `[[job]]`:

    [[job]]
    name = "digits"
    command = ["python", "train.py"]      # honours TERM by checkpointing, goes on from its checkpoint
    devices = 1
    least = 1                             # sizes it can run at
    most = 4
    work = 400                            # steps
    rates = { 1 = 10, 2 = 18, 4 = 30 }    # steps per second by devices; or: seconds = "2 h", overhead = 0.02
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import units
from paceline.errors import SpecError, UnitError, nearest
from paceline.sched.job import Job
from paceline.sched.speed import Scaling, Speed, Table
from paceline.spec.facts import read_text

#: seconds from being given devices to the first step, where nobody says
_RESTART_S = 10.0
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")
_TIMES = ("submit", "seconds", "restart", "checkpoint_every")
_WHOLE = ("devices", "least", "most", "priority", "retries")
_KEYS = {"name", "command", "folder", "environment", "work", "rates", "overhead", "powers_of_two", "tenant", *_TIMES, *_WHOLE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A job as it was handed in. `given` holds what was written, checked, with times in seconds and the folder absolute."""

    name: str
    command: tuple[str, ...]
    #: where the command runs
    folder: str
    environment: Mapping[str, str]
    #: seconds after the scheduler's start at which it counts as submitted; 0: at once
    submit_s: float
    #: times in a row that it is started again without having come further, after a signal killed it or its node was lost
    retries: int
    given: Mapping[str, Any]

    @staticmethod
    def of(given: Mapping[str, Any], folder: Path, where: str = "") -> Order:
        """Checks what was written; relative folders count from `folder`."""
        name = given.get("name")
        at = f"{where}: job {name!r}" if where else f"job {name!r}"
        if not isinstance(name, str) or not _NAME.match(name):
            raise SpecError(f"{at}: a name has up to 64 letters, digits, '-' and '_', and starts with a letter or digit")
        for key in given:
            if key not in _KEYS:
                near = nearest(key, _KEYS)
                raise SpecError(f"{at}: unknown key {key!r}; " + (f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(sorted(_KEYS))}"))
        plain: dict[str, Any] = {key: value for key, value in given.items() if key not in ("rates", *_TIMES)}
        plain |= {key: _seconds(given[key], key, at) for key in _TIMES if key in given}
        for key in _WHOLE:
            if key in given and (isinstance(given[key], bool) or not isinstance(given[key], int)):
                raise SpecError(f"{at}: {key} must be a whole number, got {given[key]!r}")
        if "rates" in given:
            plain["rates"] = _rates(given["rates"], at)
        plain["folder"] = str((folder / str(given.get("folder", "."))).absolute())
        plain["command"] = list(_command(given.get("command"), at))
        plain["environment"] = _environment(given.get("environment", {}), at)
        order = Order(
            name=name, command=tuple(plain["command"]), folder=plain["folder"], environment=plain["environment"],
            submit_s=plain.get("submit", 0.0), retries=plain.get("retries", 3), given=plain,
        )
        order.job(("any",))
        return order

    def job(self, kinds: Iterable[str], submit_s: float = 0.0) -> Job:
        """The job that the scheduler sees, on devices of these kinds."""
        given = self.given
        more = {key: given[key] for key in ("least", "most", "priority", "powers_of_two", "tenant") if key in given}
        work, speed = self._speed(kinds)
        job = Job(
            name=self.name, submit_s=submit_s, work=work, speed=speed, devices=given.get("devices", 1), restart_s=given.get("restart", _RESTART_S),
            checkpoint_every_s=given.get("checkpoint_every", 0.0), **more,
        )
        for kind in {*kinds}:
            if stuck := [n for n in job.sizes(job.most) if not speed.rate((n,), kind, 0, False) > 0]:
                raise SpecError(f"job {self.name!r}: no speed is known on {stuck[0]} devices; rates must begin at its smallest size")
        return job

    def _speed(self, kinds: Iterable[str]) -> tuple[float, Speed]:
        """Work, and work per second."""
        given, devices = self.given, self.given.get("devices", 1)
        if ("rates" in given) == ("seconds" in given):
            raise SpecError(f"job {self.name!r}: give either rates (work per second by devices) or seconds (run time on its devices)")
        if "rates" in given:
            if "work" not in given:
                raise SpecError(f"job {self.name!r}: with rates goes work, the total in the same unit")
            table = {int(size): rate for size, rate in given["rates"].items()}
            return float(given["work"]), Table(dict.fromkeys(kinds, table))
        scaling = Scaling(devices, float(given.get("overhead", 0.02)))
        if "work" not in given:
            return given["seconds"], scaling
        each = float(given["work"]) / given["seconds"]
        sizes = range(given.get("least") or devices, (given.get("most") or devices) + 1)
        return float(given["work"]), Table({kind: {n: each * scaling.rate((n,), kind, 0, False) for n in sizes} for kind in kinds})


def _seconds(value: Any, key: str, at: str) -> float:
    try:
        seconds = units.parse(value, "time")
    except UnitError as error:
        raise SpecError(f"{at}: {key}: {error}") from None
    if seconds < 0 or (key == "seconds" and seconds == 0):
        raise SpecError(f"{at}: {key} must be {'above zero' if key == 'seconds' else 'zero or more'}, got {value!r}")
    return seconds


def _rates(value: Any, at: str) -> dict[str, float]:
    if not isinstance(value, Mapping) or not value:
        raise SpecError(f"{at}: rates are written {{ DEVICES = WORK_PER_SECOND, ... }}, got {value!r}")
    for size, rate in value.items():
        if not str(size).isdigit() or int(size) < 1 or isinstance(rate, bool) or not isinstance(rate, (int, float)) or not rate > 0:
            raise SpecError(f"{at}: rates are written {{ DEVICES = WORK_PER_SECOND, ... }} with numbers above zero, got {size} = {rate!r}")
    return {str(size): float(rate) for size, rate in value.items()}


def _command(value: Any, at: str) -> tuple[str, ...]:
    if isinstance(value, str):
        try:
            value = shlex.split(value)
        except ValueError as error:
            raise SpecError(f"{at}: command {value!r}: {error}") from None
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(word, str) for word in value):
        raise SpecError(f"{at}: command must be a list of words or one line (no shell reads it), got {value!r}")
    return tuple(value)


def _environment(value: Any, at: str) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(v, (str, int, float)) for v in value.values()):
        raise SpecError(f"{at}: environment is written {{ NAME = \"value\", ... }}, got {value!r}")
    return {str(key): str(item) for key, item in value.items()}


def read(path: Path) -> list[Order]:
    """The jobs of a TOML file: `[[job]]` each, or one job at the top level."""
    text = read_text(path, "job")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{path}: not valid TOML: {error}") from None
    entries = data.get("job", [data])
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries) or ("job" in data and len(data) > 1):
        raise SpecError(f"{path}: write one job at the top level, or each as [[job]] and nothing beside them")
    orders = [Order.of(entry, path.parent, str(path)) for entry in entries]
    names = [order.name for order in orders]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise SpecError(f"{path}: two jobs are named {twice!r}")
    return orders
