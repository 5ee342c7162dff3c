"""Connections between one worker and one server: gloo groups of two, made when a worker knocks and gone when either side is.

A group of all would be fixed in size and would die with its first member. A pair breaks alone, at once, and is made again.
gloo moves a message only when its receiver has asked for it. So data waits at the worker until the server takes it:
nothing queues up on the way, and the server decides whose turn it is.
"""

from __future__ import annotations

import struct
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
from torch.distributed import DistError, PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]

from paceline.errors import RunError

__all__ = ["JOIN", "LEAVE", "PUSH", "Answer", "Ask", "Lost", "Pair", "PrefixStore", "Rendezvous", "Store", "TCPStore", "Turns",
           "answer_knock", "get", "knock", "knocked", "put", "serve_store"]

_TAG = 7
_FIELDS = 8
_PIECE = 2**21
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
    #: learning rate now, over the one at the start
    rate: float = 1.0

    def pack(self) -> Tensor:
        (rate,) = struct.unpack("<q", struct.pack("<d", self.rate))
        return torch.tensor([self.kind, self.worker, self.sequence, self.base, self.payload_bytes, int(self.fetch), rate, 0], dtype=torch.int64)

    @classmethod
    def unpack(cls, raw: Tensor) -> Ask:
        kind, worker, sequence, base, size, fetch, rate, _ = raw.tolist()
        (value,) = struct.unpack("<d", struct.pack("<q", rate))
        return cls(kind=kind, worker=worker, sequence=sequence, base=base, payload_bytes=size, fetch=bool(fetch), rate=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
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
        return torch.tensor([self.version, self.staleness, self.outcome, self.payload_bytes, *times, 0], dtype=torch.int64)

    @classmethod
    def unpack(cls, raw: Tensor) -> Answer:
        version, staleness, outcome, size, receive, update, waited, _ = raw.tolist()
        return cls(version=version, staleness=staleness, outcome=outcome, payload_bytes=size,
                   receive_s=1e-9 * receive, update_s=1e-9 * update, waited_s=1e-9 * waited)


#: kinds of ask
JOIN, PUSH, LEAVE = 1, 2, 3


class Pair:
    """One end of a connection between a server (end 0) and a worker (end 1)."""

    def __init__(self, store: Store, name: str, end: int, timeout_s: float, meet_s: float = 10.0) -> None:
        self._other, self._patience = 1 - end, timedelta(seconds=timeout_s)
        self._group: Any = ProcessGroupGloo(PrefixStore(name, store), end, 2, timedelta(seconds=min(meet_s, timeout_s)))

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
        return self.receive(into if into is not None and into.numel() == count else torch.empty(count, dtype=torch.uint8))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the processes of a run find each other: a store that outlives any server and any worker but the one that keeps it."""

    host: str
    port: int
    run: str = "run"
    timeout_s: float = 60.0

    def store(self) -> Store:
        """A client of its own: blocking calls of one thread must not hold up another's."""
        try:
            store = TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=self.timeout_s))
        except (RuntimeError, DistError) as error:
            raise RunError(f"no rendezvous at {self.host}:{self.port} within {self.timeout_s:g} s: {str(error).splitlines()[0]}") from None
        return PrefixStore(self.run, store)


def serve_store(host: str = "127.0.0.1", port: int = 0, timeout_s: float = 60.0) -> TCPStore:
    """A store for a run; keep it as long as the run lasts. Its `port` is the one to pass on."""
    return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def knock(store: Store, server: int, life: int, timeout_s: float) -> Pair:
    """A worker's new connection to one life of a server."""
    number = store.add(f"knock/{server}/{life}", 1)
    return Pair(store, f"pair/{server}/{life}/{number}", 1, timeout_s)


def knocked(store: Store, server: int, life: int) -> int:
    """How many have knocked at this life of a server."""
    return int(store.add(f"knock/{server}/{life}", 0))


def put(store: Store, key: str, data: bytes) -> None:
    """Any number of bytes under a key: the store itself takes a few MB at a time."""
    pieces = [data[i : i + _PIECE] for i in range(0, len(data), _PIECE)]
    for i, piece in enumerate(pieces):
        store.set(f"{key}/{i}", piece)  # type: ignore[arg-type]
    store.set(key, str(len(pieces)))


def get(store: Store, key: str) -> bytes:
    """What `put` left under a key, once it is complete."""
    return b"".join(store.get(f"{key}/{i}") for i in range(int(store.get(key))))


def answer_knock(store: Store, server: int, life: int, number: int, timeout_s: float) -> Pair:
    return Pair(store, f"pair/{server}/{life}/{number}", 0, timeout_s)
