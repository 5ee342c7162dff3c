"""What a user adds from outside the package: policies, emitters, pipeline schedules, compressors.

A Python file adds something when it runs and calls a `register`. It runs only where somebody names it: an
`import` in a program, or `paceline --extend FILE.py COMMAND ...` on the command line. Nothing is looked for
in folders, in the environment or among installed packages.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.errors import SpecError

#: files of the extensions that this process has run; processes that it starts run the same
_files: list[str] = []


def load(file: str | Path) -> ModuleType:
    """Runs a user's file once, as the module of its name; processes that this one starts run it as well."""
    path = Path(file).resolve()
    known = sys.modules.get(path.stem)
    if known is not None and _file_of(known) == path:
        module = known
    elif known is not None or path.stem in sys.stdlib_module_names:
        clash = f"there is a module called {path.stem!r} already"
        raise SpecError(f"--extend {file}: {clash}; give the file another name")
    else:
        module = run(path, path.stem, f"--extend {file}")
    if str(path) not in _files:
        _files.append(str(path))
    return module


def loaded() -> tuple[str, ...]:
    """Files of the extensions that this process has run."""
    return tuple(_files)


def load_all(files: Sequence[str]) -> None:
    """Runs several, as a process does that another one has started."""
    for file in files:
        load(file)


def words() -> list[str]:
    """The command-line words by which a process that this one starts runs the same extensions."""
    return [word for file in _files for word in ("--extend", file)]


def taken(arguments: Sequence[str]) -> list[str]:
    """Runs what `words` named in front of a process's arguments; the arguments that are left."""
    left = list(arguments)
    while left[:1] == ["--extend"]:
        load(left[1])
        left = left[2:]
    return left


def run(path: Path, name: str, what: str) -> ModuleType:
    """A user's file as a module; `what` names it in messages. Files beside it can be imported meanwhile."""
    if not path.is_file():
        raise SpecError(f"{what}: no file {str(path)!r}")
    spec = importlib.util.spec_from_file_location(name, path)
    if path.suffix != ".py" or spec is None or spec.loader is None:
        raise SpecError(f"{what}: expected a Python file, FILE.py")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        with _beside(path):
            spec.loader.exec_module(module)
    except Exception as error:
        sys.modules.pop(name, None)
        if before is not None:
            sys.modules[name] = before
        raise SpecError(f"{what} cannot be imported: {type(error).__name__}: {error}") from error
    return module


@contextmanager
def _beside(path: Path) -> Iterator[None]:
    """The folder of a file among those that imports look in."""
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def named(place: str) -> Any:
    """What "module:name" names; the module is imported."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def claim(what: str, name: str, new: object, known: Mapping[str, Any]) -> None:
    """Raises where something else has a name; a file that is run again may register the same again."""
    if not name:
        raise SpecError(f"a {what} is registered by its name; give it one")
    if name in known and _origin(known[name]) != _origin(new):
        file, _ = _origin(known[name])
        raise SpecError(f"{what} {name!r} is registered already, by {file}; choose another name")


def _origin(thing: Any) -> tuple[str, str]:
    """File and name of a class or function."""
    made_by = getattr(thing, "func", thing)  # of a functools.partial
    module = str(getattr(made_by, "__module__", type(made_by).__module__))
    file = _file_of(sys.modules.get(module))
    return str(file) if file else module, str(getattr(thing, "__qualname__", thing))


def _file_of(module: ModuleType | None) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else None
