"""A parameter server: one shard, one thread per worker, a checkpoint now and then.

    python -m paceline.train.asynchronous.server HOST PORT RUN NUMBER        what it serves stands in the run's store

One life of a server ends with its process. The next one takes the checkpoint, a new number in the store, and waits for workers
to knock again; updates they resend are recognised by their number.
"""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import RunError
from paceline.train.asynchronous import wire
from paceline.train.asynchronous.codecs import Codec, codec
from paceline.train.asynchronous.policy import Policy
from paceline.train.asynchronous.shard import Part, Shard
from paceline.train.asynchronous.wire import Answer, Ask, Pair, Rendezvous, Store, Turns


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """What a server needs to start."""

    number: int
    rendezvous: Rendezvous
    start: Tensor
    parts: tuple[Part, ...]
    optimizer: type[torch.optim.Optimizer]
    policy: Policy
    up: str = "none"
    down: str = "none"
    checkpoint: Path | None = None
    #: updates between checkpoints; those after the last one are lost with the server
    checkpoint_every: int = 100
    #: transfers at a time, each way; one at a time, in order of arrival, finishes the first ones sooner
    streams: int = 1
    #: bytes per second each way at which transfers are paced, to emulate a link where the system cannot; None: as fast as they go
    pace_Bps: float | None = None


