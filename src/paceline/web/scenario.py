"""A scenario: a model on a cluster under a plan, with edits. Page, permalink and reports share this value."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from paceline.catalog import clusters, devices, models, transformers
from paceline.errors import PacelineError, SpecError, UnknownName
from paceline.spec.plan import Plan
from paceline.spec.transformer import Transformer
from paceline.whatif.edits import apply
from paceline.whatif.subject import Subject

#: characters of each text, and edits of a scenario, at most
LONGEST, MOST_EDITS = 4000, 64
_UPLOADED = re.compile(r"upload:([0-9a-f]{16})")
#: texts that would name a file of this machine
_FILE = re.compile(r"\.toml|\.py|\.json|^hf:|^timm:|^torchvision:", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What a user asks about, in the words that the commands take; `edits` are those of `--set`."""

    model: str
    cluster: str
    plan: str = ""
    edits: tuple[str, ...] = ()
    #: what is trained: tokens such as 1T, or epochs where throughput counts images
    budget: str = ""

    def __post_init__(self) -> None:
        texts = (self.model, self.cluster, self.plan, self.budget, *self.edits)
        if len(self.edits) > MOST_EDITS or any(len(text) > LONGEST for text in texts):
            raise SpecError(f"a scenario has up to {MOST_EDITS} edits, and texts up to {LONGEST} characters")

    def changed(self, path: str, value: str) -> Scenario:
        """The scenario with a control set: a part of it, a word of its plan, or an edit. An empty value takes
        an edit back.
        """
        if path in ("model", "cluster", "plan", "budget"):
            return self._renamed(path, value)
        head, _, key = path.partition(".")
        if head == "plan":
            return replace(self, plan=with_word(self.plan, key, value))
        edit = f"{path}={value}"
        kept = [each for each in self.edits if each.partition("=")[0] != path]
        if not value:
            return replace(self, edits=tuple(kept))
        places = [each.partition("=")[0] for each in self.edits]
        kept.insert(places.index(path) if path in places else len(kept), edit)
        return replace(self, edits=tuple(kept))

    def _renamed(self, part: str, value: str) -> Scenario:
        """Another cluster takes the edits of the old one back, another model those of the model."""
        gone = {"cluster": ("nodes", "node.", "network.", "device", "stragglers."), "model": ("model.",)}
        edits = tuple(each for each in self.edits if not each.startswith(gone.get(part, ("\0",))))
        changed: dict[str, Any] = {part: value.strip(), "edits": edits}
        return replace(self, **changed)

    def command(self) -> str:
        """The command line that prints the same numbers."""
        verb = "whatif" if self.edits else "predict"
        words = ["paceline", verb, self.model, "--cluster", self.cluster]
        words += ["--plan", self.plan] if self.plan else []
        words += [word for edit in self.edits for word in ("--set", edit)]
        return shlex.join(words)

    def link(self) -> str:
        """The fragment of a permalink."""
        pairs = [(name, getattr(self, name)) for name in ("model", "cluster", "plan", "budget")]
        return urlencode([*(pair for pair in pairs if pair[1]), *(("set", edit) for edit in self.edits)])


def with_word(plan: str, field: str, word: str) -> str:
    """A plan's text with another word for a field (`sync`: all words of how gradients are exchanged)."""
    name = {"sync": "relax"}.get(field, field)
    kept = [each for each in plan.replace(",", " ").split() if set(Plan.said(each)) != {name}]
    return " ".join([*kept, *word.split()])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where models come from: the catalog, what was uploaded, and names that were given on the command line.

    Nothing else is opened: a text from the page never names a file, and no code is imported for it.
    """

    uploads: Path
    given: frozenset[str] = frozenset()

    def subject(self, scenario: Scenario) -> Subject:
        """The scenario as the library has it."""
        self.check(scenario)
        model = self.model(scenario.model)
        return apply(Subject.of(model, scenario.cluster, scenario.plan), scenario.edits)

    def check(self, scenario: Scenario) -> None:
        """Refuses a scenario whose words would name a file."""
        for text in (scenario.cluster, scenario.plan, *scenario.edits):
            self._check(text)

    def _check(self, text: str) -> None:
        if text not in self.given and _FILE.search(text):
            raise SpecError(
                f"{text!r} would name a file; name it when starting: paceline explore --cluster FILE"
            )

    def model(self, text: str) -> Transformer | str:
        """The model that a text means."""
        if text in self.given:
            return text
        if text.startswith("{"):
            return sized(text)
        uploaded = _UPLOADED.fullmatch(text)
        if uploaded is not None:
            path = self.uploads / f"{uploaded[1]}.json"
            if not path.is_file():
                raise SpecError(f"{text} is not here (any more): upload the workload again")
            return str(path)
        if text not in transformers.names() and text not in models.names():
            raise UnknownName("model", text, [*models.names(), *transformers.names()])
        return text


def sized(text: str) -> Transformer:
    """The transformer whose sizes a JSON object gives."""
    kinds = {field.name: str(field.type) for field in fields(Transformer)}
    try:
        given = json.loads(text)
    except ValueError:
        raise SpecError("the sizes of a model are a JSON object") from None
    for name, value in given.items() if isinstance(given, dict) else [("", None)]:
        if kinds.get(name) != type(value).__name__:
            raise SpecError(f"sizes of a model: {name!r} is not a {kinds.get(name, 'size')}")
    try:
        return Transformer(**given)
    except (TypeError, PacelineError) as error:
        raise SpecError(f"sizes of a model: {error}") from None


def sizes_text(model: Transformer) -> str:
    """A transformer as the text that `sized` reads, without what is usual."""
    said = {field.name: getattr(model, field.name) for field in fields(Transformer)}
    usual = {field.name: field.default for field in fields(Transformer)}
    return json.dumps({name: value for name, value in said.items() if value != usual[name]})


def catalog() -> Mapping[str, list[str]]:
    """What can be chosen by name."""
    named = [*models.names(), *(name for name in transformers.names() if name not in models.names())]
    return {"models": named, "clusters": clusters.names(), "devices": devices.names()}
