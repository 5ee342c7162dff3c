"""Device facts: one TOML file per device, read on first use; `get` also takes a path to a file."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path

from paceline.errors import UnknownName
from paceline.spec import checks
from paceline.spec import device as spec
from paceline.spec.device import Device


@cache
def _files() -> dict[str, str]:
    """Device name -> TOML text, for every file of the catalog."""
    folder = files(__package__)
    return {entry.name[:-5]: entry.read_text() for entry in folder.iterdir() if entry.name.endswith(".toml")}


@cache
def _load(name: str) -> Device:
    return spec.parse(_files()[name], f"{name}.toml", get)


@cache
def _aliases() -> dict[str, str]:
    """Folded name or alias -> catalog name."""
    return {fold(alias): name for name in _files() for alias in (name, *_load(name).aliases)}


def fold(name: str) -> str:
    """A name as it is compared."""
    return name.lower().replace("_", "-").replace(" ", "-")


def names() -> list[str]:
    """Names of the catalog's devices, sorted."""
    return sorted(_files())


def get(name: str) -> Device:
    """The catalog device called `name` (or by an alias), or the one described by a `.toml` file."""
    if checks.text("device", name).endswith(".toml"):
        return spec.read(Path(name), get)
    if name in _files():
        return _load(name)
    found = _aliases().get(fold(name))
    if found is None:
        raise UnknownName(
            "device",
            name,
            [*names(), *_aliases()],
            "`paceline devices` lists all; a .toml file describes your own",
        )
    return _load(found)
