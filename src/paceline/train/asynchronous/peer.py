"""Workers that serve each other: every one keeps a door open and knocks at others'."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from paceline.errors import RunError
from paceline.train.asynchronous import wire
from paceline.train.asynchronous.client import RoundTrip
from paceline.train.asynchronous.wire import Ask, Lost, Pair, Rendezvous, ServerReply


class Peers:
    """This worker among its neighbours; looks like a `Client` to the optimizer."""

    def __init__(self, rendezvous: Rendezvous, start: Tensor, *, expected: int) -> None:
        self._where, self._store = rendezvous, rendezvous.store()
        self.worker = self._store.add("workers", 1) - 1
        self._expected = expected
        if self.worker == 0:
            self._store.put("start", start.float().numpy().tobytes())
        self._start = torch.frombuffer(bytearray(self._store.take("start")), dtype=torch.float32)
        if self._start.numel() != start.numel():
            raise RunError(
                f"worker {self.worker} has {start.numel()} parameters, the first one "
                f"{self._start.numel()}; all workers train the same model"
            )
        self.lock = threading.RLock()
        self._read: Callable[[], Tensor] | None = None
        self._met: Callable[[Tensor], None] | None = None
        self._pairs: dict[int, Pair] = {}
        self._gone: set[int] = set()
        self._stop, self._closed = threading.Event(), threading.Event()
        self._door: threading.Thread | None = None
        self._guests: list[threading.Thread] = []
        self._versions = 0

    def join(self) -> Tensor:
        return self._start

    def attach(self, read: Callable[[], Tensor], met: Callable[[Tensor], None]) -> None:
        """Opens the door: `read` gives the live parameters, `met` moves them towards a visitor's; both are
        called under the lock.
        """
        self._read, self._met = read, met
        self._store.set(f"life/{self.worker}", "1")
        self._door = threading.Thread(target=self._open, daemon=True)
        self._door.start()
        deadline = time.monotonic() + self._where.timeout_s
        while len(self.others()) + len(self._gone) < self._expected - 1 and time.monotonic() < deadline:
            time.sleep(0.01)

    def others(self) -> list[int]:
        """Neighbours whose door is open, as far as is known."""
        known = self._store.add("workers", 0)
        for n in range(known):
            if n not in self._gone and self._store.check([f"gone/{n}"]):
                self._gone.add(n)
        return [
            n
            for n in range(known)
            if n != self.worker and n not in self._gone and self._store.check([f"life/{n}"])
        ]

    def meet(self, neighbour: int, mine: Tensor) -> tuple[Tensor | None, RoundTrip | None]:
        """Sends `mine`, gets the neighbour's as they were; None where it is gone."""
        start = time.perf_counter()
        try:
            if neighbour not in self._pairs:
                self._pairs[neighbour] = wire.knock(self._where, self._store, neighbour, 1)
            pair, payload = self._pairs[neighbour], mine.contiguous().view(torch.uint8)
            pair.send(
                Ask(
                    kind=wire.PUSH, worker=self.worker, sequence=0, base=0, payload_bytes=payload.numel()
                ).pack()
            )
            pair.send(payload)
            answer = ServerReply.unpack(pair.receive_header())
            if answer.payload_bytes == 0:  # it is leaving
                self._gone.add(neighbour)
                return None, None
            asked = time.perf_counter()
            theirs = pair.receive_bytes(answer.payload_bytes).view(torch.float32)
        except Lost:
            self._gone.add(neighbour)
            self._pairs.pop(neighbour, None)
            return None, None
        now = time.perf_counter()
        return theirs, RoundTrip(
            staleness=0,
            version=answer.version,
            outcome=1,
            up_bytes=payload.numel(),
            down_bytes=answer.payload_bytes,
            round_s=now - start,
            up_s=answer.receive_s,
            update_s=answer.update_s,
            down_s=now - asked,
            waited_s=answer.waited_s,
        )

    def leave(self) -> None:
        """Shuts the door; visitors that come now are turned away."""
        self._store.set(f"gone/{self.worker}", "1")
        self._stop.set()
        for pair in self._pairs.values():
            try:
                pair.send(
                    Ask(kind=wire.LEAVE, worker=self.worker, sequence=0, base=0, payload_bytes=0).pack()
                )
            except Lost:
                continue
        self._pairs.clear()
        self._store.add("left", 1)
        # neighbours that are waiting for an answer from here get one before the process ends
        deadline = time.monotonic() + 5.0
        while self._store.add("left", 0) < self._store.add("workers", 0) and time.monotonic() < deadline:
            time.sleep(0.02)
        self._closed.set()
        for thread in [self._door, *self._guests]:  # a thread inside gloo must not see the interpreter go
            if thread is not None:
                thread.join(timeout=2.0)

    # -- the door ----------------------------------------------------------------------------------

    def _open(self) -> None:
        store, met = self._where.store(), 0
        while not self._closed.is_set():
            for number in range(met + 1, wire.knocked(store, self.worker, 1) + 1):
                self._guests.append(
                    thread := threading.Thread(target=self._receive, args=(number,), daemon=True)
                )
                thread.start()
                met = number
            time.sleep(0.01)

    def _receive(self, number: int) -> None:
        try:
            pair = wire.answer_knock(self._where, self._where.store(), self.worker, 1, number)
            while (ask := Ask.unpack(pair.receive_header())).kind == wire.PUSH:
                start = time.perf_counter()
                theirs = pair.receive_bytes(ask.payload_bytes).view(torch.float32)
                received = time.perf_counter()
                if self._stop.is_set():
                    pair.send(self._answer(0, 0.0, 0.0).pack())
                    continue
                assert self._read is not None and self._met is not None
                with self.lock:
                    mine = self._read()
                    self._met(theirs)
                    self._versions += 1
                payload = mine.view(torch.uint8)
                pair.send(
                    self._answer(payload.numel(), received - start, time.perf_counter() - received).pack()
                )
                pair.send(payload)
        except Lost:
            return

    def _answer(self, size: int, receive_s: float, update_s: float) -> ServerReply:
        return ServerReply(
            version=self._versions,
            staleness=0,
            outcome=1,
            payload_bytes=size,
            receive_s=receive_s,
            update_s=update_s,
            waited_s=0.0,
        )
