"""Closed queueing networks: throughput of n workers that go round compute, uplink, server and downlink.

`solve` is exact for product-form networks (delay stations; processor sharing; first come, first served with
exponential service), for every population 1..n at once:

- single servers by mean value analysis, R_i(n) = D_i (1 + Q_i(n-1)), X(n) = n / sum R_i, Q_i = X R_i (Reiser
  and Lavenberg, JACM 1980);
- several servers behind one queue by the normalising constants G(n), X(n) = G(n-1)/G(n) (Buzen, CACM 1973).
  The generating function of such a station is a polynomial with coefficients D^k/k! (1 - k/m) >= 0 over
  1 - (D/m) z, so that it costs one short convolution and one linear recursion of positive terms: nothing
  cancels, where the usual recursion over marginal probabilities does.

Real steps are more regular than exponential ones: workers that take turns wait less than product form says.
`solve(..., variability=v)` takes v = 1 as product form, v = 0 as clockwork (waiting only once a station is
full), and in between weighs the waiting as Kingman's formula does, v = (Ca^2 + Cs^2)/2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.errors import SpecError

Vector = NDArray[np.float64]
#: populations beyond this would leave the range of a double in the normalising constants of stations with
#: several servers
LARGEST = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class Station:
    """Where a worker spends `demand_s` seconds per cycle: queueing for one of `servers`, or waiting for
    nobody (`servers = 0`, delay).
    """

    name: str
    demand_s: float
    servers: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.demand_s) and self.demand_s >= 0 and self.servers >= 0):
            raise SpecError(
                f"station {self.name!r} needs a demand and servers of zero or more, got {self.demand_s} s,"
                f" {self.servers}"
            )

    @property
    def least_s(self) -> float:
        """Seconds per cycle that the station needs when it is never idle; none for a delay."""
        return self.demand_s / self.servers if self.servers else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MvaCurve:
    """Cycles per second for 1..n workers, and what each station does then; row i of an array is i+1 workers,
    columns are `stations`.
    """

    stations: tuple[Station, ...]
    throughput: Vector
    residence_s: Vector

    @property
    def utilisation(self) -> Vector:
        """Share of time that each station's servers are busy; 0 for delays."""
        return np.asarray(self.throughput[:, None] * np.array([station.least_s for station in self.stations]))

    @property
    def queue(self) -> Vector:
        """Workers at each station, on average."""
        return self.throughput[:, None] * self.residence_s

    @property
    def bottleneck(self) -> Station:
        """The station that fills first as workers are added."""
        return max(self.stations, key=lambda station: station.least_s)

    @property
    def saturation(self) -> float:
        """Workers at which the asymptotes cross, (sum of demands) / (largest demand per server): more of them
        mostly wait.
        """
        return (
            sum(station.demand_s for station in self.stations) / self.bottleneck.least_s
            if self.bottleneck.least_s
            else math.inf
        )


def solve(stations: Sequence[Station], workers: int, *, variability: float = 1.0) -> MvaCurve:
    """The curve for 1..`workers`; exact at `variability` 1."""
    if workers < 1:
        raise SpecError(f"a curve needs at least one worker, got {workers}")
    if not sum(station.demand_s for station in stations) > 0:
        raise SpecError("a network of queues needs a station with a demand above zero seconds")
    if not 0 <= variability <= 1:
        raise SpecError(f"variability is between 0 (clockwork) and 1 (exponential), got {variability}")
    kept = [station for station in stations if station.demand_s > 0]
    residence = np.zeros((workers, len(stations)))
    columns = [i for i, station in enumerate(stations) if station.demand_s > 0]
    exact = _single if all(station.servers < 2 for station in kept) else _several
    throughput, residence[:, columns] = exact(kept, workers)
    curve = MvaCurve(stations=tuple(stations), throughput=throughput, residence_s=residence)
    return curve if variability == 1 else regular(curve, variability)


