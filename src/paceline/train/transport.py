"""How collectives get onto the wire, for the engine's lanes.

Reductions are the backend's own, but for small ones on gloo: there every rank sends all of it to every other,
and adds up by itself; a ring is as many messages one after another. Gathers and exchanges between CPUs on
gloo go as plain sends and receives. gloo's own collectives send with the one socket that they also answer on:
the word that a receiver is ready waits behind the data that it is sending itself, and a link is used in one
direction at a time. Here data from lower to higher ranks has one group of sockets, and data from higher to
lower another, receives are announced before anything is sent, and any number may be on their way (gloo runs
two collectives of a group at once). What is received is matched by tag, so that order does not matter.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import RunError
from paceline.train._torch import abandon, gather_single

#: what one rank contributes -> what comes back: `sum`, `max` the one list, reduced; `gather` a list per rank;
#: `exchange` rows by rank
OPS = ("sum", "max", "gather", "exchange")
#: that a rank sends at most for a reduction where everyone sends to everyone
_SMALL_BYTES = 96 * 1024
#: tags of one lane before they begin again; far more than are ever in flight
_TAGS = 1 << 20


@dataclass(frozen=True, slots=True)
class Collective:
    """One request of a job; `exchange` sends row r of a tensor of `world` rows to rank r. What comes may be
    put `into` tensors at hand.
    """

    op: str
    tensors: Sequence[Tensor]
    into: Sequence[Tensor] = ()
    #: whether the own row of an exchange must be there, too
    own: bool = True
    #: nothing follows in its job
    last: bool = False

    @property
    def bytes(self) -> int:
        """What one rank contributes."""
        return sum(t.numel() * t.element_size() for t in self.tensors)


def small(size: float, world: int) -> bool:
    """Whether a reduction of so many bytes goes from everyone to everyone: more bytes than round a ring (with
    four ranks twice as many), but in one turn in place of 2 (n-1) of them."""
    return (world - 1) * size <= _SMALL_BYTES


class Handle:
    """A collective on its way, and the tensor that its result will be in."""

    def __init__(self, work: Any, out: Tensor) -> None:
        self.work, self.out = work, out

    @property
    def done(self) -> bool:
        """Whether it has ended. gloo calls back before its handle says so, but after its future does."""
        try:
            return bool(self.work.get_future().done())
        except RuntimeError:
            return bool(self.work.is_completed())

    @property
    def complete(self) -> bool:
        """Whether the device has carried it out, too."""
        return bool(self.work.is_completed())

    def check(self) -> None:
        """Raises what went wrong in a collective that has ended.

        Not its handle's `wait`, which would wait for our own callback.
        """
        try:
            future = self.work.get_future()
        except RuntimeError:
            self.work.wait()
        else:
            future.wait()

    def wait_for(self, seconds: float) -> bool:
        """Whether it ends, and well, within so many seconds; looks every so often, since not every backend's
        handle takes a limit.
        """
        deadline = time.monotonic() + seconds
        while not self.done:
            if time.monotonic() > deadline:
                return False
            time.sleep(1e-3)
        try:
            self.check()
        except RuntimeError:
            return False
        return True

    def call(self, wake: Callable[..., None]) -> None:
        """Calls back at the end; some have no future: whoever waits looks at them every so often."""
        with contextlib.suppress(RuntimeError):
            self.work.get_future().add_done_callback(wake)

    def finish(self) -> None:
        """Called once at the end by the engine's thread, on its stream: brings the result to where it
        belongs.
        """


class _Direct(Handle):
    """Sends and receives; those of gloo say that they are done only to who waits for them, which a thread
    does.
    """

    def __init__(self, works: list[Any], out: Tensor, staged: Tensor | None = None) -> None:
        super().__init__(works, out)
        self._staged = staged
        self._ended = False
        self._error: RuntimeError | None = None

    @property
    def done(self) -> bool:
        return self._ended

    complete = done

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def call(self, wake: Callable[..., None]) -> None:
        """The lane's thread does."""

    def wait(self) -> None:
        """Returns when all of it is through; on a thread of its own."""
        try:
            for work in self.work:
                work.wait()
        except RuntimeError as error:
            self._error = error
        self._ended = True

    def finish(self) -> None:
        if self._staged is not None:
            self.out.view(self._staged.shape).copy_(self._staged)


