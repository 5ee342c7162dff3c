"""Connections between one worker and one server: gloo groups of two, made when a worker knocks and gone when
either side is.

A group of all would be fixed in size and would die with its first member. A pair breaks alone, at once, and
is made again. gloo moves a message only when its receiver has asked for it. So data waits at the worker until
the server takes it: nothing queues up on the way, and the server decides whose turn it is.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from paceline.train._torch import gloo_pair
from paceline.train.asynchronous.store import Rendezvous, RunStore, own_address, serve_store

__all__ = [
    "JOIN",
    "LEAVE",
    "LOAD",
    "PUSH",
    "STATE",
    "Ask",
    "Lost",
    "Pair",
    "Rendezvous",
    "RunStore",
    "ServerReply",
    "Turns",
    "answer_knock",
    "knock",
    "knocked",
    "serve_store",
]

_TAG = 7
_FIELDS = 8
#: what a peer's loss looks like: gloo raises RuntimeError on a broken or silent connection
Lost = RuntimeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a worker sends before its payload."""

    kind: int
    worker: int
    #: counts this worker's updates from 1; sent again with the same number after a lost connection
    sequence: int
    #: version of the parameters that the update was computed from
    base: int
    payload_bytes: int
    #: whether new parameters are wanted in return
    fetch: bool = True
    #: of the optimizer's options, JSON, which precede the payload where they have changed
    options_bytes: int = 0

    def pack(self) -> Tensor:
        fields = [
            self.kind,
            self.worker,
            self.sequence,
            self.base,
            self.payload_bytes,
            int(self.fetch),
            self.options_bytes,
            0,
        ]
        return torch.tensor(fields, dtype=torch.int64)

    @classmethod
    def unpack(cls, raw: Tensor) -> Ask:
        kind, worker, sequence, base, size, fetch, options, _ = raw.tolist()
        return cls(
            kind=kind,
            worker=worker,
            sequence=sequence,
            base=base,
            payload_bytes=size,
            fetch=bool(fetch),
            options_bytes=options,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReply:
    """What a server sends before the parameters; times are its own, in seconds."""

    version: int
    staleness: int
    outcome: int
    payload_bytes: int
    receive_s: float
    update_s: float
    #: for a turn to receive and to send, for the lock, for other workers in modes that wait
    waited_s: float

    def pack(self) -> Tensor:
        times = [round(1e9 * value) for value in (self.receive_s, self.update_s, self.waited_s)]
        return torch.tensor(
            [self.version, self.staleness, self.outcome, self.payload_bytes, *times, 0], dtype=torch.int64
        )

    @classmethod
    def unpack(cls, raw: Tensor) -> ServerReply:
        version, staleness, outcome, size, receive, update, waited, _ = raw.tolist()
        return cls(
            version=version,
            staleness=staleness,
            outcome=outcome,
            payload_bytes=size,
            receive_s=1e-9 * receive,
            update_s=1e-9 * update,
            waited_s=1e-9 * waited,
        )


#: kinds of ask
JOIN, PUSH, LEAVE, STATE, LOAD = 1, 2, 3, 4, 5


class Pair:
    """One end of a connection between a server (end 0) and a worker (end 1)."""

    def __init__(self, place: Rendezvous, store: RunStore, name: str, end: int, meet_s: float = 10.0) -> None:
        self._other, self._patience = 1 - end, timedelta(seconds=place.timeout_s)
        limit = timedelta(seconds=min(meet_s, place.timeout_s))
        address = own_address(place.host, place.port)
        self._group: Any = store.bounded(lambda: gloo_pair(PrefixStore(name, store.raw), end, limit, address))

    def send(self, tensor: Tensor) -> None:
        self._group.send([tensor], self._other, _TAG).wait(self._patience)

    def receive(self, tensor: Tensor) -> Tensor:
        self._group.recv([tensor], self._other, _TAG).wait(self._patience)
        return tensor

    def receive_header(self) -> Tensor:
        return self.receive(torch.empty(_FIELDS, dtype=torch.int64))

    def receive_bytes(self, count: int, into: Tensor | None = None) -> Tensor:
        """`count` bytes, in `into` where it has that size."""
        if count == 0:
            return torch.empty(0, dtype=torch.uint8)
        return self.receive(
            into if into is not None and into.numel() == count else torch.empty(count, dtype=torch.uint8)
        )


class Turns:
    """First come, first served, `places` at a time: who may use a link."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._queue: deque[threading.Event] = deque()
        self._lock = threading.Lock()

    @contextmanager
    def take(self) -> Iterator[float]:
        """Holds a place; yields the seconds waited for it."""
        start = time.perf_counter()
        with self._lock:
            mine = None
            if self._free > 0 and not self._queue:
                self._free -= 1
            else:
                self._queue.append(mine := threading.Event())
        if mine is not None:
            mine.wait()
        try:
            yield time.perf_counter() - start
        finally:
            with self._lock:
                if self._queue:
                    self._queue.popleft().set()
                else:
                    self._free += 1


def knock(place: Rendezvous, store: RunStore, server: int, life: int) -> Pair:
    """A worker's new connection to one life of a server."""
    number = store.add(f"knock/{server}/{life}", 1)
    return Pair(place, store, f"pair/{server}/{life}/{number}", 1)


def knocked(store: RunStore, server: int, life: int) -> int:
    """How many have knocked at this life of a server."""
    return store.add(f"knock/{server}/{life}", 0)


def answer_knock(place: Rendezvous, store: RunStore, server: int, life: int, number: int) -> Pair:
    """The server's end of a connection."""
    return Pair(place, store, f"pair/{server}/{life}/{number}", 0)