def _single(stations: Sequence[Station], workers: int) -> tuple[Vector, Vector]:
    """Mean value analysis: plain floats, since numpy's calls would cost more than these few products."""
    think = sum(station.demand_s for station in stations if not station.servers)
    demands = [station.demand_s for station in stations if station.servers]
    queue, rows, throughput = [0.0] * len(demands), [], []
    for n in range(1, workers + 1):
        times = [demand * (1.0 + waiting) for demand, waiting in zip(demands, queue, strict=True)]
        rate = n / (think + sum(times))
        queue = [rate * time for time in times]
        rows.append(times)
        throughput.append(rate)
    residence = np.empty((workers, len(stations)))
    residence[:, [i for i, station in enumerate(stations) if station.servers]] = np.array(rows).reshape(
        workers, len(demands)
    )
    for i, station in enumerate(stations):
        if not station.servers:
            residence[:, i] = station.demand_s
    return np.array(throughput), residence


def _several(stations: Sequence[Station], workers: int) -> tuple[Vector, Vector]:
    """Normalising constants, scaled so that the first and the last are of one size."""
    if workers > LARGEST:
        raise SpecError(
            f"stations with several servers are solved for at most {LARGEST} workers, got {workers}"
        )
    scale = _scale(stations, workers)
    whole = _constants(stations, workers, scale)
    throughput = scale * whole[:-1] / whole[1:]
    residence = np.empty((workers, len(stations)))
    for i, station in enumerate(stations):
        if station.servers == 0:
            residence[:, i] = station.demand_s
            continue
        others = _constants([s for j, s in enumerate(stations) if j != i], workers, scale)
        count = np.arange(workers + 1) * _terms(station, workers, scale)
        residence[:, i] = (np.convolve(count, others)[1 : workers + 1] / whole[1:]) / throughput
    return throughput, residence


def _scale(stations: Sequence[Station], workers: int) -> float:
    """A rate near the geometric mean of X(1..n), by the asymptotes: with demands in units of it G(n) starts
    and ends near one.
    """
    total, least = sum(s.demand_s for s in stations), max(s.least_s for s in stations)
    n = np.arange(1, workers + 1)
    rough = np.minimum(n / (total + least * (n - 1) * 0.25), 1 / least if least else np.inf)
    return float(np.exp(np.mean(np.log(rough))))


def _terms(station: Station, workers: int, scale: float) -> Vector:
    """Weights of k = 0..n workers at one station, in units of the scale."""
    demand = station.demand_s * scale
    k = np.arange(1, workers + 1)
    speed = k if station.servers == 0 else np.minimum(k, station.servers)
    return np.concatenate([[1.0], np.cumprod(demand / speed)])


def _constants(stations: Sequence[Station], workers: int, scale: float) -> Vector:
    think = sum(s.demand_s for s in stations if s.servers == 0)
    out = _terms(Station(name="think", demand_s=think, servers=0), workers, scale)
    for station in stations:
        if station.servers == 0:
            continue
        demand = station.demand_s * scale
        k = np.arange(min(station.servers, workers + 1))
        head = _terms(station, workers, scale)[: k.size] * (1 - k / station.servers)
        # np.convolve of a short head, then G(n) += D/m G(n-1)
        shaped = np.convolve(out, head)[: workers + 1].tolist()
        ratio, previous = demand / station.servers, 0.0
        for n, value in enumerate(shaped):
            previous = value + ratio * previous
            shaped[n] = previous
        out = np.array(shaped)
    return out


def regular(exact: MvaCurve, variability: float) -> MvaCurve:
    """Between product form and clockwork: waiting weighed by the variability, what clockwork still waits at
    the fullest station.
    """
    stations, n = exact.stations, np.arange(1, exact.throughput.size + 1)
    demands = np.array([station.demand_s for station in stations])
    total, fullest = float(demands.sum()), int(np.argmax([station.least_s for station in stations]))
    clockwork = np.maximum(n * stations[fullest].least_s, total)  # seconds of a cycle
    waiting = variability * (exact.residence_s - demands)
    waiting[:, fullest] += (1 - variability) * (clockwork - total)
    out = demands + waiting
    return MvaCurve(stations=stations, throughput=n / out.sum(axis=1), residence_s=out)