class _Reduced(_Direct):
    """A small reduction: what came from each rank is added up here, in the order of ranks, the same on
    all.
    """

    def __init__(self, gathered: _Direct, op: str, target: Tensor) -> None:
        super().__init__(gathered.work, target)
        self._rows, self._op = gathered.out, op

    def finish(self) -> None:
        total = self._rows[0]
        for row in self._rows[1:]:
            total = total.add_(row) if self._op == "sum" else torch.maximum(total, row)
        self.out.copy_(total)


class Ways:
    """Groups for data from lower to higher ranks and for the other direction; None where the backend is not
    gloo. Made by all ranks together.
    """

    def __init__(self, limit: timedelta) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._groups = (
            [dist.new_group(timeout=limit) for _ in range(2)]
            if self.world > 1 and dist.get_backend() == "gloo"
            else None
        )

    def release(self) -> list[Any]:
        """Its groups, for whoever ends them."""
        groups, self._groups = self._groups or [], None
        return groups

    def fit(self, request: Collective) -> bool:
        """Whether a request can go by sends and receives."""
        return self._groups is not None and all(t.numel() for t in request.tensors)

    def start(self, rows: Sequence[Tensor] | Tensor, out: Tensor, own: bool, tag: int) -> _Direct:
        """Sends row r to rank r, and receives row r of `out` from there; `own`: also its own. What lies on a
        GPU goes through the host's memory.
        """
        assert self._groups is not None
        place, staged = out, None
        if out.device.type != "cpu":
            rows, own = [row.cpu() for row in rows], True
            out = staged = torch.empty(out.shape, dtype=out.dtype)
        if own and out[self.rank].data_ptr() != rows[self.rank].data_ptr():
            out[self.rank].copy_(rows[self.rank])
        # everyone begins with the rank above: no two send to the same one at first
        others = [(self.rank + i) % self.world for i in range(1, self.world)]
        works = [self._groups[self.rank < other].recv([out[other]], other, tag) for other in reversed(others)]
        works += [self._groups[self.rank > other].send([rows[other]], other, tag) for other in others]
        return _Direct(works, place, staged)


