"""Configurations of training frameworks: the plan that a file says, and the model where it names one.

One reader per format, chosen by what the file holds. Files that `paceline plan --emit` wrote carry the plan
that they came from in their first lines (`plan.json` beside a JSON): what the format cannot say is taken from
there, what it does say counts as the file says it.
"""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from paceline.errors import DataError, PacelineError, PlanError, SpecError
from paceline.readers.stream import opened, printable
from paceline.spec.plan import Plan

#: characters of a configuration at the most
LONGEST = 1 << 20
_HEAD = re.compile(r"^(?:#|//)? ?(?P<model>\S.*) on (?P<cluster>\S+): (?P<plan>.+)$")
_PREDICTED = re.compile(r"^# predicted: ")


@cache
def ignored(format_: str) -> tuple[str, ...]:
    """Beginnings of the names of settings that have no effect on a step."""
    table = tomllib.loads(files(__package__).joinpath("ignored.toml").read_text(encoding="utf-8"))
    return tuple(table[format_])


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What a configuration says of a training run."""

    path: str
    #: deepspeed, accelerate, torchtitan, megatron, paceline
    format: str
    plan: Plan
    #: fields of the plan that the file sets itself, and those that come from the format's defaults
    said: tuple[str, ...] = ()
    usual: tuple[str, ...] = ()
    #: a name for `predict`; empty: the file names none
    model: str = ""
    #: sizes of the model that the file gives, as it calls them
    sizes: Mapping[str, int] = field(default_factory=dict)
    #: 0: not said
    devices: int = 0
    optimizer: str = ""
    compiled: bool = False
    #: what the file says that has no place in a plan or is not known, each with its value
    not_understood: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class Settings:
    """What a reader found: fields of the plan that the file says, and those that its format takes"
    " otherwise."""

    format: str
    said: dict[str, Any] = field(default_factory=dict)
    usual: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    sizes: dict[str, int] = field(default_factory=dict)
    devices: int = 0
    optimizer: str = ""
    compiled: bool = False
    not_understood: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Keys:
    """Nested settings of which each is taken once; what is left over is named."""

    def __init__(self, data: Mapping[str, Any], path: str, ignored: Iterable[str] = ()) -> None:
        self._left: dict[str, Any] = dict(_flat(data))
        self._path = path
        self._ignored = tuple(ignored)

    def take(self, *names: str) -> Any:
        """The value of the first of some keys that is there; None where none is, or it is `null` or"
        " `auto`."""
        found = [self._left.pop(name) for name in names if name in self._left]
        value = found[0] if found else None
        if value == "auto":
            self._left[f"{names[0]} (auto: the training script decides)"] = "auto"
        return None if value == "auto" else value

    def whole(self, *names: str) -> int | None:
        """A size."""
        value = self.take(*names)
        if value is None:
            return None
        text = str(value).strip()
        if isinstance(value, bool) or not re.fullmatch(r"-?\d{1,15}", text):
            raise DataError(f"{self._path}: {names[0]} must be a whole number, got {printable(value)!r}")
        return int(text)

    def flag(self, *names: str) -> bool | None:
        """True or false; a key by itself is true."""
        value = self.take(*names)
        if value is None or isinstance(value, bool):
            return value
        text = str(value).strip().lower()
        if text not in ("true", "false", "1", "0", "yes", "no", ""):
            raise DataError(f"{self._path}: {names[0]} must be true or false, got {printable(value)!r}")
        return text in ("true", "1", "yes", "")

    def word(self, *names: str) -> str | None:
        """A text."""
        value = self.take(*names)
        return None if value is None else printable(value).strip()

    def choice(self, known: Mapping[str, Any], *names: str) -> Any:
        """What a word stands for; a word that is not known stays among what is not understood."""
        value = self.word(*names)
        if value is not None and value.lower() not in known:
            self._left[names[0]] = value
            return None
        return None if value is None else known[value.lower()]

    def put(self, name: str, value: str) -> None:
        """Names something that was taken and is not understood."""
        self._left[name] = value

    def left(self) -> list[str]:
        """What nobody took, without what has no effect on a step."""
        return [
            printable(f"{key} = {value}")[:120]
            for key, value in self._left.items()
            if not key.startswith(self._ignored) and value is not None
        ]


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Nested settings by their full names."""
    for key, value in data.items():
        name = f"{prefix}{printable(key)}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def read(path: Path | str) -> Configuration:
    """The configuration in a file; DataError where it is none that is known."""
    path = Path(path)
    with opened(path) as file:
        text = file.read(LONGEST + 1)
    if len(text) > LONGEST or "\0" in text:
        raise DataError(f"{path} is no configuration of a training run: it is binary, or larger than 1 MiB")
    try:
        return _merged(path, _settings(path, text), _origin(path, text))
    except RecursionError:
        raise DataError(f"{path}: values are nested too deeply") from None
    except (PlanError, SpecError) as error:
        raise DataError(f"{path}: {error}") from None


def _settings(path: Path, text: str) -> Settings:
    """By what the file holds."""
    from paceline.readers import accelerate, deepspeed, megatron, own_files, torchtitan

    kind = path.suffix.lower()
    if kind == ".json":
        return (
            deepspeed.settings(text, str(path)) if not own_files.is_plan(text) else own_files.plan_json(text)
        )
    if kind in (".yaml", ".yml"):
        return accelerate.settings(text, path)
    if kind == ".toml":
        return torchtitan.from_toml(text, str(path))
    if kind == ".py":
        return own_files.script(text) or torchtitan.from_python(text, str(path))
    if "torchtitan" in text:
        return torchtitan.from_script(text, str(path))
    if "--tensor-model-parallel-size" in text or "pretrain_" in text or "--num-layers" in text:
        return megatron.settings(text, str(path))
    if _origin(path, text) is not None:
        return Settings("paceline")
    known = "DeepSpeed JSON, Accelerate YAML, torchtitan TOML, Python or script, Megatron-LM script"
    raise DataError(f"{path} is no configuration that is known: {known}")


@dataclass(frozen=True, slots=True)
class Origin:
    """The plan that a file was emitted from."""

    model: str
    plan: dict[str, Any]


def _origin(path: Path, text: str) -> Origin | None:
    """What the first lines of an emitted file say, or the `plan.json` beside it."""
    lines = text.splitlines()[:20]
    for line, following in itertools.pairwise(lines):
        match = _HEAD.match(line)
        if match and _PREDICTED.match(following):
            return _parsed(match["model"], match["plan"])
    beside = path.with_name("plan.json")
    if path.suffix != ".json" or not beside.is_file():
        return None
    try:
        found = json.loads(beside.read_text(encoding="utf-8"))
        return _parsed(str(found["model"]), str(found["plan"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _parsed(model: str, words: str) -> Origin | None:
    from paceline.readers import own_files

    try:
        return Origin(model, own_files.fields(words))
    except PacelineError:
        return None


def _merged(path: Path, found: Settings, origin: Origin | None) -> Configuration:
    """What the file says, over what it came from, over what its format takes."""
    notes = list(found.notes)
    given = origin.plan if origin is not None else {}
    base = Plan(**{**found.usual, **given})
    edited = [
        f"{name}={found.said[name]} (emitted with {getattr(base, name)})"
        for name in found.said
        if origin is not None and getattr(base, name) != found.said[name]
    ]
    if edited:
        notes.append(f"edited since it was emitted: {', '.join(edited)}")
    plan = replace(base, **found.said)
    return Configuration(
        path=str(path),
        format=found.format,
        plan=plan,
        said=tuple(found.said),
        usual=tuple(name for name in found.usual if name not in found.said and name not in given),
        model=origin.model if origin is not None else found.model,
        sizes=found.sizes,
        devices=found.devices,
        optimizer=found.optimizer,
        compiled=found.compiled,
        not_understood=tuple(found.not_understood),
        notes=tuple(notes),
    )
