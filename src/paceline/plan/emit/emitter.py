"""What an emitter is: the files of one tool that run a plan.

An emitter is one file: a function, and `register`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline import extend
from paceline.plan.emit.facts import Facts

EMITTERS: dict[str, Emitter] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitter:
    """A tool by its name, and the files that it needs."""

    #: the word of `--emit`
    name: str
    #: what is written
    title: str
    #: text of each file by its name; PlanError for what the tool cannot do (`Facts.refuse`)
    files: Callable[[Facts], dict[str, str]]


def register(emitter: Emitter) -> Emitter:
    """Makes an emitter known by its name: to `emit` and to `paceline plan --emit`."""
    known = {name: other.files for name, other in EMITTERS.items()}
    extend.claim("emitter", emitter.name, emitter.files, known)
    EMITTERS[emitter.name] = emitter
    return emitter
