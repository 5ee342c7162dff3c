"""`--like FILE`: the plan, and where it names one the model, from a configuration that the user"
" already has."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from paceline.readers.configuration import Configuration
    from paceline.spec.plan import Plan

Like = Annotated[
    Path,
    Parameter(
        help=(
            "take the plan from a configuration: DeepSpeed JSON, Accelerate YAML, torchtitan TOML, Python or"
            " script, Megatron-LM script; --plan changes it"
        )
    ),
]


def planned(like: Path, model: str, plan: str) -> tuple[str, Plan]:
    """Model and plan of a configuration, changed by the words of a plan; what is not in it is on stderr."""
    from paceline import api
    from paceline.errors import SpecError
    from paceline.readers import configuration
    from paceline.spec.plan import Plan

    found = configuration.read(like)
    _report(found)
    name = model or found.model
    if not name:
        sizes = ", ".join(f"{key} {value}" for key, value in found.sizes.items())
        raise SpecError(
            f"{like} names no model that is known ({sizes or 'no sizes in it'}); give one before --like"
        )
    chosen = replace(found.plan, **Plan.said(plan))
    if "framework" in found.usual and api.sizes(name) is None:
        # names of frameworks that run transformers; a captured module is run by torch
        chosen = replace(chosen, framework="")
    return name, chosen


def _report(found: Configuration) -> None:
    """What was read, in lines for a person."""
    lines = [f"{found.format} says: {found.plan}"]
    if found.usual:
        usual = ", ".join(f"{name}={getattr(found.plan, name)}" for name in found.usual)
        lines.append(f"not said, as usual: {usual}")
    if found.not_understood:
        lines.append(f"not understood: {'; '.join(found.not_understood)}")
    for line in [*lines, *found.notes]:
        print(f"{found.path}: {line}", file=sys.stderr)
