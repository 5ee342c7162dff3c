"""A worker's side: all servers at once, tried again until they are back, nothing sent twice in effect."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from paceline.errors import RunError
from paceline.train.asynchronous import wire
from paceline.train.asynchronous.codecs import codec
from paceline.train.asynchronous.moments import Kept, packed, unpacked
from paceline.train.asynchronous.wire import Ask, Lost, Pair, Rendezvous, RunStore, ServerReply

T = TypeVar("T")

#: seconds that a server has to start at least: it imports torch, which takes long on a busy machine
START_S = 60.0

#: options of each parameter group, as plain data
Options = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrip:
    """One round trip to all servers: seconds, bytes, and how stale the update was (the worst shard)."""

    staleness: int
    version: int
    outcome: int
    up_bytes: int
    down_bytes: int
    round_s: float
    #: of the slowest server: receiving the update, applying it, sending parameters, waiting for turns and
    #: others
    up_s: float
    update_s: float
    down_s: float
    waited_s: float
    #: by server: how long before the end of the compute its part was ready and on its way
    leads: tuple[float, ...] = ()
    #: that of the slowest server
    lead_s: float = 0.0


class Joined(Protocol):
    """What an optimizer needs of the run it is part of."""

    worker: int

    def join(self) -> Tensor: ...

    def leave(self) -> None: ...


class Client:
    """Connections of one worker to the servers that share the model; `sizes` are the elements on each."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        sizes: Sequence[int],
        *,
        up: str = "none",
        down: str = "none",
        retry_s: float = 60.0,
    ) -> None:
        self.rendezvous, self.sizes, self.retry_s = rendezvous, list(sizes), retry_s
        self._store = rendezvous.store()
        self.worker = self._store.add("workers", 1) - 1
        self._links = [
            _Link(rendezvous, server, self.worker, up, down, retry_s) for server in range(len(self.sizes))
        ]
        self._pool = ThreadPoolExecutor(max_workers=len(self.sizes), thread_name_prefix="server")
        self._sequence = 0
        self._begun: dict[int, tuple[float, Future[tuple[Tensor, ServerReply, float]]]] = {}
        self._closed = False

    def join(self) -> Tensor:
        """Parameters as they are now."""
        return torch.cat(list(self._pool.map(lambda link: link.join(), self._links)))

    def state(self) -> list[list[dict[str, Any]]]:
        """What each server's optimizer keeps of each of its parts."""
        self._between_steps()
        nothing = torch.empty(0, dtype=torch.uint8)
        return [
            unpacked(raw) for raw in self._pool.map(lambda link: link.ask(wire.STATE, nothing), self._links)
        ]

    def load(self, kept: Kept) -> None:
        """Has each server's optimizer go on from this."""
        self._between_steps()
        list(self._pool.map(lambda link, one: link.ask(wire.LOAD, packed(one)), self._links, kept))

    def _between_steps(self) -> None:
        if self._begun:
            raise RunError(
                "the optimizer's state is asked for between backward() and step(), which overlap has begun"
                " already; ask after step()"
            )

    def exchange(
        self, update: Tensor, *, fetch: bool = True, options: Options | None = None
    ) -> tuple[Tensor | None, RoundTrip]:
        """Pushes an update that was computed under these options; new parameters (or moves) where wanted."""
        for server, piece in enumerate(update.split(self.sizes)):
            self.begin(server, piece, fetch=fetch, options=options)
        values, exchange = self.finish()
        return values, replace(exchange, leads=(), lead_s=0.0)

    def begin(
        self, server: int, piece: Tensor, *, fetch: bool = True, options: Options | None = None
    ) -> None:
        """Pushes the part of one server, and returns at once; all parts of an update have the same number."""
        if not self._begun:
            self._sequence += 1
        future = self._pool.submit(self._links[server].push, piece, self._sequence, fetch, options)
        self._begun[server] = (time.perf_counter(), future)

    def finish(self) -> tuple[Tensor | None, RoundTrip]:
        """Waits for the answers to all parts that have begun; new parameters where they were wanted."""
        start = time.perf_counter()
        begun, self._begun = [self._begun[server] for server in sorted(self._begun)], {}
        answers = [future.result() for _, future in begun]
        round_s = time.perf_counter() - start
        leads = tuple(max(0.0, start - at) for at, _ in begun)
        slowest = max(
            range(len(answers)),
            key=lambda i: answers[i][1].receive_s + answers[i][1].update_s + answers[i][2] - leads[i],
        )
        heads = [answer[1] for answer in answers]
        return torch.cat([answer[0] for answer in answers]) if answers[0][0].numel() else None, RoundTrip(
            staleness=max(head.staleness for head in heads),
            version=min(head.version for head in heads),
            outcome=max(head.outcome for head in heads),
            up_bytes=sum(link.sent for link in self._links),
            down_bytes=sum(head.payload_bytes for head in heads),
            round_s=round_s,
            up_s=heads[slowest].receive_s,
            update_s=heads[slowest].update_s,
            down_s=answers[slowest][2],
            waited_s=heads[slowest].waited_s,
            leads=leads,
            lead_s=leads[slowest],
        )

    def leave(self) -> None:
        """Says good-bye; may be called twice."""
        if not self._closed:
            self._closed = True
            for link in self._links:
                link.leave()
            self._pool.shutdown()
            self._store.add("left", 1)


