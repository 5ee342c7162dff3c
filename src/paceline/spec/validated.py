"""A measured step, and how wrong its prediction was: a row of the scoreboard, by what makes rows alike."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Validated:
    """One row of a measurement set. `error_pct` is signed: above zero, the step was predicted too slow."""

    set: str
    name: str
    model: str
    #: of the model; 0 where it is not known
    parameters: float
    unit: str
    device: str
    devices: int
    precision: str
    error_pct: float
    #: whether the measured time is in the 90 % interval
    inside: bool
