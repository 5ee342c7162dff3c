"""The simulator against queueing theory, and against simpy as an independent simulation: means within their
confidence.
"""

import math
import random

import numpy as np
import pytest

from paceline.sched import ClusterShape, Job, Policy, ScaledSpeed, policies
from paceline.sched.metrics import interval
from paceline.sched.simulate import simulate

#: the 99.9 % interval of six runs over their 95 % one, for several comparisons are made
CONFIDENCE = 6.87 / 2.57


def jobs(seed, count, gap, draw):
    """Poisson arrivals, one device each, no restart cost; `draw` gives lengths."""
    random_ = random.Random(seed)
    now, out = 0.0, []
    for i in range(count):
        now += random_.expovariate(1 / gap)
        out.append(
            Job(name=str(i), submit_s=now, work=max(draw(random_), 1e-9), speed=ScaledSpeed(), restart_s=0.0)
        )
    return out


def mean_response(policy, servers, count, gap, draw, seeds=6):
    """Mean response and its half width, the first tenth of the jobs left out."""
    values = []
    for seed in range(seeds):
        outcome = simulate(jobs(seed, count, gap, draw), ClusterShape.parse(f"1x{servers}xt4"), policy())
        values.append(np.mean([d.response_s for d in outcome.done if int(d.name) >= count // 10]))
    return interval(values)


def exponential(draw):
    return draw.expovariate(1.0)


def bimodal(draw):
    """Mean 1, squared coefficient of variation 2.25 (times 0.1 or 2.5)."""
    return 2.5 if draw.random() < 0.375 else 0.1


@pytest.mark.parametrize(("servers", "load"), [(1, 0.7), (4, 0.8), (16, 0.9)])
def test_mmc(servers, load):
    """Erlang C."""
    offered = servers * load
    top = offered**servers / math.factorial(servers) / (1 - load)
    waits = top / (sum(offered**k / math.factorial(k) for k in range(servers)) + top)
    theory = 1 + waits / (servers - offered)
    found, width = mean_response(lambda: policies.get("fifo"), servers, 6000, 1 / offered, exponential)
    assert abs(found - theory) < CONFIDENCE * width and width < 0.15 * theory


class RoundRobin(Policy):
    """Each runs a short quantum in turn: processor sharing in the limit."""

    name = "round-robin"

    def __init__(self, quantum_s=0.1):
        self.quantum_s = quantum_s
        self.until_s = math.inf

    def decide(self, state):
        running = next(iter(state.running.values()), None)
        if running and state.waiting and state.now_s >= self.until_s - 1e-12:
            state.stop(running, "its quantum is over")
            running = None
        if not running and state.waiting:
            state.start(next(iter(state.waiting.values())), 1, "its turn")
            self.until_s = state.now_s + self.quantum_s

    def wake_s(self, state):
        return max(self.until_s, state.now_s) if state.waiting else math.inf


@pytest.mark.parametrize("draw", [exponential, bimodal])
def test_mg1_processor_sharing(draw):
    """Processor sharing does not mind how lengths are distributed: E[T] = E[S] / (1 - load)."""
    found, width = mean_response(RoundRobin, 1, 2000, 1 / 0.6, draw)
    mean = 1.0 if draw is exponential else 0.375 * 2.5 + 0.625 * 0.1
    theory = mean / (1 - 0.6 * mean)
    # a quantum is not infinitely short
    assert abs(found - theory) < CONFIDENCE * width + 0.05 * theory and width < 0.25 * theory


def test_srpt():
    """Schrage and Miller (1966) for exponential lengths."""
    load = 0.8
    x = np.linspace(0, 40, 40001)
    density, alive = np.exp(-x), np.exp(-x)

    def running(y):
        return np.concatenate([[0.0], np.cumsum((y[1:] + y[:-1]) / 2 * np.diff(x))])

    busy = load * running(x * density)  # load of jobs up to x
    second = load * running(x**2 * density)
    waiting = (second + load * x**2 * alive) / (2 * (1 - busy) ** 2)
    residence = running(1 / (1 - busy))
    theory = float(running((waiting + residence) * density)[-1])
    found, width = mean_response(lambda: policies.get("srtf"), 1, 6000, 1 / load, exponential)
    assert abs(found - theory) < CONFIDENCE * width and width < 0.15 * theory


def test_simpy_agrees_job_by_job():
    """The same jobs in simpy: first come, first served on four servers."""
    simpy = pytest.importorskip("simpy", reason="simpy is an oracle of the tests only")
    listed = jobs(3, 2000, 1 / 3.2, exponential)
    ends = {}
    environment = simpy.Environment()
    servers = simpy.Resource(environment, capacity=4)

    def course(job):
        yield environment.timeout(job.submit_s)
        with servers.request() as turn:
            yield turn
            yield environment.timeout(job.work)
        ends[job.name] = environment.now

    for job in listed:
        environment.process(course(job))
    environment.run()
    outcome = simulate(listed, ClusterShape.parse("1x4xt4"), policies.get("fifo"))
    assert len(ends) == 2000 and all(abs(d.end_s - ends[d.name]) < 1e-6 for d in outcome.done)
