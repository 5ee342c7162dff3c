"""The fine model: n workers replay profiled steps against servers whose links are shared, event by event.

A worker computes and exchanges with every server: its update goes up, is applied under the server's lock,
parameters come down. The part of a server goes up when the compute that it needs is over: at the end of a
step, or during the backward pass where the job overlaps (`Step.leads`). The next step needs the parameters of
all servers. Transfers are flows; each has the lesser of what its two ends give it:

- up, a server takes `streams` workers at a time, in order of arrival (ordered streams; `streams = 0`: all at
once, processor sharing);
- down, all flows share, since a sender is done once its data is in the socket's buffer. TCP does not share
evenly: flows
  get random weights, new for each transfer.

Weighted max-min rates over both ends, by progressive filling. A token bucket lets a burst through after a
pause.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from paceline.errors import SpecError
from paceline.queueing.profile import WIRE, JobProfile
from paceline.sim.timeline import Span, Timeline
from paceline.spec.vocabulary import ServerMode

_TINY = 1e-9
#: how unevenly TCP shares: shapes of the gamma weights of flows down (of one server to many workers) and up
#: (of one worker to its servers); chosen once on the measured set, with connections of gloo
_DOWN_SHAPE, _UP_SHAPE = 1.5, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """What a simulated run did, warm-up left out."""

    workers: int
    throughput: float
    staleness: dict[int, int]
    #: share of time that links of servers were in use, up and down, and their locks
    busy: dict[str, float]
    #: mean seconds of a step, by part
    parts: dict[str, float]
    timeline: Timeline | None = None


@dataclass(slots=True, eq=False)
class _Port:
    """One direction of a host's link: a token bucket, full after a pause."""

    rate: float
    burst: float
    credit: float = 0.0
    last: float = 0.0
    #: bytes per second that flows take now
    taken: float = 0.0
    used: float = 0.0

    def settle(self, now: float) -> float:
        """Credit that has gathered from what flows left of the rate, be it because there were none or because
        their other ends held them up.
        """
        self.credit = min(self.burst, self.credit + (self.rate - self.taken) * (now - self.last))
        self.used += self.taken * (now - self.last)
        self.last = now
        return self.credit


@dataclass(slots=True, eq=False)
class _Flow:
    left: float
    weight: float
    ports: tuple[_Port, _Port]
    done: Callable[[], None]
    rate: float = 0.0


class _Network:
    """Flows in progress, and when the next of them ends."""

    def __init__(self) -> None:
        self.flows: list[_Flow] = []
        self.now = 0.0

    def start(self, size: float, weight: float, ports: tuple[_Port, _Port], done: Callable[[], None]) -> None:
        self.flows.append(_Flow(max(size, _TINY), weight, ports, done))
        self._share()

    def next_end(self) -> float:
        return min((self.now + flow.left / flow.rate for flow in self.flows), default=float("inf"))

    def advance(self, to: float) -> list[_Flow]:
        """Moves time on; flows that ended."""
        passed, ended = to - self.now, []
        for flow in self.flows:
            flow.left -= flow.rate * passed
            if flow.left <= flow.rate * 1e-12 + _TINY / 2:
                ended.append(flow)
        self.now = to
        if ended:
            for flow in ended:
                for port in flow.ports:
                    port.settle(to)
                    port.taken = 0.0
            self.flows = [flow for flow in self.flows if flow not in ended]
            self._share()
        return ended

    def _share(self) -> None:
        """Bursts where both ends have credit, then weighted max-min over both ends of every flow: the
        tightest port first.
        """
        room: dict[_Port, float] = {}
        weights: dict[_Port, float] = {}
        for flow in self.flows:
            for port in flow.ports:
                if port not in room:
                    port.settle(self.now)
                    room[port], weights[port] = port.rate, 0.0
                weights[port] += flow.weight
        for flow in self.flows:
            out, into = flow.ports
            gain = min(out.credit, into.credit, flow.left - _TINY)
            if gain > 0:
                flow.left -= gain
                for port in flow.ports:
                    port.credit -= gain
                    port.used += gain
        open_ = list(self.flows)
        while open_:
            level, tight = min(
                ((room[port] / weight, port) for port, weight in weights.items() if weight > 0), key=_first
            )
            rest = []
            for flow in open_:
                if tight in flow.ports:
                    flow.rate = max(level * flow.weight, 1.0)
                    for port in flow.ports:
                        room[port] = max(room[port] - flow.rate, 0.0)
                        weights[port] -= flow.weight
                else:
                    rest.append(flow)
            weights[tight] = 0.0
            open_ = rest
        for port, left in room.items():
            port.taken = port.rate - left


