"""What others reach on the same measurements, to stand beside our figures.

Given for all rows of a source as their tools or papers state them, or as measured by running their tools
unchanged; of some sources only a part is scored here, so that the rows are not quite the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Mean error of a tool on step times of a set, in per cent; and its regret, where known."""

    name: str
    mean_abs_pct: float
    rows: int
    how: str
    regret_pct: float | None = None


_CALCULON = "Calculon (Isaev et al., SC 2023; Apache-2.0)"
_VTRAIN = "vTrain (Bang et al., MICRO 2024), with kernels profiled on the GPU that it predicts"
_NAIVE = "FLOPs over the best constant efficiency, fitted to these rows"

PEERS: Mapping[str, tuple[Peer, ...]] = {
    "vtrain_a100_multi": (
        Peer(
            name="Calculon",
            mean_abs_pct=15.3,
            rows=109,
            how=f"{_CALCULON}, run with its own A100 file",
            regret_pct=1.3,
        ),
        Peer(name="vTrain", mean_abs_pct=14.73, rows=109, how=f"{_VTRAIN}; as its authors state it"),
        Peer(name="naive", mean_abs_pct=17.2, rows=109, how=_NAIVE),
    ),
    "vtrain_a100_single": (
        Peer(name="Calculon", mean_abs_pct=38.9, rows=1440, how=f"{_CALCULON}, run with its own A100 file"),
        Peer(name="vTrain", mean_abs_pct=8.37, rows=1440, how=f"{_VTRAIN}; as its authors state it"),
        Peer(name="naive", mean_abs_pct=45.6, rows=1440, how=_NAIVE),
    ),
    "megatron_gpt": (
        Peer(
            name="Calculon",
            mean_abs_pct=3.65,
            rows=8,
            how=f"{_CALCULON}; its own validation, which it is tuned to: Korthikanti et al. 2022",
        ),
    ),
}