class Lane:
    """What one stage of a channel sends with: a group of its own, in which reductions keep their order, and
    the ways of its channel.
    """

    def __init__(
        self,
        name: str,
        number: int,
        ways: Ways,
        limit: timedelta,
        chunk_bytes: int,
        wake: Callable[..., None],
    ) -> None:
        self.name, self.ways, self.chunk_bytes, self._wake = name, ways, chunk_bytes, wake
        self.group: Any = dist.new_group(timeout=limit)
        #: where tensors of `meet` lie; asked for now, since the user may have destroyed the groups by then
        self._device = "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"
        self._first_tag, self._sent = number * _TAGS, 0
        self._waiting: queue.SimpleQueue[_Direct | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, request: Collective) -> Iterator[Handle]:
        """Issues a request; a handle for each of its tensors, or for parts of one."""
        world = self.ways.world
        for i, tensor in enumerate(request.tensors):
            into = request.into[i] if request.into else None
            if request.op in ("sum", "max"):
                flat = tensor.view(-1)
                if (
                    self.ways.fit(request)
                    and flat.device.type == "cpu"
                    and small(flat.numel() * flat.element_size(), world)
                ):
                    gathered = self.ways.start(
                        [flat] * world, flat.new_empty((world, flat.numel())), True, self._tag()
                    )
                    yield self._seen(_Reduced(gathered, request.op, flat))
                else:
                    yield from self._reduce(request.op, flat)
                continue
            if request.op == "gather":
                # gloo gathers no half-known dtypes, bytes it does
                row = tensor.contiguous().view(-1).view(torch.uint8)
                out = (
                    row.new_empty((world, row.numel()))
                    if into is None
                    else into.view(-1).view(torch.uint8).view(world, -1)
                )
            elif request.op == "exchange":
                row, out = tensor, torch.empty_like(tensor) if into is None else into
            else:
                raise RunError(f"no collective {request.op!r}; there are {', '.join(OPS)}")
            if self.ways.fit(request):
                rows = row.view(world, -1) if request.op == "exchange" else [row] * world
                yield self._seen(self.ways.start(rows, out.view(world, -1), request.own, self._tag()))
            elif request.op == "gather":
                yield Handle(gather_single(out.view(-1), row, group=self.group, async_op=True), out)
            else:
                yield Handle(
                    dist.all_to_all_single(out.view(-1), row.view(-1), group=self.group, async_op=True), out
                )

    def _reduce(self, op: str, flat: Tensor) -> Iterator[Handle]:
        kind = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        for part in flat.split(max(1, self.chunk_bytes // flat.element_size())) if flat.numel() else (flat,):
            yield Handle(dist.all_reduce(part, op=kind, group=self.group, async_op=True), flat)

    def _tag(self) -> int:
        self._sent += 1
        return self._first_tag + self._sent % _TAGS

    def _seen(self, handle: _Direct) -> Handle:
        """Has a thread see its end."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._see_ends, name=f"paceline-{self.name}", daemon=True)
            self._thread.start()
        self._waiting.put(handle)
        return handle

    def _see_ends(self) -> None:
        while (handle := self._waiting.get()) is not None:
            handle.wait()
            self._wake()

    def meet(self, seconds: float) -> bool:
        """Whether all ranks have come here within so many seconds."""
        try:
            (handle,) = self._reduce("sum", torch.zeros(1, device=self._device))
        except (RuntimeError, ValueError):  # a peer is gone, or NCCL's groups were destroyed
            return False
        return handle.wait_for(seconds)

    def dismiss(self) -> threading.Thread | None:
        """Has its thread, if there is one, end with the last collective that is on its way."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._waiting.put(None)
        return thread

    def release(self, well: bool) -> list[Any]:
        """Ends its thread, once what is on its way is through; its groups, for whoever ends them."""
        thread = self.dismiss()
        if thread is not None and well:
            thread.join()
        group, self.group = self.group, None
        return [group, *self.ways.release()]


#: threads that wait until groups with something on its way are gone
leaving: list[threading.Thread] = []


def give_back(groups: list[Any], *, well: bool) -> None:
    """Ends process groups, with their sockets and threads; empties the list. `well`: nothing is on its way,
    and all ranks do the same.

    Where something is, gloo's groups wait for it as they go, up to their time limit: a thread that nobody
    waits for drops them then.
    """
    for group in groups:
        with contextlib.suppress(ValueError, RuntimeError):  # the user has destroyed all of them already
            dist.destroy_process_group(group) if well else abandon(group)
        del group  # the list must be the last to hold it
    if well:
        groups.clear()
    else:
        leaving[:] = [thread for thread in leaving if thread.is_alive()]
        leaving.append(threading.Thread(target=groups.clear, name="paceline-leaving", daemon=True))
        leaving[-1].start()


def said(error: BaseException) -> str:
    """The first sentence of what a backend says, without the place in its source."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    line = line.partition("] ")[2] if line.startswith("[/") else line
    return line.partition(". ")[0].rstrip(".")


def outcome(request: Collective, handles: Sequence[Handle]) -> Any:
    """What a job is sent after a collective."""
    if request.op in ("sum", "max"):
        return [list(request.tensors)]
    outs = [handle.out for handle in handles]
    if request.op == "exchange":
        return outs
    world = len(outs[0]) if outs else 0
    return [
        [out[r].view(t.dtype).view(t.shape) for out, t in zip(outs, request.tensors, strict=True)]
        for r in range(world)
    ]
