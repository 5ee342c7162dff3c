"""What a framework and its host add to a step or take from it, as properties of the framework named in a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.predict.interval import Errors
from paceline.predict.step import Conditions

#: eager transformers of 2023 on server CPUs; its loop empties the allocator's cache before every step, and those that need
#: most of the memory spend about 10 ms per GB on getting it again (docs/accuracy.md)
NEUSIGHT = Conditions(host_scale=0.6, errors=Errors(device=0.10, base=0.06), reallocation_s=1e-11)
#: eager PyTorch 1.12 on a desktop
TIMM = Conditions(host_scale=0.6, errors=Errors(group=0.15, base=0.05, device=0.05))
#: a static graph: the host issues kernels without Python
TENSORFLOW_2017 = Conditions(host_scale=0.25, errors=Errors(device=0.12, base=0.06))


def of_row(row: Mapping[str, Any]) -> Conditions:
    """The surroundings of a row of the common schema, by its framework."""
    static = any(word in row["framework"] for word in ("TensorFlow", "MXNet", "Paddle"))
    return Conditions(host_scale=0.25 if static else 0.5, errors=Errors(device=0.14, base=0.08))
