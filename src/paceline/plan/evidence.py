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

#: field -> value -> where measured steps with it are
Measured = Mapping[str, Mapping[str, str]]
_TABLES = tomllib.loads((files(__package__) / "evidence.toml").read_text())
#: steps of transformers, and of captured modules
TRANSFORMERS: Measured = _TABLES["transformers"]
MODULES: Measured = _TABLES["modules"]


def unmeasured(choice: Mapping[str, Any], evidence: Measured = TRANSFORMERS) -> tuple[str, ...]:
    """Of some fields of a plan, the words that no measured step had."""
    values = {field: getattr(choice[field], "label", choice[field]) for field in evidence if field in choice}
    return tuple(
        f"offload={value}" if field == "offload" else str(value)
        for field, value in values.items()
        if value not in evidence[field]
    )
