"""Facts about generations of chips: one TOML file each, read on first use."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from paceline.spec import architecture as spec
from paceline.spec.architecture import Architecture


@cache
def known() -> dict[str, Architecture]:
    """Every architecture of the catalog, by name."""
    folder = files(__package__)
    texts = {entry.name[:-5]: entry.read_text() for entry in folder.iterdir() if entry.name.endswith(".toml")}
    return {name: spec.parse(texts[name], f"{name}.toml") for name in sorted(texts)}


def get(name: str) -> Architecture:
    """The architecture called `name`; of one that the catalog does not have, nothing is known."""
    return known().get(name) or Architecture(name=name, title=name)


def of_capability(major: int, minor: int) -> str:
    """The architecture of a CUDA compute capability; `generic` where none has it."""
    for text in (f"{major}.{minor}", str(major)):
        for name, one in known().items():
            if text in one.capabilities:
                return name
    return "generic"
