"""Fit what collectives cost: shares of line rates and seconds of a hop, few per kind of link, to measured
collectives.

Every system weighs the same, however many rows it has. Constants of links that none of the sources measured
stay at their priors. The spread (sigma) is that of sources that were left out of the fit that predicts them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from paceline.bench import collectives as measured
from paceline.bench.collectives import MeasuredCollective
from paceline.cost.collectives import LARGE, from_table, lines_with, outermost, times
from paceline.errors import DataError
from paceline.predict.interval import Z90

Array = NDArray[np.float64]
Tables = dict[str, Any]

#: seconds of a hop by protocol as NCCL's tuner has them (NVIDIA/nccl:src/graph/tuning.cc, hwLatencies):
#: NVLink, PCI Express, network
_NVLINK, _PCIE = (
    {"ll": 0.6e-6, "ll128": 1.6e-6, "simple": 3.7e-6},
    {"ll": 1e-6, "ll128": 2.2e-6, "simple": 4.8e-6},
)
_NETWORK = {"ll": 5e-6, "ll128": 8.5e-6, "simple": 14e-6}
_TCP, _GLOO = dict.fromkeys(("ll", "ll128", "simple"), 3e-5), dict.fromkeys(("ll", "ll128", "simple"), 8e-5)


def _times(hop: Mapping[str, float], factor: float) -> dict[str, float]:
    return {protocol: seconds * factor for protocol, seconds in hop.items()}


#: where the fit starts; links without measurements keep these: PCI Express loses to packet headers (NCCL
#: plans with 12 of 15.75 GB/s), a hop between sockets to coherence traffic, TCP to the kernel's copies; EFA
#: and Slingshot add latency to RDMA's, Aries has 10 GB/s of injection
PRIOR: Tables = {
    "nccl": {
        "base_s": 2e-5,
        "fill": 0.2,
        "nvls": 0.8,
        "nvls_nodes": 0.85,
        "sharp": 0.45,
        "nvls_s": 2e-5,
        "nvls_rank_s": 1e-6,
        "sigma": {"other": 0.2},
        "sigma_small": {"other": 0.4},
        "links": {
            "nvlink": {"share": 0.79, "p2p": 0.86, "hop_s": _NVLINK},
            "nvswitch": {"share": 0.79, "p2p": 0.86, "hop_s": _NVLINK},
            "xgmi": {"share": 0.73, "p2p": 0.75, "hop_s": _PCIE},
            "ici": {"share": 0.85, "p2p": 0.85, "hop_s": _times(_PCIE, 0.5)},
            "pcie": {"share": 0.76, "p2p": 0.8, "hop_s": _PCIE},
            "qpi": {"share": 0.6, "p2p": 0.6, "hop_s": _times(_PCIE, 1.3)},
            "shm": {"share": 0.17, "p2p": 0.2, "hop_s": _times(_PCIE, 1.3)},
            "infiniband": {"share": 0.97, "p2p": 0.65, "hop_s": _NETWORK},
            "roce": {"share": 0.97, "p2p": 0.65, "hop_s": _NETWORK},
            "efa": {"share": 0.88, "p2p": 0.6, "hop_s": _times(_NETWORK, 2)},
            "slingshot": {"share": 0.9, "p2p": 0.65, "hop_s": _times(_NETWORK, 1.2)},
            "aries": {"share": 0.8, "p2p": 0.7, "hop_s": _NETWORK},
            "ethernet": {"share": 0.9, "p2p": 0.9, "hop_s": _TCP},
            "socket": {"share": 0.9, "p2p": 0.9, "cap_Bps": 1.2e9, "p2p_cap_Bps": 3.2e9, "hop_s": _TCP},
            "other": {"share": 0.8, "p2p": 0.65, "hop_s": _NETWORK},
        },
    },
    "gloo": {
        "base_s": 3e-5,
        "fill": 0.0,
        "copy": 3e-10,
        "sigma": {"other": 0.4},
        "sigma_small": {"other": 0.4},
        "links": {
            "loopback": {"share": 1.0, "p2p": 1.0, "cap_Bps": 2e9, "p2p_cap_Bps": 3.3e9, "hop_s": _GLOO},
            "other": {"share": 0.9, "p2p": 0.9, "cap_Bps": 2e9, "p2p_cap_Bps": 3.3e9, "hop_s": _GLOO},
        },
    },
    # no measurements of its own: the alpha-beta constants that MPI is usually given on such networks
    "mpi": {
        "base_s": 3e-6,
        "fill": 0.1,
        "sigma": {"other": 0.3},
        "sigma_small": {"other": 0.4},
        "links": {
            "other": {"share": 0.7, "p2p": 0.8, "hop_s": dict.fromkeys(("ll", "ll128", "simple"), 3e-6)}
        },
    },
}
#: what is fitted, each a factor on the prior: name -> (library, paths that it multiplies)
FREE: dict[str, tuple[str, tuple[str, ...]]] = {
    "base": ("nccl", ("base_s",)),
    "fill": ("nccl", ("fill",)),
    "hop inside": (
        "nccl",
        tuple(f"links.{kind}.hop_s" for kind in ("nvlink", "nvswitch", "xgmi", "pcie", "qpi", "shm")),
    ),
    "hop outside": (
        "nccl",
        tuple(f"links.{kind}.hop_s" for kind in ("infiniband", "roce", "efa", "slingshot", "other")),
    ),
    "nvls": ("nccl", ("nvls",)),
    "nvls across nodes": ("nccl", ("nvls_nodes",)),
    "nvls start": ("nccl", ("nvls_s",)),
    "nvls rank": ("nccl", ("nvls_rank_s",)),
    "sharp": ("nccl", ("sharp",)),
    "nvlink": ("nccl", ("links.nvlink.share", "links.nvswitch.share")),
    "nvlink p2p": ("nccl", ("links.nvlink.p2p", "links.nvswitch.p2p")),
    "xgmi": ("nccl", ("links.xgmi.share",)),
    "shm": ("nccl", ("links.shm.share",)),
    "rdma": ("nccl", ("links.infiniband.share", "links.roce.share")),
    "rdma p2p": ("nccl", ("links.infiniband.p2p", "links.roce.p2p")),
    "socket": ("nccl", ("links.socket.cap_Bps",)),
    "socket p2p": ("nccl", ("links.socket.p2p_cap_Bps",)),
    "gloo base": ("gloo", ("base_s",)),
    "gloo hop": ("gloo", ("links.loopback.hop_s", "links.other.hop_s")),
    "gloo copy": ("gloo", ("copy",)),
    "gloo": ("gloo", ("links.loopback.cap_Bps", "links.other.cap_Bps")),
    "gloo p2p": ("gloo", ("links.loopback.p2p_cap_Bps", "links.other.p2p_cap_Bps")),
}
#: rows of one system, operation and placement that the fit looks at
_SAMPLE = 20
#: relative error from which a row counts as an outlier, and how little the priors count
_SCALE, _PRIOR_WEIGHT = 0.08, 0.02
#: least and most sigma: few systems of a kind agree by luck, and stalls of one program (allocations inside
#: all-gather) are not the link's
_SIGMAS = (0.07, 0.45)


def read(folder: Path) -> list[MeasuredCollective]:
    """Every row that can be predicted, thinned where a source has thousands."""
    by_place: dict[tuple[str, str, int, tuple[int, ...]], list[MeasuredCollective]] = defaultdict(list)
    for source in (measured.published, measured.fp16, measured.gloo):
        found = source(folder)
        if found is None:
            raise DataError(
                f"{folder} does not hold what {source.__name__} reads: published/collectives_busbw.csv,"
                " kernels_fp16/ or h200/"
            )
        for row in found:
            if row.skip is None and row.group is not None:
                by_place[row.system, row.op, row.group.size, row.group.members].append(row)
    return [row for rows in by_place.values() for row in rows[:: max(1, len(rows) // _SAMPLE)]]


def tables(factors: Mapping[str, float]) -> Tables:
    """The prior with each free constant times its factor; no share is above the line rate."""
    out = deepcopy(PRIOR)
    for name, factor in factors.items():
        library, paths = FREE[name]
        for path in paths:
            *parents, leaf = path.split(".")
            table = out[library]
            for key in parents:
                table = table[key]
            if isinstance(table[leaf], dict):
                table[leaf] = _times(table[leaf], factor)
            else:
                table[leaf] = (
                    min(table[leaf] * factor, 1.0) if leaf in ("share", "p2p") else table[leaf] * factor
                )
    return out


def predict(rows: Sequence[MeasuredCollective], data: Tables) -> Array:
    """Seconds of each row with the constants in `data`."""
    known = {library: from_table(data, library) for library in ("nccl", "rccl", "gloo")}
    cache: dict[tuple[Any, ...], Any] = {}
    out = np.empty(len(rows))
    for i, row in enumerate(rows):
        assert row.cluster is not None and row.group is not None
        key = (row.op, row.library, id(row.cluster), row.group)
        if key not in cache:
            cache[key] = lines_with(row.op, row.group, row.cluster, row.library, known[row.library])
        out[i] = times(cache[key], np.asarray(row.size)).min()
    return out


def solve(rows: Sequence[MeasuredCollective], start: Array | None = None) -> tuple[Tables, Array]:
    """Constants from rows, and the logarithms of their factors on the prior.

    Each system counts once, outliers little, and no constant strays far from its prior for nothing.
    """
    seconds = np.array([row.seconds for row in rows])
    counts: dict[str, int] = defaultdict(int)
    for row in rows:
        counts[row.system] += 1
    weight = np.array([counts[row.system] ** -0.5 for row in rows])
    names = list(FREE)

    def residual(x: Array) -> Array:
        error = np.log(predict(rows, tables(dict(zip(names, np.exp(x), strict=True)))) / seconds)
        # Cauchy's loss, before the weights: a row that is far off pulls as little in a small system as in a
        # large one
        return np.concatenate(
            [weight * np.sign(error) * _SCALE * np.sqrt(np.log1p((error / _SCALE) ** 2)), _PRIOR_WEIGHT * x]
        )

    begin = np.zeros(len(names)) if start is None else start
    found = least_squares(
        residual, begin, bounds=(-2.5, 2.5), diff_step=1e-2, max_nfev=25 if start is None else 6
    )
    return tables(dict(zip(names, np.exp(found.x), strict=True))), found.x


def fit(folder: Path, report: list[str]) -> Tables:
    """The tables of the constants' file, with spreads from leaving out each source in turn."""
    rows = read(folder)
    seconds, origins = np.array([row.seconds for row in rows]), np.array([row.origin for row in rows])
    data, found = solve(rows)
    inside = np.log(predict(rows, data) / seconds)
    outside = np.empty(len(rows))
    for origin in dict.fromkeys(origins):
        without, _ = solve([row for row in rows if row.origin != origin], found)
        held = origins == origin
        outside[held] = np.log(
            predict([row for row in rows if row.origin == origin], without) / seconds[held]
        )
        for system in dict.fromkeys(row.system for row in rows if row.origin == origin):
            own = np.array([row.system == system for row in rows])
            report.append(
                f"{system:42s} rows {own.sum():4d}  median {_percent(inside[own]):5.1f} %  left out"
                f" {_percent(outside[own]):5.1f} %"
            )
    for library, names in (("nccl", ("nccl", "rccl")), ("gloo", ("gloo",))):
        chosen = np.array([row.library in names for row in rows])
        data[library] |= spreads([row for row in rows if row.library in names], outside[chosen])
    report.append(f"all: median {_percent(inside):.1f} %, left out {_percent(outside):.1f} %")
    flat: Tables = {}
    for library, table in data.items():
        flat |= {
            library: {key: value for key, value in table.items() if key != "links"},
            f"{library}.links": table["links"],
        }
    rounded: Tables = _rounded(flat)
    return rounded


def spreads(rows: Sequence[MeasuredCollective], error: Array) -> Tables:
    """Sigma by kind of the outermost link, so that nine in ten rows of each lie within; `other` is that of
    all.
    """
    out: Tables = {}
    kinds = np.array(
        [outermost(r.group, r.cluster) for r in rows if r.group is not None and r.cluster is not None]
    )
    large = np.array([r.size >= LARGE for r in rows])
    for name, which in (("sigma", large), ("sigma_small", ~large)):
        chosen = {"other": which, **{str(kind): which & (kinds == kind) for kind in dict.fromkeys(kinds)}}
        out[name] = {
            kind: float(np.clip(np.quantile(np.abs(error[mask]), 0.9) / Z90, *_SIGMAS))
            for kind, mask in chosen.items()
            if mask.sum() >= 8
        }
    return out


def _percent(error: Array) -> float:
    return float(100 * np.median(np.abs(np.expm1(error))))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    return float(f"{value:.3g}")
