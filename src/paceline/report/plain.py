"""Answers as JSON text that any reader takes: JSON has no NaN and no Infinity."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def text(value: Any) -> str:
    """JSON on one line; numbers that are not finite become null."""
    return json.dumps(finite(value), allow_nan=False)


def finite(value: Any) -> Any:
    """The same plain data, with None in place of each number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return value
