"""The coarse model: a job as a closed queueing network, or as rounds with a barrier; microseconds per answer,
for schedulers.

Asynchronous: compute is a delay, servers' uplinks, locks and downlinks are stations with as many servers as
the job has (`mva`). Their demands are bytes over bandwidth; the delay is what a lone worker's step takes
beyond them. How much workers wait below saturation depends on how regular they are: where a run of two was
profiled the variability is the one that explains it.

Synchronous: a round lasts as a lone worker's step, longer by the barrier (slowest of n computes) and by what
each further worker adds to the transfers: R(n) = R(1) + barrier(n) + overlap (n - 1) (up + down) / servers.
Uploads of early workers run while late ones still receive, so `overlap` is below one; from a profiled run of
two, drawn towards what is usual. Where some workers are slow, uploads of the others hide behind their
compute.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.queueing.mva import Station, Vector, regular, solve
from paceline.queueing.order_statistics import kth_of, slowest_by_count
from paceline.queueing.profile import JobProfile
from paceline.spec.vocabulary import ServerMode

#: of further workers' transfers, the part that does not hide behind others': what ordered uploads and shared
#: downloads leave
_OVERLAP = 0.8
#: how far a run of two, which is noisy, moves the overlap away from that
_TRUST = 0.4
_VARIABILITY = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class CoarseCurve:
    """Steps per second of all workers for 1..n, and what limits them in the end."""

    throughput: Vector
    #: workers beyond which more of them bring little
    saturation: float
    bottleneck: str


def coarse(job: JobProfile, workers: int) -> CoarseCurve:
    """The curve for 1..`workers`."""
    return _rounds(job, workers) if job.mode.in_rounds else _network(job, workers)


def stations(job: JobProfile) -> list[Station]:
    """The closed network of an asynchronous job."""
    up, down = job.link.seconds(job.up_bytes), job.link.seconds(job.down_bytes)
    update = float(job.samples("update_s").mean())
    busy = [
        Station(name="uplink", demand_s=up, servers=job.servers),
        Station(name="server", demand_s=update, servers=1),
        Station(name="downlink", demand_s=down, servers=job.servers),
    ]
    think = max(_alone(job) - sum(station.demand_s for station in busy), 0.0)
    return [Station(name="compute", demand_s=think, servers=0), *busy]


def _alone(job: JobProfile) -> float:
    """Seconds of a step of one worker that shares with nobody."""
    return float(job.samples("compute_s").mean() + (job.samples("round_s") - job.samples("waited_s")).mean())


def _two(job: JobProfile) -> float | None:
    """Steps per second of two equal workers, where they were profiled."""
    return None if job.slow_workers else job.measured(2)


def _network(job: JobProfile, workers: int) -> CoarseCurve:
    network = stations(job)
    lively = solve(network, workers)
    clockwork = regular(lively, 0.0)
    two, variability = _two(job), _VARIABILITY
    if two and workers >= 2 and lively.throughput[1] < clockwork.throughput[1] * 0.999:
        # waiting is linear in the variability, so this is where the profiled run lies between the two
        long, short = (1 / float(curve.throughput[1]) for curve in (lively, clockwork))
        seen = float(np.clip((1 / two - short) / (long - short), 0.0, 1.0))
        variability = 0.5 * (seen + _VARIABILITY)
    curve = regular(lively, variability)
    throughput = (
        curve.throughput if not job.slow_workers else _uneven(job, curve.throughput, network[0].demand_s)
    )
    return CoarseCurve(throughput=throughput, saturation=curve.saturation, bottleneck=curve.bottleneck.name)


def _uneven(job: JobProfile, even: Vector, think_s: float) -> Vector:
    """Throughput where some workers compute longer, from that of equal ones.

    A slow worker asks less often, so n workers load the servers as fewer equal ones would: as m = n - s + s
    (Z + W) / (Z' + W), with Z and Z' the seconds that usual and slow ones think and W = m / X(m) - Z those
    they spend with servers. Between whole numbers X is on a line.
    """
    n = np.arange(1, even.size + 1, dtype=float)
    slow = np.minimum(job.slow_workers, n - 1)
    usual, later = (float(samples.mean()) for samples in job.kinds())
    like = n.copy()
    for _ in range(20):  # a contraction: W changes less than m does
        served = like / np.interp(like, n, even) - think_s
        like = n - slow + slow * (think_s + served) / (think_s + later - usual + served)
    return np.asarray(np.interp(like, n, even))


def _rounds(job: JobProfile, workers: int) -> CoarseCurve:
    usual, slow = job.kinds()
    mean = float(usual.mean())
    upload = job.link.seconds(job.up_bytes) / job.servers
    each = upload + job.link.seconds(job.down_bytes) / job.servers
    alone = _alone(job)
    overlap, two = _OVERLAP, _two(job)
    if two and each > 0:
        seen = (2 / two - alone - (slowest_by_count(usual, slow, 0, 2)[1] - mean)) / each
        overlap += _TRUST * (float(np.clip(seen, 0.3, 1.3)) - _OVERLAP)
    spare = job.backups if job.mode == ServerMode.BACKUP else 0
    n = np.arange(1, workers + 1)
    useful = np.maximum(1, n - spare)
    barrier = (
        slowest_by_count(usual, slow, job.slow_workers, workers)
        if not spare
        else np.array(
            [kth_of(job.computes(int(count)), int(needed)) for count, needed in zip(n, useful, strict=True)]
        )
    )
    added = overlap * (n - 1)
    # others' uploads are over by the time a slow worker is done
    hidden = np.minimum(float(slow.mean()) - mean, added * upload) if slow.size else 0.0
    rounds = alone + barrier - mean + added * each - hidden
    # half of what ever more workers could bring
    saturation = alone / (overlap * each) if each else float("inf")
    return CoarseCurve(
        throughput=useful / rounds,
        saturation=saturation,
        bottleneck="network" if overlap * each * workers > mean else "compute",
    )
