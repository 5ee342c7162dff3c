"""Which runs are measured: every combination of a grid, and a few at 100 Mbit/s for their staleness, with a
slow worker, with overlap.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from paceline.bench.throughput.jobs import JOBS
from paceline.spec.vocabulary import ServerMode

#: profiles are taken from runs with at most this many workers
PROFILED = 2
MODES = ("async", "sync")
LINKS_MBPS = (1200.0, 600.0, 300.0, 150.0)
STALENESS_MBPS = 100.0
#: one worker of several computes this many times as long
SLOW = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputRun:
    """One measurement.

    `slow` is how many times as long the last worker computes as the others; `overlap` sends during the
    backward pass.
    """

    model: str
    mode: str
    link_Mbps: float
    servers: int
    workers: int
    slow: float = 1.0
    overlap: bool = False

    @property
    def key(self) -> tuple[str, ...]:
        return (
            self.model,
            self.mode,
            f"{self.link_Mbps:g}",
            str(self.servers),
            str(self.workers),
            f"{self.slow:g}",
            str(int(self.overlap)),
        )

    @property
    def curve(self) -> tuple[str, ...]:
        """What it has in common with runs of other numbers of workers."""
        return (*self.key[:4], *self.key[5:])

    @property
    def hosts(self) -> int:
        return self.servers + self.workers

    def seconds(self) -> float:
        """How long to measure: ten cycles or so, four or five at least, by a rough idea of a cycle; longer
        for profiles and histograms.
        """
        transfer, compute = 8 * megabytes()[self.model] / self.link_Mbps, JOBS[self.model].compute_s
        if self.mode == ServerMode.SYNC:
            cycle = compute * self.slow + 2 * transfer * max(1.0, self.workers / self.servers)
        else:
            cycle = max(compute + 2 * transfer, transfer * self.workers / self.servers)
        longer = 3.0 if self.link_Mbps == STALENESS_MBPS else 1.0
        if self.workers <= PROFILED:
            longer = 1.5
        return max(min(max(10 * cycle, 1.0), 2.2), 4.5 * cycle) * longer


def grid(
    *,
    models: Iterable[str] = tuple(JOBS),
    modes: Iterable[str] = MODES,
    links: Iterable[float] = LINKS_MBPS,
    servers: Iterable[int] = (1, 2),
    workers: Iterable[int] = range(1, 9),
    slow: float = 1.0,
    overlap: bool = False,
) -> list[ThroughputRun]:
    """All combinations: one link after another, within it one curve after another, which begins with the runs
    that need most hosts, so that small ones fill the gaps."""
    out = []
    for link in links:
        some = list(itertools.product(models, modes, servers))
        random.Random(7).shuffle(some)
        out += [
            ThroughputRun(
                model=model, mode=mode, link_Mbps=link, servers=count, workers=n, slow=slow, overlap=overlap
            )
            for model, mode, count in some
            for n in sorted(workers, reverse=True)
        ]
    return out


def staleness() -> list[ThroughputRun]:
    """Asynchronous runs at 100 Mbit/s with four workers, whose staleness is predicted, and their profiles."""
    return grid(modes=["async"], links=[STALENESS_MBPS], servers=[1], workers=[1, 2, 4])


def uneven() -> list[ThroughputRun]:
    """One slow worker among two, whose steps are the profile, and among three, four and eight."""
    return grid(
        models=["mlp", "cnn", "transformer"],
        links=LINKS_MBPS[:1],
        servers=[1],
        workers=[2, 3, 4, 8],
        slow=SLOW,
    )


def overlapped() -> list[ThroughputRun]:
    """Two servers, whose parts go up during the backward pass."""
    return grid(
        models=["resnet", "transformer"], links=[300.0], servers=[2], workers=[1, 2, 4, 8], overlap=True
    )


def standard() -> list[ThroughputRun]:
    """The published data set."""
    return [
        *grid(links=LINKS_MBPS[:1]),
        *uneven(),
        *grid(links=LINKS_MBPS[1:2]),
        *overlapped(),
        *grid(links=LINKS_MBPS[2:3]),
        *staleness(),
        *grid(links=LINKS_MBPS[3:]),
    ]


@cache
def megabytes() -> dict[str, float]:
    """Size of each model's parameters."""
    return {name: sum(p.numel() for p in job.build().parameters()) * 4e-6 for name, job in JOBS.items()}
