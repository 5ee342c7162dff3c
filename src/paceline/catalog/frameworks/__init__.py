"""Facts about frameworks: one TOML file each, read on first use; `get` also takes a path to a file."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path

from paceline.errors import PlanError, UnknownName
from paceline.spec import checks
from paceline.spec import framework as spec
from paceline.spec.framework import Framework

#: what runs a captured module where nothing says otherwise
USUAL = "torch"


@cache
def _files() -> dict[str, str]:
    """Framework name -> TOML text, for every file of the catalog."""
    folder = files(__package__)
    return {entry.name[:-5]: entry.read_text() for entry in folder.iterdir() if entry.name.endswith(".toml")}


@cache
def _load(name: str) -> Framework:
    return spec.parse(_files()[name], f"{name}.toml", get)


def names() -> list[str]:
    """Names of the catalog's frameworks, sorted."""
    return sorted(_files())


def get(name: str) -> Framework:
    """The framework called `name`, or the one described by a `.toml` file."""
    if checks.text("framework", name).endswith(".toml"):
        return spec.read(Path(name), get)
    if name not in _files():
        raise UnknownName("framework", name, names(), f"known: {', '.join(names())}")
    return _load(name)


def running(name: str, what: str) -> Framework:
    """The framework called `name`, which has to run `what`: transformers by their sizes, or captured
    modules.
    """
    found = get(name)
    if found.runs not in (what, "both"):
        known = ", ".join(other for other in names() if _load(other).runs in (what, "both"))
        raise PlanError(
            f"framework {name} is described for {found.runs} only, not for {what}; for these: {known}"
        )
    return found
