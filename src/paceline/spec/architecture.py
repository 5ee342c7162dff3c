"""A generation of chips: what formulas need to know of it that is not of one device, from a TOML file.

title = "NVIDIA Blackwell"
capabilities = ["10", "12"]        # of CUDA: the major one, or both parts
curves = "hopper"                  # whose fitted curves stand in for its own
similar = "hopper"                 # whose joules per FLOP of products it is given, and why
similar_source = "TSMC 4N, as Hopper"
matrix_units = false               # it has vector units only

[energy]
vector = "9 pJ"                    # of an fp32 FLOP of busy vector units
product = "1.33 pJ"                # of a 16-bit FLOP of matrix units at the boost clock
fp8 = 0.35                         # of a FLOP in that precision, over one in 16 bit

[memory]
workspace = "64 MiB"               # of matrix products

[network]
nvls = 0.74                        # share of NVLink's rate that multicast in the switches reaches
node = "400 GB/s"                  # of a node of eight, where a measurement does not say

[sparsity]
two_four = 2                       # peak of products with 2:4 weights over the dense one
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.spec.facts import Fact, FactReader

#: TOML path -> (attribute, dimension)
_FIELDS = {
    "energy.vector": ("vector_J", "energy"),
    "energy.product": ("product_J", "energy"),
    "memory.workspace": ("workspace_bytes", "bytes"),
    "network.nvls": ("nvls_share", "fraction"),
    "network.node": ("node_Bps", "bandwidth"),
    "sparsity.two_four": ("two_four_rate", "count"),
}
_RELATIVE = ("tf32", "fp16", "bf16", "fp8", "fp4")
_SECTIONS = ("energy", "memory", "network", "sparsity")
_TEXTS = {"title", "capabilities", "curves", "similar", "similar_source", "matrix_units"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A generation of chips. Joules, bytes, bytes per second; None where no source gives the number."""

    name: str
    title: str
    capabilities: tuple[str, ...] = ()
    curves: str = ""
    similar: str = ""
    similar_source: str = ""
    matrix_units: bool = True
    vector_J: float | None = None
    product_J: float | None = None
    #: joules of a FLOP over those of a 16-bit one, by precision, where they are not the usual ones
    relative: Mapping[str, float] = field(default_factory=dict)
    workspace_bytes: float | None = None
    nvls_share: float | None = None
    node_Bps: float | None = None
    two_four_rate: float | None = None
    #: provenance by TOML path
    facts: Mapping[str, Fact] = field(default_factory=dict)


def parse(text: str, where: str) -> Architecture:
    """The architecture that a TOML text describes; messages name `where`, the line and the key."""
    types: dict[str, type] = {"capabilities": list, "matrix_units": bool}
    reader = FactReader(text, where, _TEXTS, set(_SECTIONS), types)
    facts: dict[str, Fact] = {}
    for section in _SECTIONS:
        for leaf, raw in reader.data.get(section, {}).items():
            path = f"{section}.{leaf}"
            if path in _FIELDS:
                facts[path] = reader.fact(path, raw, _FIELDS[path][1])
            elif section == "energy" and leaf in _RELATIVE:
                facts[path] = reader.fact(path, raw, "fraction")
            else:
                allowed = [*_FIELDS, *(f"energy.{precision}" for precision in _RELATIVE)]
                raise reader.error(path, f"unknown key {leaf!r}; allowed: {', '.join(allowed)}")
    values: dict[str, Any] = {
        attribute: facts[path].value for path, (attribute, _) in _FIELDS.items() if path in facts
    }
    relative = {path.partition(".")[2]: fact.value for path, fact in facts.items() if path not in _FIELDS}
    name = Path(where).stem
    return Architecture(
        name=name,
        title=reader.text("title", name),
        capabilities=tuple(reader.data.get("capabilities", ())),
        curves=reader.text("curves", ""),
        similar=reader.text("similar", ""),
        similar_source=reader.text("similar_source", ""),
        matrix_units=bool(reader.data.get("matrix_units", True)),
        relative=relative,
        facts=facts,
        **values,
    )