class _Link:
    """One worker to one server."""

    def __init__(
        self, rendezvous: Rendezvous, server: int, worker: int, up: str, down: str, retry_s: float
    ) -> None:
        self._where, self._server, self._worker, self._retry_s = rendezvous, server, worker, retry_s
        self._up, self._down = codec(up), codec(down)
        if not self._down.down:
            raise RunError(
                f"codec {down!r} leaves elements out; parameters can be sent with none, fp16, bf16 or int8"
            )
        self._store: RunStore | None = None
        self._pair: Pair | None = None
        #: options that the server has been told on this connection, as JSON
        self._told = b""
        self._life, self._version, self._count = 0, 0, 0
        #: when its first life was seen; starting takes as long as it takes, and is no time for trying again
        self._started_s = 0.0
        self._buffer: Tensor | None = None
        self.sent = 0

    def join(self) -> Tensor:
        values, _, _ = self._until_done(lambda _: self._joined)
        return values

    def ask(self, kind: int, payload: Tensor) -> Tensor:
        """The bytes that the server answers to a question that is no update."""

        def exchange(pair: Pair) -> Tensor:
            pair.send(
                Ask(kind=kind, worker=self._worker, sequence=0, base=0, payload_bytes=payload.numel()).pack()
            )
            if payload.numel():
                pair.send(payload)
            answer = ServerReply.unpack(pair.receive_header())
            return (
                pair.receive_bytes(answer.payload_bytes)
                if answer.payload_bytes
                else torch.empty(0, dtype=torch.uint8)
            )

        return self._until_done(exchange)

    def push(
        self, update: Tensor, sequence: int, fetch: bool, options: Options | None
    ) -> tuple[Tensor, ServerReply, float]:
        payload = self._up.encode(update)
        self.sent = payload.numel()
        ask = Ask(
            kind=wire.PUSH,
            worker=self._worker,
            sequence=sequence,
            base=self._version,
            payload_bytes=payload.numel(),
            fetch=fetch,
        )
        text = b"" if options is None else json.dumps(options).encode()

        def exchange(pair: Pair) -> tuple[Tensor, ServerReply, float]:
            self._send(pair, ask, payload, text)
            return self._receive(pair)

        values, answer, down_s = self._until_done(exchange)
        if fetch:
            self._version = answer.version
        return values, answer, down_s

    def leave(self) -> None:
        if self._pair is not None:
            with contextlib.suppress(Lost):  # the server went first
                self._pair.send(
                    Ask(kind=wire.LEAVE, worker=self._worker, sequence=0, base=0, payload_bytes=0).pack()
                )
            self._pair = None

    def _until_done(self, exchange: Callable[[Pair], T]) -> T:
        """What an exchange with the server gives, across lost connections and new lives of the server."""
        begun_s = time.monotonic()
        while True:
            try:
                if self._pair is None:
                    self._joined = self._connect()
                assert self._pair is not None
                return exchange(self._pair)
            except Lost as error:
                self._pair = None
                self._raise_failure()
                if time.monotonic() > max(begun_s, self._started_s) + self._retry_s:
                    raise RunError(
                        f"server {self._server} is gone and did not come back within {self._retry_s:g} s:"
                        f" {str(error)[:120]}"
                    ) from None
                time.sleep(0.05)

    def _connect(self) -> tuple[Tensor, ServerReply, float]:
        store = self._store = self._store or self._where.store()
        self._life = self._next_life(store)
        self._started_s = self._started_s or time.monotonic()
        self._told = b""
        self._pair = wire.knock(self._where, store, self._server, self._life)
        self._pair.send(Ask(kind=wire.JOIN, worker=self._worker, sequence=0, base=0, payload_bytes=0).pack())
        joined = self._receive(self._pair)
        self._version = joined[1].version
        return joined

    def _next_life(self, store: RunStore) -> int:
        """The life of the server to knock at: not the one that was lost, which is most likely over."""
        key = f"life/{self._server}"
        start_s = max(self._where.timeout_s, START_S)
        patience = time.monotonic() + (3.0 if self._life else start_s)
        while time.monotonic() < patience:
            self._raise_failure()
            if store.check([key]) and (life := int(store.get(key))) != self._life:
                return life
            time.sleep(0.02)
        if not self._life:
            raise RunError(f"server {self._server} has not started within {start_s:g} s")
        return self._life

    def _raise_failure(self) -> None:
        """Raises what the server has said of why it cannot serve."""
        key = f"failed/{self._server}"
        try:
            failed = self._store is not None and self._store.check([key])
            said = self._store.get(key).decode() if failed and self._store is not None else ""
        except Lost:  # the store is gone, too
            return
        if said:
            raise RunError(f"server {self._server} cannot serve: {said}")

    def _send(self, pair: Pair, ask: Ask, payload: Tensor, text: bytes) -> None:
        """An update, and the options of the optimizer where they have changed since the last one."""
        new = text if text != self._told else b""
        pair.send(replace(ask, options_bytes=len(new)).pack())
        if new:
            pair.send(torch.frombuffer(bytearray(new), dtype=torch.uint8))
            self._told = new
        pair.send(payload)

    def _receive(self, pair: Pair) -> tuple[Tensor, ServerReply, float]:
        answer = ServerReply.unpack(pair.receive_header())
        start = time.perf_counter()
        raw = pair.receive_bytes(answer.payload_bytes, self._buffer)
        taken = time.perf_counter() - start
        if not answer.payload_bytes:
            return torch.empty(0), answer, taken
        self._buffer = raw
        self._count = self._count or self._elements(raw)
        return self._down.decode(raw, self._count), answer, taken

    def _elements(self, raw: Tensor) -> int:
        return self._down.decode(raw, raw.numel()).numel()
