"""One ordered communication engine per process, under every strategy.

Strategies submit *jobs*: generators that yield collectives and are sent what came of them. A job belongs to a channel. Stage `s` of
the jobs of a channel (their first collective, their second...) has a process group of its own, and on it collectives are issued in the
order in which the jobs were submitted, whatever the timing. So all ranks issue the same collectives in the same order on each group as
long as they submit the same jobs in the same order, which strategies take from a list that all ranks share, never from a clock.

Two threads serve it: one issues collectives and sees them end, several in flight per group; one runs what lies between them (encoders,
sums, updates), so that no arithmetic delays the next message. Nothing is ever issued from a callback of a collective: on gloo these run
on several threads, and ranks would disagree on the order.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import RunError
from paceline.train._torch import default_store, gather_single
from paceline.units import show

#: what one rank contributes -> what comes back: `sum`, `max` the one list, reduced; `gather` a list per rank; `exchange` rows by rank
OPS = ("sum", "max", "gather", "exchange")
#: pieces into which a long reduction is cut: enough in flight that both directions of a link are busy
CHUNK_BYTES = 1 << 20
IN_FLIGHT = 4
TIMEOUT_S = 300.0
#: stages of a job on each channel; gradients may need an agreement, and a second product of a low rank
CHANNELS: Mapping[str, int] = {"gradients": 4, "parameters": 1}


@dataclass(frozen=True, slots=True)
class Collective:
    """One request of a job; `exchange` sends row r of a tensor of `world` rows to rank r. What comes may be put `into` tensors at hand."""

    op: str
    tensors: Sequence[Tensor]
    into: Sequence[Tensor] = ()

    @property
    def bytes(self) -> int:
        """What one rank contributes."""
        return sum(t.numel() * t.element_size() for t in self.tensors)


#: a stage of a job is one collective, or several that are issued together; it is sent what came of it, or of each
Request = Collective | Sequence[Collective]
Job = Generator[Request, Any, Any]


@dataclass(frozen=True, slots=True)
class Event:
    """A collective, or arithmetic between two, as it happened; seconds of `time.perf_counter`."""

    name: str
    op: str
    channel: str
    bytes: int
    start_s: float
    end_s: float


class Ticket:
    """What becomes of a job."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.result: Any = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._ready: Any = None  # a CUDA event

    @property
    def done(self) -> bool:
        """Whether the job has ended."""
        return self._done.is_set()

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
    stage: int = 0
    value: Any = None
    request: Request = ()
    works: list[list[tuple[Any, Tensor]]] = field(default_factory=list)
    issued_s: float = 0.0
    begun: bool = False
    ready: Any = None

    @property
    def requests(self) -> Sequence[Collective]:
        return (self.request,) if isinstance(self.request, Collective) else self.request

    @property
    def handles(self) -> Iterator[tuple[Any, Tensor]]:
        return itertools.chain.from_iterable(self.works)


@dataclass(slots=True)
class _Lane:
    """The process group of one stage of a channel: what waits to be issued, what is in flight; both in order."""

    group: Any
    digest: Any = field(default_factory=hashlib.sha256)
    waiting: deque[_Running] = field(default_factory=deque)
    flying: deque[_Running] = field(default_factory=deque)


