"""What one would guess without a queueing model: a line, and the form that Optimus fits."""

from __future__ import annotations

import numpy as np

from paceline.queueing.fit import nonnegative
from paceline.queueing.mva import Vector
from paceline.queueing.profile import JobProfile


def linear(job: JobProfile, workers: int) -> Vector:
    """n workers do n times what one does (or half of what two do, where only two were profiled)."""
    run = min(job.runs, key=lambda run: run.workers)
    return np.asarray(np.arange(1, workers + 1) * run.throughput / run.workers)


def optimus(job: JobProfile, workers: int) -> Vector:
    """X(n) = n / (a + b n), a and b >= 0, fitted to the profiled runs.

    For a fixed number of servers and a fixed batch per worker both forms of Peng et al. (EuroSys 2018),
    asynchronous w / (a + b w/p + c w + d p) and synchronous 1 / (a M/w + b + c w/p + d w + e p), come down to
    this.
    """
    count = np.array([float(run.workers) for run in job.runs])
    seconds = np.array([run.workers / run.throughput for run in job.runs])
    a, b = nonnegative(np.stack([np.ones_like(count), count], axis=1), seconds)
    n = np.arange(1, workers + 1)
    return np.asarray(n / (a + b * n))
