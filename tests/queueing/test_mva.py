"""Closed networks against textbook solutions, against a simulation, and against the clock."""

import math
import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import SpecError
from paceline.queueing.mva import Station, solve


def station(name, demand, servers=1):
    return Station(name=name, demand_s=demand, servers=servers)


def repairmen(n, think, repair, servers):
    """M/M/c//n: throughput from the birth-death equations, as every textbook solves the machine repairman
    problem.
    """
    weights = [1.0]
    for k in range(1, n + 1):
        weights.append(weights[-1] * (n - k + 1) / think * repair / min(k, servers))
    busy = sum(weight * min(k, servers) for k, weight in enumerate(weights)) / sum(weights)
    return busy / repair


@pytest.mark.parametrize("servers", [1, 2, 3, 7])
@pytest.mark.parametrize(("think", "repair"), [(10.0, 1.0), (1.0, 5.0), (100.0, 0.3)])
def test_machine_repairmen(servers, think, repair):
    curve = solve([station("think", think, 0), station("repair", repair, servers)], 40)
    for n in (1, 2, 5, 13, 40):
        assert curve.throughput[n - 1] == pytest.approx(repairmen(n, think, repair, servers), rel=1e-9)


def test_two_balanced_queues():
    # X(n) = n / (D (n + 1)) for two equal single servers (Lazowska et al. 1984, balanced systems)
    curve = solve([station("a", 0.2), station("b", 0.2)], 30)
    n = np.arange(1, 31)
    assert curve.throughput == pytest.approx(n / (0.2 * (n + 1)), rel=1e-12)


def test_central_server_by_enumeration():
    demands, n = (0.3, 0.5, 0.2), 4
    states = [(a, b, n - a - b) for a in range(n + 1) for b in range(n + 1 - a)]
    total = sum(math.prod(d**k for d, k in zip(demands, state, strict=True)) for state in states)
    busy = sum(math.prod(d**k for d, k in zip(demands, state, strict=True)) for state in states if state[1])
    curve = solve([station(str(i), demand) for i, demand in enumerate(demands)], n)
    assert curve.throughput[-1] * 0.5 == pytest.approx(busy / total, rel=1e-12)
    assert curve.utilisation[-1][1] == pytest.approx(busy / total, rel=1e-12)


def simulated(think, demands, servers, n, cycles, seed=3):
    """A Markov chain walked step by step: exponential everywhere."""
    source, state, now, done = random.Random(seed), [n] + [0] * len(demands), 0.0, 0
    while done < cycles:
        rates = [
            state[0] / think,
            *(min(k, m) / d for k, m, d in zip(state[1:], servers, demands, strict=True)),
        ]
        now += source.expovariate(sum(rates))
        (where,) = source.choices(range(len(rates)), rates)
        state[where] -= 1
        state[(where + 1) % len(state)] += 1
        done += where == len(demands)
    return done / now


@pytest.mark.parametrize("servers", [(1, 1, 1), (2, 1, 2)])
def test_agrees_with_simulation(servers):
    demands = (0.4, 0.1, 0.3)
    curve = solve(
        [
            station("think", 1.0, 0),
            *(station(str(i), d, m) for i, (d, m) in enumerate(zip(demands, servers, strict=True))),
        ],
        6,
    )
    assert curve.throughput[5] == pytest.approx(simulated(1.0, demands, servers, 6, 120_000), rel=0.01)


@given(
    st.lists(st.tuples(st.floats(1e-6, 1e3), st.integers(0, 9)), min_size=1, max_size=5), st.integers(1, 60)
)
def test_laws_hold(shape, workers):
    stations = [station(str(i), demand, servers) for i, (demand, servers) in enumerate(shape)]
    curve = solve(stations, workers)
    n = np.arange(1, workers + 1)
    assert curve.queue.sum(axis=1) == pytest.approx(n, rel=1e-6)  # Little's law, nobody is lost
    assert np.all(curve.utilisation <= 1 + 1e-9)
    assert np.all(np.diff(curve.throughput) >= -1e-9 * curve.throughput[:-1])
    bound = np.minimum(
        n / sum(s.demand_s for s in stations), 1 / max(max(s.least_s for s in stations), 1e-300)
    )
    assert np.all(curve.throughput <= bound * (1 + 1e-9))


@pytest.mark.parametrize("servers", [1, 2, 8])
def test_thousand_workers_take_under_five_milliseconds(servers):
    stations = [
        station("compute", 0.05, 0),
        station("up", 0.01, servers),
        station("server", 0.002),
        station("down", 0.012, servers),
    ]
    best = math.inf
    for _ in range(30):
        start = time.perf_counter()
        solve(stations, 1000)
        best = min(best, time.perf_counter() - start)
    assert best < 5e-3


def test_clockwork_waits_only_when_full():
    stations = [station("compute", 0.9, 0), station("link", 0.1)]
    curve = solve(stations, 20, variability=0.0)
    assert curve.throughput == pytest.approx(np.minimum(np.arange(1, 21) / 1.0, 10.0))
    between = solve(stations, 20, variability=0.5).throughput
    assert np.all(between <= curve.throughput + 1e-12)
    assert np.all(between >= solve(stations, 20).throughput - 1e-12)


def test_saturation_and_bottleneck():
    curve = solve([station("compute", 0.7, 0), station("up", 0.2, 2), station("down", 0.1)], 5)
    assert curve.bottleneck.name in ("up", "down")
    assert curve.saturation == pytest.approx(10.0)


@pytest.mark.parametrize(
    "call",
    [
        lambda: solve([station("a", 0.0)], 3),
        lambda: solve([station("a", 1.0)], 0),
        lambda: station("a", -1.0),
        lambda: solve([station("a", 1.0)], 2, variability=2.0),
        lambda: solve([station("a", 1.0, 2)], 5000),
    ],
)
def test_refuses(call):
    with pytest.raises(SpecError):
        call()