class Server:
    """Serves a shard until told to stop."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self.shard = Shard(spec.start, spec.parts, spec.optimizer, spec.policy)
        self._changed = threading.Condition()
        self._inward, self._outward, self._writing = Turns(spec.streams), Turns(spec.streams), threading.Lock()
        self._up, self._down = codec(spec.up), codec(spec.down)
        self._stop = threading.Event()
        self._saved = 0
        if spec.checkpoint is not None and spec.checkpoint.exists():
            try:
                self.shard.restore(torch.load(spec.checkpoint, weights_only=True))
            except Exception as error:
                raise RunError(f"cannot go on from checkpoint {spec.checkpoint}: {error}; remove it to start again") from None
            self._saved = self.shard.version

    def serve(self) -> None:
        """Accepts workers until `stop`, or until the key `stop` stands in the store."""
        store, number = self.spec.rendezvous.store(), self.spec.number
        life = store.add(f"lives/{number}", 1)
        store.set(f"life/{number}", str(life))
        met, threads = 0, []
        while not self._stop.is_set():
            for knock in range(met + 1, wire.knocked(store, number, life) + 1):
                threads.append(thread := threading.Thread(target=self._accept, args=(life, knock), daemon=True))
                thread.start()
                met = knock
            if store.check(["stop"]):
                self._stop.set()
            time.sleep(0.005 if met < self.spec.policy.workers else 0.05)
        with self._changed:
            self._changed.notify_all()
        for thread in threads:
            thread.join(timeout=1.0)
        self._save(force=True)
        store.set(f"end/{number}", json.dumps(self.report()))

    def report(self) -> dict[str, Any]:
        """Figures of this server: versions, staleness histogram, what was dropped."""
        with self._changed:
            return {"version": self.shard.version, "staleness": dict(sorted(self.shard.seen.items())), "dropped": self.shard.dropped,
                    "applied": dict(self.shard.clock)}

    # -- one worker --------------------------------------------------------------------------------

    def _accept(self, life: int, knock: int) -> None:
        worker = -1
        try:
            store = self.spec.rendezvous.store()
            pair = wire.answer_knock(store, self.spec.number, life, knock, self.spec.rendezvous.timeout_s)
            buffer: Tensor | None = None
            while not self._stop.is_set():
                ask = Ask.unpack(pair.receive_header())
                worker = ask.worker
                if ask.kind == wire.LEAVE:
                    break
                if ask.payload_bytes and (buffer is None or buffer.numel() != ask.payload_bytes):
                    buffer = torch.empty(ask.payload_bytes, dtype=torch.uint8)
                self._exchange(pair, ask, buffer)
        except wire.Lost:
            pass  # crashed or cut off: it knocks again if it lives
        finally:
            with self._changed:
                self.shard.leave(worker)
                self._changed.notify_all()

    def _exchange(self, pair: Pair, ask: Ask, buffer: Tensor | None) -> None:
        raw, receive_s, waited_s = torch.empty(0, dtype=torch.uint8), 0.0, 0.0
        if ask.kind == wire.PUSH:
            with self._inward.take() as waited:
                start = time.perf_counter()
                raw = pair.receive_bytes(ask.payload_bytes, buffer)
                self._pace(start, ask.payload_bytes)
                receive_s, waited_s = time.perf_counter() - start, waited
        asked = time.perf_counter()
        with self._changed:
            start = time.perf_counter()
            kind, staleness = 0, 0
            if ask.kind == wire.JOIN:
                self.shard.join(ask.worker)
            else:
                outcome = self.shard.push(ask.worker, ask.sequence, ask.base, self._up.decode(raw, self.shard.values.numel()), ask.rate)
                kind, staleness = outcome.kind, outcome.staleness
            update_s = time.perf_counter() - start
            self._changed.notify_all()
            while self.shard.held(ask.worker) and not self._stop.is_set():
                self._changed.wait(timeout=1.0)
            values, version = self.shard.answer(ask.worker) if ask.fetch else torch.empty(0), self.shard.version
        waited_s += time.perf_counter() - asked - update_s
        self._save()  # before the answer: with a checkpoint at every update none that was answered can be lost
        self._reply(pair, self._down, values, Answer(version=version, staleness=staleness, outcome=kind, payload_bytes=0,
                                                     receive_s=receive_s, update_s=update_s, waited_s=waited_s))

    def _reply(self, pair: Pair, down: Codec, values: Tensor, answer: Answer) -> None:
        payload = down.encode(values) if values.numel() else torch.empty(0, dtype=torch.uint8)
        with self._outward.take() as waited:
            pair.send(Answer(version=answer.version, staleness=answer.staleness, outcome=answer.outcome, payload_bytes=payload.numel(),
                             receive_s=answer.receive_s, update_s=answer.update_s, waited_s=answer.waited_s + waited).pack())
            if payload.numel():
                self._pace(time.perf_counter(), payload.numel())
                pair.send(payload)

    def _pace(self, start: float, count: int) -> None:
        if self.spec.pace_Bps is not None:
            time.sleep(max(0.0, start + count / self.spec.pace_Bps - time.perf_counter()))

    def _save(self, force: bool = False) -> None:
        """Writes a checkpoint when it is due; one at a time, and complete or not at all."""
        path = self.spec.checkpoint
        if path is None or not (force or self.shard.version - self._saved >= self.spec.checkpoint_every):
            return
        with self._writing:
            with self._changed:
                state = self.shard.state()
            if state["version"] > self._saved or force:
                partial = path.with_name(path.name + ".partial")
                torch.save(state, partial)
                partial.replace(path)
                self._saved = state["version"]


def publish(store: Store, spec: ServerSpec) -> None:
    """Leaves in the store what server `spec.number` is to serve, in this life and any later one."""
    buffer = io.BytesIO()
    torch.save(spec, buffer)
    wire.put(store, f"spec/{spec.number}", buffer.getvalue())


def run(rendezvous: Rendezvous, number: int) -> Server:
    """Serves what stands in the store for that number, to its end."""
    raw = wire.get(rendezvous.store(), f"spec/{number}")
    server = Server(torch.load(io.BytesIO(raw), weights_only=False))
    server.serve()
    return server


def stop(store: Store) -> None:
    """Tells all servers of a run to save and end."""
    store.set("stop", "1")


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Rendezvous(host=sys.argv[1], port=int(sys.argv[2]), run=sys.argv[3]), int(sys.argv[4]))