def _first(pair: tuple[float, _Port]) -> float:
    return pair[0]


@dataclass(slots=True)
class _Server:
    inward: _Port
    outward: _Port
    waiting: deque[int] = field(default_factory=deque)
    receiving: int = 0
    queue: deque[int] = field(default_factory=deque)
    locked: bool = False
    locked_s: float = 0.0
    version: int = 0
    round: list[int] = field(default_factory=list)
    base: dict[int, int] = field(default_factory=dict)
    held: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Worker:
    inward: _Port
    outward: _Port
    missing: int = 0
    clock: int = 0
    began: float = 0.0
    ends: list[float] = field(default_factory=list)


class _Run:
    def __init__(
        self, job: JobProfile, workers: int, steps: int, settle: int, seed: int, streams: int, trace: bool
    ) -> None:
        self.job, self.goal, self.settle, self.streams, self.trace = (
            job,
            steps + settle,
            settle,
            streams,
            trace,
        )
        self.random, self.net = random.Random(seed), _Network()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        rate, burst = job.link.rate_Bps, job.link.burst_bytes
        self.workers = [_Worker(_Port(rate, burst), _Port(rate, burst)) for _ in range(workers)]
        self.servers = [_Server(_Port(rate, burst), _Port(rate, burst)) for _ in range(job.servers)]
        self.steps = job.steps(workers)
        self.other, self.update = job.samples("other_s").tolist(), job.samples("update_s").tolist()
        self.stale: Counter[int] = Counter()
        self.spans: list[Span] = []
        self.spent = dict.fromkeys(("compute", "up", "update", "down"), 0.0)

    # -- clockwork ---------------------------------------------------------------------------------

    def at(self, delay: float, what: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.net.now + delay, self.count, what))

    def go(self) -> None:
        for i in range(len(self.workers)):
            self.at(self.random.random() * 1e-3, lambda i=i: self.start(i))  # type: ignore[misc]
        while min(len(worker.ends) for worker in self.workers) < self.goal:
            flow_end = self.net.next_end()
            if self.events and self.events[0][0] <= flow_end:
                moment, _, what = heapq.heappop(self.events)
                for flow in self.net.advance(moment):
                    flow.done()
                what()
            else:
                for flow in self.net.advance(flow_end):
                    flow.done()

    def span(self, rank: int, name: str, stream: str, start: float, **details: int) -> None:
        if self.trace:
            self.spans.append(Span(name, stream, start, self.net.now, stream, dict(details), rank))

    # -- a step ------------------------------------------------------------------------------------

    def start(self, i: int) -> None:
        begun = self.net.now
        self.workers[i].began = begun
        step, count = self.random.choice(self.steps[i]), len(self.servers)
        took = step.compute_s
        self.workers[i].missing = count + 1

        def computed() -> None:
            self.span(i, "compute", "compute", begun)
            self.spent["compute"] += took
            self.workers[i].clock += 1
            self.over(i)

        self.at(took, computed)
        # one thread of the worker per server, each with delays of its own; a part goes when the compute it
        # needs is over
        for s in range(count):
            self.at(
                max(took - step.lead(s, count), 0.0) + self.random.choice(self.other), partial(self.ask, i, s)
            )

    def over(self, i: int) -> None:
        """The compute of a step, or one of its parts, is over: the next step needs all of them."""
        worker = self.workers[i]
        worker.missing -= 1
        if worker.missing == 0:
            worker.ends.append(self.net.now)
            if self.job.mode == ServerMode.BOUNDED:
                for other in range(len(self.servers)):
                    self.release(other)
            self.start(i)

    def ask(self, i: int, s: int) -> None:
        self.servers[s].waiting.append(i)
        self.admit(s)

    def admit(self, s: int) -> None:
        server = self.servers[s]
        while server.waiting and (self.streams == 0 or server.receiving < self.streams):
            i = server.waiting.popleft()
            server.receiving += 1
            begun = self.net.now

            def received(i: int = i, begun: float = begun) -> None:
                self.span(i, "send", f"up{s}", begun, server=s)
                self.spent["up"] += self.net.now - begun
                server.receiving -= 1
                server.queue.append(i)
                self.lock(s)
                self.admit(s)

            self.net.start(
                WIRE * self.job.up_bytes / len(self.servers),
                self.weight(_UP_SHAPE),
                (self.workers[i].outward, server.inward),
                received,
            )

    def weight(self, shape: float) -> float:
        return self.random.gammavariate(shape, 1.0) + 1e-3

    def lock(self, s: int) -> None:
        server = self.servers[s]
        if server.locked or not server.queue:
            return
        i = server.queue.popleft()
        rounds = self.job.mode.in_rounds
        if rounds:
            late = server.base.get(i, 0) < server.version
            if not late:
                server.round.append(i)
            needed = len(self.workers) - (self.job.backups if self.job.mode == ServerMode.BACKUP else 0)
            if late or len(server.round) < needed:
                if late:
                    self.send(s, i)
                self.lock(s)
                return
        server.locked = True
        took, begun = self.random.choice(self.update), self.net.now
        server.locked_s += took

        def applied() -> None:
            self.span(len(self.workers) + s, "update", "update", begun, worker=i)
            self.spent["update"] += took
            server.locked = False
            if s == 0 and not rounds and len(self.workers[i].ends) >= self.settle:
                self.stale[server.version - server.base.get(i, 0)] += 1
            server.version += 1
            ready, server.round = (server.round, []) if rounds else ([i], [])
            server.held += ready
            self.release(s)
            self.lock(s)

        self.at(took, applied)

    def release(self, s: int) -> None:
        """Answers go out, to those whom bounded staleness does not hold back."""
        server = self.servers[s]
        slowest = min(worker.clock for worker in self.workers)
        free = [
            i
            for i in server.held
            if self.job.mode != ServerMode.BOUNDED or self.workers[i].clock - slowest <= self.job.staleness
        ]
        server.held = [i for i in server.held if i not in free]
        for i in free:
            self.send(s, i)

    def send(self, s: int, i: int) -> None:
        server, begun = self.servers[s], self.net.now
        server.base[i] = server.version

        def arrived() -> None:
            self.span(i, "receive", f"down{s}", begun, server=s)
            self.spent["down"] += self.net.now - begun
            self.over(i)

        size, ports = WIRE * self.job.down_bytes / len(self.servers), (server.outward, self.workers[i].inward)
        self.net.start(size, self.weight(_DOWN_SHAPE), ports, arrived)


