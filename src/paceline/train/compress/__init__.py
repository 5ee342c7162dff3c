"""Gradient compressors: encoders, decoders and their state, one file for each family of methods.

    compressor = make("terngrad", rank=rank, world=world)
    # by parameter name
    chosen = for_model("dgc:ratio=0.001", model.named_parameters(), rank=rank, world=world)

`base.py` says how one is driven; `paceline.cost.compression` counts its bytes.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from paceline.cost import compression as cost
from paceline.extend import named
from paceline.spec import compression as spec

from .base import Arrived, Compressor, Round
from .local import lockstep

__all__ = ["Arrived", "Compressor", "Round", "for_model", "lockstep", "make"]


def make(
    scheme: spec.Scheme | str, *, rank: int = 0, world: int = 1, seed: int = 0, fused: bool = True
) -> Compressor:
    """The compressor of a scheme, or of text that `paceline.spec.compression.parse` reads, for one rank.

    `seed` must be the same on all ranks; `fused=False` runs the plain torch reference.
    """
    chosen = spec.parse(scheme) if isinstance(scheme, str) else scheme
    kind: type[Compressor] = named(chosen.encoder)
    return kind(chosen, rank=rank, world=world, seed=seed, fused=fused)


def for_model(
    scheme: spec.Scheme | str,
    parameters: Iterable[tuple[str, Tensor]],
    *,
    rank: int = 0,
    world: int = 1,
    seed: int = 0,
    fused: bool = True,
) -> dict[str, Compressor]:
    """The compressor of each parameter by name: `scheme`'s, or float32 where `cost.compression.assign` says
    so.

    Parameters of one scheme share one object; begin and end steps of each object once.
    """
    chosen = spec.parse(scheme) if isinstance(scheme, str) else scheme
    made: dict[spec.Scheme, Compressor] = {}
    for_name = {}
    for name, found in cost.assign(chosen, [(name, tuple(p.shape)) for name, p in parameters]).items():
        if found not in made:
            made[found] = make(found, rank=rank, world=world, seed=seed, fused=fused)
        for_name[name] = made[found]
    return for_name
