"""A job list of any length with the statistics of the Philly trace: sizes, lengths by size, bursts of
arrivals, the day's rhythm.
"""

from __future__ import annotations

import math
import random
import tomllib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from itertools import accumulate
from typing import Any

from paceline.errors import SpecError
from paceline.sched.traces import Trace, stretchable

#: the cluster that a generated list is meant for where none is named
CLUSTER = "64x4xv100"


@cache
def statistics() -> Mapping[str, Any]:
    """What `fit_philly` found."""
    return tomllib.loads(files(__package__).joinpath("philly.toml").read_text())


class Quantiles:
    """A distribution given by quantiles, straight between them in logarithm."""

    def __init__(self, shares: Sequence[float], values: Sequence[float]) -> None:
        self.shares = list(shares)
        self.logs = [math.log(value) for value in values]

    def at(self, uniform: float) -> float:
        i = min(bisect_right(self.shares, uniform), len(self.shares) - 1)
        low, high = self.shares[i - 1], self.shares[i]
        weight = (uniform - low) / (high - low)
        return math.exp(self.logs[i - 1] + (self.logs[i] - self.logs[i - 1]) * weight)

    def mean(self) -> float:
        """Exact: the mean of exp over each straight piece."""
        total = 0.0
        for i in range(1, len(self.shares)):
            a, b = self.logs[i - 1], self.logs[i]
            piece = math.exp(a) if b - a < 1e-12 else (math.exp(b) - math.exp(a)) / (b - a)
            total += (self.shares[i] - self.shares[i - 1]) * piece
        return total


def philly_like(count: int, *, seed: int = 0, bursts: bool = True, most_devices: int | None = None) -> Trace:
    """`count` jobs; `bursts=False` makes arrivals Poisson of the same mean; larger jobs than `most_devices`
    are cut to it.
    """
    if count < 1:
        raise SpecError(f"a trace has at least one job, got {count}")
    facts = statistics()
    draw = random.Random(seed)
    sizes = sorted((int(size), share) for size, share in facts["sizes"].items())
    edges = list(accumulate(share for _, share in sizes))
    classes = sorted(
        (int(low), Quantiles(facts["shares"], table["quantiles"])) for low, table in facts["lengths"].items()
    )
    starts = [low for low, _ in classes]
    tenants, owns = list(facts["tenants"]), list(accumulate(facts["tenants"].values()))
    jobs = []
    for i, time_s in enumerate(_arrivals(count, draw, bursts)):
        devices = sizes[min(bisect_right(edges, draw.random() * edges[-1]), len(sizes) - 1)][0]
        seconds = classes[bisect_right(starts, devices) - 1][1].at(draw.random())
        tenant = tenants[min(bisect_right(owns, draw.random() * owns[-1]), len(tenants) - 1)]
        jobs.append(
            stretchable(
                f"job-{i}", time_s, max(1.0, seconds), min(devices, most_devices or devices), draw, tenant
            )
        )
    return Trace(name="philly-like", jobs=tuple(jobs), cluster=CLUSTER)


def trials(count: int, *, seed: int = 0, median_s: float = 3600.0, sigma: float = 0.5) -> Trace:
    """Philly's arrivals, sizes and tenants, with lengths log-normal about a median: what jobs ask for, not
    what they run.
    """
    draw = random.Random(f"trials {seed}")
    like = philly_like(count, seed=seed, most_devices=16)
    jobs = tuple(replace(job, work=median_s * math.exp(sigma * draw.gauss(0, 1))) for job in like.jobs)
    return replace(like, name="trials", jobs=jobs, asked=True)


def _arrivals(count: int, draw: random.Random, bursts: bool) -> list[float]:
    facts = statistics()
    gaps = Quantiles(facts["shares"], facts["gaps"])
    # gaps follow each other by a normal copula, whose correlation gives the ranks the one that was measured
    correlation = 2 * math.sin(math.pi / 6 * facts["gap_correlation"])
    rest = math.sqrt(1 - correlation**2)
    scale = facts["gap_mean"] / gaps.mean()
    state, now_s = draw.gauss(0, 1), 0.0
    out = []
    for _ in range(count):
        if bursts:
            state = correlation * state + rest * draw.gauss(0, 1)
            gap = scale * gaps.at(min(max(_normal_cdf(state), 0.0), 1 - 1e-12))
        else:
            gap = draw.expovariate(1 / facts["gap_mean"])
        now_s += gap / facts["hours"][int(now_s // 3600) % 24]
        out.append(now_s)
    return out


def _normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))
