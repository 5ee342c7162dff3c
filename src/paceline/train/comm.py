"""One ordered communication engine per process, under every strategy.

Strategies submit *jobs*: generators that yield collectives and are sent what came of them. A job belongs to a
channel. Stage `s` of the jobs of a channel (their first collective, their second...) has a process group of
its own, and on it collectives are issued in the order in which the jobs were submitted, whatever the timing.
So all ranks issue the same collectives in the same order on each group as long as they submit the same jobs
in the same order, which strategies take from a list that all ranks share, never from a clock.

NCCL needs more: collectives of several groups on one device must be issued in the same order by all ranks, or
they wait for each other for ever. There, one group serves all lanes and jobs run one after another as they
were submitted; nothing waits for the device in between.

Two threads serve it: one issues collectives and sees them end, several in flight per group; one runs what
lies between them (encoders, sums, updates), so that no arithmetic delays the next message. Nothing is ever
issued from a callback of a collective: on gloo these run on several threads, and ranks would disagree on the
order.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import hashlib
import itertools
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from paceline.errors import RunError
from paceline.train._torch import default_store
from paceline.train.heap import keep
from paceline.train.patience import within
from paceline.train.transport import Collective as Collective  # jobs are written with it
from paceline.train.transport import Handle, Lane, Ways, give_back, leaving, outcome, said
from paceline.units import show

T = TypeVar("T")

#: pieces into which a long reduction is cut: enough in flight that both directions of a link are busy
CHUNK_BYTES = 1 << 20
IN_FLIGHT = 4
TIMEOUT_S = 300.0
#: for ranks to come to `close` together; whoever waited longer leaves without the others
CLOSE_S = 60.0
#: for what a process still has to send or give back, where it ends by an error
_HASTE_S = 2.0
#: without any message, until an engine's attendant looks whether another rank asks for something
LOOK_S = 0.2
#: for the store to answer a rank that asks who is late, which takes 2 s if it does at once
_STORE_S = 6.0
#: stages of a job on each channel; gradients may need an agreement, and a second product of a low rank
CHANNELS: Mapping[str, int] = {"gradients": 4, "parameters": 1, "reads": 1}
#: channels that send with the sockets of another
_WITH = {"reads": "parameters"}


#: a stage of a job is one collective, or several that are issued together; it is sent what came of it, or of
#: each
Request = Collective | Sequence[Collective]
Job = Generator[Request, Any, Any]


@dataclass(frozen=True, slots=True)
class CommEvent:
    """A collective, or arithmetic between two, as it happened; seconds of `time.perf_counter`."""

    name: str
    op: str
    channel: str
    bytes: int
    start_s: float
    end_s: float


class Ticket:
    """What becomes of a job."""

    def __init__(self, name: str, future: torch.futures.Future[Any] | None = None) -> None:
        self.name, self.future = name, future
        self.result: Any = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._ready: Any = None  # a CUDA event

    @property
    def done(self) -> bool:
        """Whether the job has ended."""
        return self._done.is_set()

    def ends_within(self, seconds: float) -> bool:
        """Whether the job ends within so many seconds, well or not."""
        return self._done.wait(seconds)

    def wait(self) -> Any:
        """What the job returned; raises what went wrong in it."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        if self._ready is not None:
            torch.cuda.current_stream().wait_event(self._ready)
        return self.result


@dataclass(slots=True, eq=False)
class _Running:
    """A job on its way."""

    ticket: Ticket
    job: Job
    channel: str
    after: Sequence[Ticket]
    #: how many were submitted before it
    number: int
    stage: int = 0
    value: Any = None
    request: Request = ()
    works: list[list[Handle]] = field(default_factory=list)
    issued_s: float = 0.0
    begun: bool = False
    ready: Any = None
    #: no arithmetic precedes its first collective
    bare: bool = False

    @property
    def requests(self) -> Sequence[Collective]:
        return (self.request,) if isinstance(self.request, Collective) else self.request

    @property
    def handles(self) -> Iterator[Handle]:
        return itertools.chain.from_iterable(self.works)


