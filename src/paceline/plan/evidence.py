"""Which features of plans were ever held against a measured step, and which were not.

`evidence.toml` is the one list of it: a feature that is not there was never measured, and a plan that wins by
it says so. Degrees, micro-batches, buckets and gathers ahead are sizes, not features; the precision is the
user's choice, not the search's.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

_TABLES = tomllib.loads((files(__package__) / "evidence.toml").read_text())
#: field -> value -> where measured steps of transformers, or of captured modules, with it are
TRANSFORMERS: Mapping[str, Mapping[str, str]] = _TABLES["transformers"]
MODULES: Mapping[str, Mapping[str, str]] = _TABLES["modules"]


def unmeasured(
    choice: Mapping[str, Any], evidence: Mapping[str, Mapping[str, str]] = TRANSFORMERS
) -> tuple[str, ...]:
    """Of some fields of a plan, the words that no measured step had."""
    values = {field: getattr(choice[field], "label", choice[field]) for field in evidence if field in choice}
    return tuple(
        f"offload={value}" if field == "offload" else str(value)
        for field, value in values.items()
        if value not in evidence[field]
    )
