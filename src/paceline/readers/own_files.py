"""Files that `paceline plan --emit` writes and that no other framework defines: plan.json, train.py."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from paceline.readers.configuration import Settings
from paceline.spec.plan import Plan
from paceline.spec.vocabulary import Sharding

#: where a training script says how long samples are, unless its user does
_SEQ = re.compile(r'environ\.get\("SEQ", "(\d+)"\)')


def fields(words: str) -> dict[str, Any]:
    """Fields of a plan that was complete when it was written: sizes of 1 and no sharding are not"
    " spelled out."""
    sizes = dict.fromkeys(("dp", "mbs", "gbs", "seq"), 1)
    return {**sizes, "sharding": Sharding.NONE, **Plan.said(words)}


def is_plan(text: str) -> bool:
    """Whether a JSON is a plan.json."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and {"plan", "prediction"} <= set(found)


def plan_json(text: str) -> Settings:
    """The plan and the model of a plan.json."""
    found: dict[str, Any] = json.loads(text)
    return Settings("paceline", said=fields(str(found["plan"])), model=str(found.get("model", "")))


def _tokens(text: str) -> dict[str, Any]:
    """The length of samples, which a training script takes from its environment."""
    found = _SEQ.search(text)
    return {"seq": int(found[1])} if found is not None else {}


def script(text: str) -> Settings | None:
    """The plan in the training script of `--emit torchrun`; None where it is another script."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if names == ["PLAN"] and isinstance(node.value.value, str):
                return Settings("paceline", said={**fields(node.value.value), **_tokens(text)})
    # a function that lays a model out: its first lines say the plan
    return Settings("paceline") if "\n# predicted: " in text[:2000] else None