def simulate(
    job: JobProfile, workers: int, *, steps: int = 40, seed: int = 0, streams: int = 1, trace: bool = False
) -> SimulatedRun:
    """`workers` of a job for at least `steps` steps each after as many as ten to settle; `trace` keeps what
    each did when.
    """
    if workers < 1 or steps < 2:
        raise SpecError(f"a simulation needs at least one worker and two steps, got {workers} and {steps}")
    settle = min(10, steps)
    run = _Run(job, workers, steps, settle, seed, streams, trace)
    run.go()
    start = max(worker.ends[settle - 1] for worker in run.workers)
    end = min(worker.ends[-1] for worker in run.workers)
    rate = 0.0
    for worker in run.workers:
        inside = [t for t in worker.ends if start <= t <= end]
        rate += (len(inside) - 1) / (inside[-1] - inside[0]) if len(inside) > 1 else 0.0
    total, now = sum(len(worker.ends) for worker in run.workers), run.net.now
    capacity = now * job.link.rate_Bps * len(run.servers)
    busy = {
        "uplink": sum(s.inward.used for s in run.servers) / capacity,
        "downlink": sum(s.outward.used for s in run.servers) / capacity,
        "server": sum(s.locked_s for s in run.servers) / (now * len(run.servers)),
    }
    timeline = Timeline(tuple(run.spans), f"{job.name}, {workers} workers") if trace else None
    return SimulatedRun(
        workers=workers,
        throughput=rate,
        staleness=dict(sorted(run.stale.items())),
        busy=busy,
        parts={name: spent / total for name, spent in run.spent.items()},
        timeline=timeline,
    )