class Attendant(Protocol):
    """Answers other ranks while nothing else happens on an engine."""

    def look(self) -> None:
        """Whether somebody asks; called by the thread that communicates."""

    def leave(self, *, well: bool) -> None:
        """The engine ends, `well` or by an error."""


@dataclass(slots=True)
class _Queue:
    """One stage of a channel: what waits to be issued, what is in flight; both in order."""

    lane: Lane
    digest: Any = field(default_factory=hashlib.sha256)
    waiting: deque[_Running] = field(default_factory=deque)
    flying: deque[_Running] = field(default_factory=deque)


#: for the end of the process
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    """A loop may end with parameters on their way, and its script right behind it: torch does not survive
    threads that are at work then.
    """
    failed = hasattr(sys, "last_value")  # what others should have sent may never come then
    for engine in list(_engines):
        if not failed:
            engine.end()
        elif engine.attendant is not None:
            engine.attendant.leave(well=False)
        if engine.failed:
            leaving.extend(engine.waiting())
    deadline = time.monotonic() + (_HASTE_S if failed else CLOSE_S)
    for thread in leaving:
        thread.join(max(0.0, deadline - time.monotonic()))


def single(request: Request) -> Job:
    """A job of one stage, which returns what came of it."""
    return (yield request)


def agree(value: T) -> T:
    """What rank 0 says, on all ranks; plain data."""
    if dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def in_turn() -> bool:
    """Whether the backend wants all collectives of a process in one order."""
    return bool(dist.get_backend() == "nccl")


