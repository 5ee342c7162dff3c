"""Groups of operators, by the names in `groups.toml`.

A kernel's group is that of the operator that launched it. Where that says nothing (kernels of extensions),
the kernel's own name does.
"""

from __future__ import annotations

import re
import tomllib
from importlib.resources import files

_TABLE = tomllib.loads(files(__package__).joinpath("groups.toml").read_text(encoding="utf-8"))
_BY_OPERATOR: dict[str, str] = {name: kind for kind, names in _TABLE["operators"].items() for name in names}
#: the first pattern that is found in a kernel's name decides
_KERNELS = tuple((kind, re.compile(text, re.IGNORECASE)) for kind, text in _TABLE["kernels"].items())
#: further kinds, as people know them; the others are titled in `predict.step`
TITLES = {
    "communication": "communication",
    "transfer": "copies from and to the host",
    "data": "loading of data",
    "other": "kernels that are not recognised",
}


def by_kernel(name: str) -> str:
    """The group of a kernel by its own name; `other` where it says nothing."""
    return next((kind for kind, pattern in _KERNELS if pattern.search(name)), "other")


def by_operator(name: str, kernel: str = "") -> str:
    """The group of work by the operator that launched it, and by the kernel where the operator is unknown."""
    space, _, plain = name.rpartition("::")
    kind = _BY_OPERATOR.get(plain) if space == "aten" else None
    if kind is not None:
        return kind
    if plain.startswith(("triton_", "cpp_fused", "## Call CompiledFxGraph")):
        return "fused"
    kind = by_kernel(kernel or name)
    return "elementwise" if kind == "other" and space == "aten" else kind


def casts(types: tuple[str, ...]) -> bool:
    """Whether a copy between two tensors of such types changes the type."""
    tensors = len(types) > 1 and not {"", "Scalar", "ScalarList"} & set(types[:2])
    return tensors and types[0] != types[1]