class Engine:
    """Runs jobs in order. Make it on all ranks at the same point: it makes process groups; `close` it, or use it as a context manager."""

    def __init__(
        self, *, channels: Mapping[str, int] | None = None, timeout_s: float = TIMEOUT_S, chunk_bytes: int = CHUNK_BYTES, in_flight: int = IN_FLIGHT,
        device: torch.device | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise RunError("torch.distributed has no process group yet; call torch.distributed.init_process_group first")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.timeout_s, self.chunk_bytes, self.in_flight = timeout_s, chunk_bytes, in_flight
        self.events: list[Event] | None = None
        self.issued = 0
        self._arithmetic_threads = torch.get_num_threads()
        cuda = device is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None
        limit = timedelta(seconds=timeout_s * 2)  # ours comes first, and knows the parameter's name
        self._lanes = {
            (channel, stage): _Lane(dist.new_group(timeout=limit))
            for channel, stages in (channels or CHANNELS).items() for stage in range(stages)
        }
        self._submitted: dict[str, deque[_Running]] = {channel: deque() for channel, _ in self._lanes}
        self._work: deque[_Running] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._open = True
        self._live: set[_Running] = set()
        self._threads = [threading.Thread(target=self._guard, args=(loop,), name=f"paceline-{name}", daemon=True)
                         for name, loop in (("communication", self._communicate), ("arithmetic", self._compute))]
        for thread in self._threads:
            thread.start()

    # -- for strategies ----------------------------------------------------------------------------

    def submit(self, name: str, job: Job, *, channel: str = "gradients", after: Sequence[Ticket] = ()) -> Ticket:
        """Appends a job to a channel; it starts when those `after` which it comes have ended, and holds up those behind it until then."""
        ticket = Ticket(name)
        running = _Running(ticket, job, channel, after)
        if self._stream is not None:
            running.ready = torch.cuda.Event()
            running.ready.record()
        with self._changed:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise RunError(f"rank {self.rank}: {name} came after the communication engine was closed")
            self._submitted[channel].append(running)
            self._live.add(running)
            self._changed.notify_all()
        return ticket

    def order(self) -> str:
        """A digest of the collectives issued so far, of each group in order: the same on all ranks."""
        return f"{self.issued}:" + hashlib.sha256("".join(lane.digest.hexdigest() for lane in self._lanes.values()).encode()).hexdigest()[:16]

    def record(self) -> list[Event]:
        """From now on, keep what happens when; the list that it is kept in."""
        self.events = []
        return self.events

    def close(self) -> None:
        """Ends the threads once all jobs are done, or at once after an error."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=self.timeout_s)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- threads -----------------------------------------------------------------------------------

    def _guard(self, loop: Callable[[], None]) -> None:
        torch.set_num_threads(self._arithmetic_threads)  # a new thread would take the machine's default
        try:
            with torch.no_grad(), torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
                loop()
        except BaseException as error:  # whatever it was, those who wait must hear of it
            with self._changed:
                self._error = self._error or error
                for running in self._live:
                    self._finish(running, error=self._error)
                self._live.clear()
                self._changed.notify_all()

    @property
    def _over(self) -> bool:
        return self._error is not None or not (self._open or self._live)

    def _communicate(self) -> None:
        while True:
            with self._changed:
                while not (moved := self._admit() + self._ended()):
                    if self._over:
                        return
                    ready = [lane for lane in self._lanes.values() if lane.waiting and len(lane.flying) < self.in_flight]
                    if ready:
                        break
                    self._changed.wait(timeout=min(1.0, self.timeout_s / 4))
                    self._check_time()
                if moved:
                    self._changed.notify_all()
                starting = []
                for lane in self._lanes.values():
                    while lane.waiting and len(lane.flying) < self.in_flight:
                        running = lane.waiting.popleft()
                        lane.flying.append(running)
                        starting.append((lane, running))
            for lane, running in starting:
                self._issue(lane, running)

    def _admit(self) -> int:
        """Jobs whose turn has come in their channel go to the arithmetic thread, for what precedes their first collective."""
        count = 0
        for queue in self._submitted.values():
            while queue and all(ticket.done for ticket in queue[0].after):
                self._work.append(queue.popleft())
                count += 1
        return count

    def _ended(self) -> int:
        """Collectives that are done, the oldest of each group first, go on to what follows them."""
        count = 0
        for (channel, _), lane in self._lanes.items():
            while lane.flying and lane.flying[0].works and all(_is_done(work) for work, _ in lane.flying[0].handles):
                running = lane.flying.popleft()
                try:
                    for work, _ in running.handles:
                        _check(work)
                except RuntimeError as error:
                    raise self._failure(running, "failed: " + str(error).strip().splitlines()[0]) from error
                if self.events is not None:
                    now = time.perf_counter()
                    self.events += [Event(running.ticket.name, c.op, channel, c.bytes, running.issued_s, now) for c in running.requests]
                results = [_outcome(c, works) for c, works in zip(running.requests, running.works, strict=True)]
                running.value = results[0] if isinstance(running.request, Collective) else results
                running.works = []
                running.stage += 1
                self._work.append(running)
                count += 1
        return count

    def _compute(self) -> None:
        while True:
            with self._changed:
                while not self._work:
                    if self._over:
                        return
                    self._changed.wait(timeout=1.0)
                running = self._work.popleft()
            self._advance(running)

    def _advance(self, running: _Running) -> None:
        """Runs a job up to its next collective or its end."""
        if self._stream is not None and not running.begun:
            self._stream.wait_event(running.ready)
        start = time.perf_counter()
        ended, result = False, None
        try:
            running.request = running.job.send(running.value) if running.begun else next(running.job)
            running.begun, running.value = True, None
        except StopIteration as stop:
            ended, result = True, stop.value
        if self.events is not None:
            self.events.append(Event(running.ticket.name, "arithmetic", running.channel, 0, start, time.perf_counter()))
        with self._changed:
            if ended:
                self._live.discard(running)
                self._finish(running, result)
            else:
                lane = self._lanes.get((running.channel, running.stage))
                if lane is None:
                    raise RunError(f"{running.ticket.name} asks for {running.stage + 1} collectives one after another; its channel has fewer stages")
                lane.waiting.append(running)
            self._changed.notify_all()

    def _finish(self, running: _Running, result: Any = None, error: BaseException | None = None) -> None:
        ticket = running.ticket
        ticket.result, ticket._error = result, error
        if self._stream is not None and error is None:
            ticket._ready = torch.cuda.Event()
            ticket._ready.record(self._stream)
        ticket._done.set()

    # -- collectives -------------------------------------------------------------------------------

    def _issue(self, lane: _Lane, running: _Running) -> None:
        running.issued_s = time.perf_counter()
        for request in running.requests:
            self.issued += 1
            lane.digest.update(f"{running.ticket.name} {request.op} {[(t.numel(), str(t.dtype)) for t in request.tensors]}\n".encode())
        try:
            works = [list(_start(request, lane.group, self.world, self.chunk_bytes)) for request in running.requests]
        except RuntimeError as error:
            raise self._failure(running, "could not start: " + str(error).strip().splitlines()[0]) from error
        with self._changed:
            running.works = works
        for work, _ in running.handles:
            with contextlib.suppress(RuntimeError):  # some have no future: the loop looks at them every so often
                work.get_future().add_done_callback(self._wake)

    def _wake(self, _: Any) -> None:
        with self._changed:
            self._changed.notify_all()

    def _check_time(self) -> None:
        now = time.perf_counter()
        for lane in self._lanes.values():
            if lane.flying and lane.flying[0].works and now - lane.flying[0].issued_s > self.timeout_s:
                raise self._failure(lane.flying[0], f"has waited {self.timeout_s:g} s for the other ranks{self._who()}")

    def _failure(self, running: _Running, what: str) -> RunError:
        names = {"sum": "all-reduce", "max": "all-reduce (max)", "gather": "all-gather", "exchange": "all-to-all"}
        ops = " and ".join(dict.fromkeys(names[request.op] for request in running.requests))
        size = show(sum(request.bytes for request in running.requests), "bytes")
        return RunError(f"rank {self.rank} of {self.world}: {ops} of {running.ticket.name} ({size}) {what}")

    def _who(self) -> str:
        """Which ranks did not report that they wait, too: those hang, or are somewhere else."""
        try:
            store = default_store()
            store.set(f"paceline/late/{self.rank}", str(self.issued))
            time.sleep(2.0)
            silent = [r for r in range(self.world) if r != self.rank and not store.check([f"paceline/late/{r}"])]
        except (RuntimeError, ValueError):  # the store was on the rank that is gone
            return ""
        if not silent:
            return "; all ranks wait, for different things"
        return f"; no sign of rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"


def _is_done(work: Any) -> bool:
    """Whether a collective has ended. gloo calls back before its handle says so, but after its future does."""
    try:
        return bool(work.get_future().done())
    except RuntimeError:
        return bool(work.is_completed())


def _check(work: Any) -> None:
    """Raises what went wrong in a collective that has ended. Not its handle's `wait`, which would wait for our own callback."""
    try:
        future = work.get_future()
    except RuntimeError:
        work.wait()
    else:
        future.wait()


def _start(request: Collective, group: Any, world: int, chunk_bytes: int) -> Generator[tuple[Any, Tensor], None, None]:
    """Issues a request; each handle with the tensor that its result will be in."""
    for i, tensor in enumerate(request.tensors):
        if request.op in ("sum", "max"):
            op = dist.ReduceOp.SUM if request.op == "sum" else dist.ReduceOp.MAX
            flat = tensor.view(-1)
            for part in flat.split(max(1, chunk_bytes // flat.element_size())) if flat.numel() else (flat,):
                yield dist.all_reduce(part, op=op, group=group, async_op=True), tensor
        elif request.op == "gather":
            flat = tensor.contiguous().view(-1).view(torch.uint8)  # gloo gathers no half-known dtypes, bytes it does
            out = request.into[i].view(-1).view(torch.uint8).view(world, -1) if request.into else flat.new_empty((world, flat.numel()))
            yield gather_single(out.view(-1), flat, group=group, async_op=True), out
        elif request.op == "exchange":
            out = request.into[i] if request.into else torch.empty_like(tensor)
            yield dist.all_to_all_single(out.view(-1), tensor.view(-1), group=group, async_op=True), out
        else:
            raise RunError(f"no collective {request.op!r}; there are {', '.join(OPS)}")


def _outcome(request: Collective, works: Sequence[tuple[Any, Tensor]]) -> Any:
    """What a job is sent after a collective."""
    if request.op in ("sum", "max"):
        return [list(request.tensors)]
    outs = [out for _, out in works]
    if request.op == "exchange":
        return outs
    world = len(outs[0]) if outs else 0
    return [[out[r].view(t.dtype).view(t.shape) for out, t in zip(outs, request.tensors, strict=True)] for r in range(world)]