class Engine:
    """Runs jobs in order.

    Make it on all ranks at the same point: it makes process groups; `close` it, or use it as a context
    manager.
    """

    def __init__(
        self,
        *,
        channels: Mapping[str, int] | None = None,
        timeout_s: float = TIMEOUT_S,
        chunk_bytes: int = CHUNK_BYTES,
        in_flight: int = IN_FLIGHT,
        device: torch.device | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise RunError(
                "torch.distributed has no process group yet; call torch.distributed.init_process_group first"
            )
        keep()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.timeout_s, self.chunk_bytes, self.in_flight = timeout_s, chunk_bytes, in_flight
        self.events: list[CommEvent] | None = None
        self.issued = 0
        self._arithmetic_threads = torch.get_num_threads()
        cuda = device is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None
        limit = timedelta(seconds=timeout_s * 2)  # ours comes first, and knows the parameter's name
        self._lanes: dict[tuple[str, int], _Queue] = {}
        self._in_turn = in_turn()
        common: _Queue | None = None
        for channel, stages in (channels or CHANNELS).items():
            if common is not None:
                ways = common.lane.ways
            elif channel in _WITH:
                ways = self._lanes[_WITH[channel], 0].lane.ways
            else:
                ways = Ways(limit)
            for stage in range(stages):
                if common is None:
                    queue = _Queue(
                        Lane(f"{channel}-{stage}", len(self._lanes), ways, limit, chunk_bytes, self._wake)
                    )
                    common = queue if self._in_turn else None
                else:
                    queue = _Queue(common.lane, common.digest)
                self._lanes[channel, stage] = queue
        #: where jobs run in turn: the one that does; and collectives that the device may still have to carry
        #: out
        self._turn: _Running | None = None
        self._unseen: deque[_Running] = deque()
        self._numbers = itertools.count()
        self._submitted: dict[str, deque[_Running]] = {channel: deque() for channel, _ in self._lanes}
        self._work: deque[_Running] = deque()
        #: jobs of each channel before their first collective, at work or waiting for it
        self._starting = dict.fromkeys(self._submitted, 0)
        self._lock = threading.Lock()
        #: for the thread that communicates, and for the one that computes
        self._to_send, self._to_do = threading.Condition(self._lock), threading.Condition(self._lock)
        self._error: BaseException | None = None
        self._open = True
        #: who answers others while nothing happens here
        self.attendant: Attendant | None = None
        self._live: set[_Running] = set()
        self._threads = [
            threading.Thread(target=self._guard, args=(loop,), name=f"paceline-{name}", daemon=True)
            for name, loop in (("communication", self._communicate), ("arithmetic", self._compute))
        ]
        for thread in self._threads:
            thread.start()
        _engines.add(self)

    # -- for strategies ----------------------------------------------------------------------------

    def submit(
        self,
        name: str,
        job: Job,
        *,
        channel: str = "gradients",
        after: Sequence[Ticket] = (),
        bare: bool = False,
        future: torch.futures.Future[Any] | None = None,
    ) -> Ticket:
        """Appends a job to a channel; it starts when those `after` which it comes have ended, and holds up
        those behind it until then.

        `bare`: no arithmetic precedes its first collective, which is issued without a detour. `future` is
        told what comes of it, too.
        """
        ticket = Ticket(name, future)
        running = _Running(ticket, job, channel, after, next(self._numbers), bare=bare)
        if self._stream is not None:
            running.ready = torch.cuda.Event()
            running.ready.record()
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise RunError(f"rank {self.rank}: {name} came after the communication engine was closed")
            self._submitted[channel].append(running)
            self._live.add(running)
            self._to_send.notify()
        return ticket

    def order(self) -> str:
        """A digest of the collectives issued so far, of each group in order: the same on all ranks."""
        return (
            f"{self.issued}:"
            + hashlib.sha256(
                "".join(lane.digest.hexdigest() for lane in self._lanes.values()).encode()
            ).hexdigest()[:16]
        )

    def record(self) -> list[CommEvent]:
        """From now on, keep what happens when; the list that it is kept in."""
        self.events = []
        return self.events

    @property
    def failed(self) -> bool:
        """Whether nothing can be sent any more: an error has ended it, or NCCL's groups were destroyed.

        Destroyed groups of gloo serve whoever holds them, as this engine does.
        """
        return self._error is not None or (self._in_turn and not dist.is_initialized())

    def end(self) -> list[threading.Thread]:
        """Ends the threads once all jobs are done, or at once after an error; which there were."""
        with self._lock:
            self._open = False
            self._to_send.notify_all()
            self._to_do.notify_all()
        threads, self._threads = self._threads, []
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout=self.timeout_s)
        if (attendant := self.attendant) is not None:
            self.attendant = None
            attendant.leave(well=self._error is None)
        return threads

    def check(self) -> None:
        """Raises what has ended it, if something has."""
        if self._error is not None:
            raise self._error

    def waiting(self) -> list[threading.Thread]:
        """Threads that wait within the backend, up to its limit; each ends with its last collective.

        The end of the process must not find them there: it would be aborted.
        """
        return [thread for lane in self._each_lane() if (thread := lane.dismiss()) is not None]

    def _each_lane(self) -> list[Lane]:
        return list(dict.fromkeys(queue.lane for queue in self._lanes.values()))

    def close(self) -> None:
        """Ends the threads once all jobs are done, or at once after an error, and gives process groups back.
        All ranks close together.

        Ranks that are gone hold nobody up for longer than `CLOSE_S`; what still waits for them is left to a
        thread of its own.
        """
        threads = self.end()
        if not threads:
            return  # closed before
        well = self._error is None and not any(thread.is_alive() for thread in threads)
        if self._stream is not None and well:
            self._stream.synchronize()
        lanes = self._each_lane()
        if well and self.world > 1 and not self.failed:  # or what others still receive would be cut off
            well = lanes[0].meet(min(self.timeout_s, CLOSE_S))
        if not well:
            leaving.extend(self.waiting())
        give_back([group for lane in lanes for group in lane.release(well)], well=well)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- threads -----------------------------------------------------------------------------------

    def _guard(self, loop: Callable[[], None]) -> None:
        torch.set_num_threads(self._arithmetic_threads)  # a new thread would take the machine's default
        try:
            with (
                torch.no_grad(),
                torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext(),
            ):
                loop()
        except BaseException as error:  # whatever it was, those who wait must hear of it
            with self._lock:
                self._error = self._error or error
                for running in self._live:
                    self._finish(running, error=self._error)
                self._live.clear()
                self._to_send.notify_all()
                self._to_do.notify_all()

    @property
    def _over(self) -> bool:
        return self._error is not None or not (self._open or self._live)

    def _communicate(self) -> None:
        while True:
            idle = False
            with self._lock:
                while not (moved := self._admit() + self._ended()):
                    if self._over:
                        return
                    ready = [
                        lane
                        for lane in self._lanes.values()
                        if lane.waiting and len(lane.flying) < self.in_flight
                    ]
                    if ready:
                        break
                    patience = LOOK_S if self.attendant is not None else 1.0
                    idle = not self._to_send.wait(timeout=min(patience, self.timeout_s / 4))
                    self._check_time()
                    if idle and self.attendant is not None:
                        break
                if moved:
                    self._to_do.notify()
                starting = []
                for lane in self._lanes.values():
                    while lane.waiting and len(lane.flying) < self.in_flight:
                        running = lane.waiting.popleft()
                        lane.flying.append(running)
                        starting.append((lane, running))
            for lane, running in starting:
                self._issue(lane, running)
            if idle and (attendant := self.attendant) is not None:
                attendant.look()

    def _next(self) -> Iterator[_Running]:
        """Jobs whose turn has come."""
        if self._in_turn:
            first = min(
                (queue for queue in self._submitted.values() if queue),
                key=lambda queue: queue[0].number,
                default=None,
            )
            if first is not None and self._turn not in self._live:
                self._turn = first.popleft()
                yield self._turn
            return
        for queue in self._submitted.values():
            while queue and all(ticket.done for ticket in queue[0].after):
                yield queue.popleft()

    def _admit(self) -> int:
        """Jobs whose turn has come go to the arithmetic thread, for what precedes their first collective."""
        count = 0
        for running in self._next():
            if running.bare and not self._starting[running.channel]:
                self._settle(running, *self._run(running))
            else:  # also where one before it is not that far yet: their order is that of all ranks
                self._starting[running.channel] += 1
                self._work.append(running)
            count += 1
        return count

    def _ended(self) -> int:
        """Collectives that are done, the oldest of each group first, go on to what follows them."""
        count = 0
        for (channel, _), lane in self._lanes.items():
            while (
                lane.flying and lane.flying[0].works and all(handle.done for handle in lane.flying[0].handles)
            ):
                running = lane.flying.popleft()
                try:
                    for handle in running.handles:
                        handle.check()
                        handle.finish()
                except RuntimeError as error:
                    raise self._failure(running, f"failed: {said(error)}") from error
                if self.events is not None:
                    now = time.perf_counter()
                    self.events += [
                        CommEvent(running.ticket.name, c.op, channel, c.bytes, running.issued_s, now)
                        for c in running.requests
                    ]
                if self._in_turn:
                    self._unseen.append(copy.copy(running))
                results = [
                    outcome(c, works) for c, works in zip(running.requests, running.works, strict=True)
                ]
                running.value = results[0] if isinstance(running.request, Collective) else results
                running.works = []
                running.stage += 1
                if all(request.last for request in running.requests):
                    self._settle(running, *self._run(running))
                else:
                    self._work.append(running)
                count += 1
        return count

    def _compute(self) -> None:
        while True:
            with self._lock:
                while not self._work:
                    if self._over:
                        return
                    self._to_do.wait(timeout=1.0)
                running = self._work.popleft()
            self._advance(running)

    def _advance(self, running: _Running) -> None:
        """Runs a job up to its next collective or its end."""
        start, first = time.perf_counter(), not running.begun
        ended, result = self._run(running)
        if self.events is not None:
            self.events.append(
                CommEvent(running.ticket.name, "arithmetic", running.channel, 0, start, time.perf_counter())
            )
        with self._lock:
            self._starting[running.channel] -= first
            self._settle(running, ended, result)
            self._to_send.notify()

    def _run(self, running: _Running) -> tuple[bool, Any]:
        """Whether the job has ended, and what it returned."""
        if self._stream is not None and not running.begun:
            self._stream.wait_event(running.ready)
        try:
            running.request = running.job.send(running.value) if running.begun else next(running.job)
            running.begun, running.value = True, None
        except StopIteration as stop:
            return True, stop.value
        return False, None

    def _settle(self, running: _Running, ended: bool, result: Any) -> None:
        """Where a job goes that has run up to there; with the lock held."""
        if ended:
            self._live.discard(running)
            self._finish(running, result)
            return
        lane = self._lanes.get((running.channel, running.stage))
        if lane is None:
            raise RunError(
                f"{running.ticket.name} asks for {running.stage + 1} collectives one after another; its"
                " channel has fewer stages"
            )
        lane.waiting.append(running)

    def _finish(self, running: _Running, result: Any = None, error: BaseException | None = None) -> None:
        ticket = running.ticket
        ticket.result, ticket._error = result, error
        if self._stream is not None and error is None:
            ticket._ready = torch.cuda.Event()
            ticket._ready.record(self._stream)
        if ticket.future is not None:
            (
                ticket.future.set_exception(error)
                if isinstance(error, Exception)
                else ticket.future.set_result(result)
            )
        ticket._done.set()

    # -- collectives -------------------------------------------------------------------------------

    def _issue(self, lane: _Queue, running: _Running) -> None:
        running.issued_s = time.perf_counter()
        for request in running.requests:
            self.issued += 1
            shapes = [(t.numel(), str(t.dtype)) for t in request.tensors]
            lane.digest.update(f"{running.ticket.name} {request.op} {shapes}\n".encode())
        try:
            works = [list(lane.lane.start(request)) for request in running.requests]
        except RuntimeError as error:
            raise self._failure(running, f"could not start: {said(error)}") from error
        with self._lock:
            running.works = works
        for handle in running.handles:
            handle.call(self._wake)

    def _wake(self, _: Any = None) -> None:
        with self._lock:
            self._to_send.notify()

    def _check_time(self) -> None:
        while self._unseen and all(handle.complete for handle in self._unseen[0].handles):
            self._unseen.popleft()
        oldest = [
            *(lane.flying[0] for lane in self._lanes.values() if lane.flying and lane.flying[0].works),
            *itertools.islice(self._unseen, 1),
        ]
        for running in oldest:
            if time.perf_counter() - running.issued_s > self.timeout_s:
                raise self._failure(
                    running, f"has waited {self.timeout_s:g} s for the other ranks{self._who()}"
                )

    def _failure(self, running: _Running, what: str) -> RunError:
        names = {
            "sum": "all-reduce",
            "max": "all-reduce (max)",
            "gather": "all-gather",
            "exchange": "all-to-all",
        }
        ops = " and ".join(dict.fromkeys(names[request.op] for request in running.requests))
        size = show(sum(request.bytes for request in running.requests), "bytes")
        return RunError(f"rank {self.rank} of {self.world}: {ops} of {running.ticket.name} ({size}) {what}")

    def _silent(self) -> list[int]:
        """Ranks that do not say in the store that they wait."""
        store = default_store()
        store.set(f"paceline/late/{self.rank}", str(self.issued))
        time.sleep(2.0)
        return [r for r in range(self.world) if r != self.rank and not store.check([f"paceline/late/{r}"])]

    def _who(self) -> str:
        """Which ranks did not report that they wait, too: those hang, or are somewhere else."""
        try:
            silent = within(_STORE_S, self._silent)
        except TimeoutError:
            return (
                "; no sign of the rank that keeps the store of the process group (rank 0, unless "
                "torchrun keeps it)"
            )
        except (RuntimeError, ValueError):  # the store was on the rank that is gone
            return ""
        if not silent:
            return "; all ranks wait, for different things"
        return f"; no sign of rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
