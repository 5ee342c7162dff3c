"""A parameter server: one shard, one thread per worker, a checkpoint now and then.

    python -m paceline.train.asynchronous.server NUMBER

Its run stands in the environment (all users of a machine can read command lines), what it serves in the
run's store: JSON, and the parameters as numbers. Nothing that is read from there is executed.

One life of a server ends with its process. The next one takes the checkpoint, a new number in the store, and
waits for workers to knock again; updates they resend are recognised by their number.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import PacelineError, RunError, SpecError
from paceline.train.asynchronous import wire
from paceline.train.asynchronous.codecs import Codec, codec
from paceline.train.asynchronous.moments import packed, unpacked
from paceline.train.asynchronous.policy import UpdatePolicy
from paceline.train.asynchronous.shard import ParameterRun, Shard
from paceline.train.asynchronous.store import VARIABLE, Store, StoreLost
from paceline.train.asynchronous.wire import Ask, Pair, Rendezvous, RunStore, ServerReply, Turns

#: number of the run in its session
RUN_NUMBER = "PACELINE_RUN_NUMBER"
#: a folder for the checkpoints of a run that names none; gone with the run
SCRATCH = "PACELINE_SERVER_SCRATCH"
#: MODULE:CLASS, separated by commas: optimizers that servers run beside those of torch and Paceline
OPTIMIZERS = "PACELINE_OPTIMIZERS"
#: the exit code of a server that cannot serve, which is not started again
CANNOT = 2
_KNOWN_MODULES = ("torch.optim", "paceline.train.optim")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """What a server needs to start."""

    number: int
    rendezvous: Rendezvous
    start: Tensor
    parts: tuple[ParameterRun, ...]
    #: MODULE:CLASS
    optimizer: str
    policy: UpdatePolicy
    #: of its optimizer, to begin with: of each part
    moments: Sequence[Mapping[str, Any]] = ()
    #: parameter groups of the whole model
    groups: int = 1
    up: str = "none"
    down: str = "none"
    checkpoint: Path | None = None
    #: updates between checkpoints; those after the last one are lost with the server
    checkpoint_every: int = 100
    #: transfers at a time, each way; one at a time, in order of arrival, finishes the first ones sooner
    streams: int = 1
    #: bytes per second each way at which transfers are paced, to emulate a link where the system cannot;
    #: None: as fast as they go
    pace_Bps: float | None = None


class Server:
    """Serves a shard until told to stop."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        if spec.checkpoint is not None:
            spec.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        self.shard = Shard(spec.start, spec.parts, optimizer_class(spec.optimizer), spec.policy)
        if spec.moments:
            self.shard.load_moments(spec.moments)
        #: tells the checkpoints of this run from those of earlier ones in the same folder
        self._run = hashlib.sha256(spec.rendezvous.prefix.encode()).hexdigest()[:16]
        self._changed = threading.Condition()
        self._inward, self._outward, self._writing = (
            Turns(spec.streams),
            Turns(spec.streams),
            threading.Lock(),
        )
        self._up, self._down = codec(spec.up), codec(spec.down)
        self._stop = threading.Event()
        self._saved = 0
        if spec.checkpoint is not None and spec.checkpoint.exists():
            try:
                state = torch.load(spec.checkpoint, weights_only=True)
                self.shard.restore(state, same_run=state.get("run") == self._run)
            except Exception as error:
                said = str(error).strip().splitlines()[0]
                raise RunError(
                    f"cannot go on from checkpoint {spec.checkpoint}: {said}; remove it to start again"
                ) from None
            self._saved = self.shard.version

    def serve(self) -> None:
        """Accepts workers until `stop`, or until the key `stop` stands in the store."""
        store, number = self.spec.rendezvous.store(), self.spec.number
        life = store.add(f"lives/{number}", 1)
        store.set(f"life/{number}", str(life))
        met, threads = 0, []
        while not self._stop.is_set():
            for knock in range(met + 1, wire.knocked(store, number, life) + 1):
                threads.append(
                    thread := threading.Thread(target=self._accept, args=(life, knock), daemon=True)
                )
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
            return {
                "version": self.shard.version,
                "staleness": dict(sorted(self.shard.seen.items())),
                "dropped": self.shard.dropped,
                "applied": dict(self.shard.clock),
            }

    # -- one worker --------------------------------------------------------------------------------

    def _accept(self, life: int, knock: int) -> None:
        worker = -1
        try:
            store = self.spec.rendezvous.store()
            pair = wire.answer_knock(self.spec.rendezvous, store, self.spec.number, life, knock)
            buffer: Tensor | None = None
            options: list[dict[str, Any]] | None = None
            while not self._stop.is_set():
                ask = Ask.unpack(pair.receive_header())
                worker = ask.worker
                if ask.kind == wire.LEAVE:
                    break
                if ask.options_bytes:
                    options = _options(pair.receive_bytes(ask.options_bytes), self.spec.groups)
                if ask.payload_bytes and (buffer is None or buffer.numel() != ask.payload_bytes):
                    buffer = torch.empty(ask.payload_bytes, dtype=torch.uint8)
                self._exchange(pair, ask, buffer, options)
        except wire.Lost:
            pass  # crashed or cut off: it knocks again if it lives
        finally:
            with self._changed:
                self.shard.leave(worker)
                self._changed.notify_all()

    def _exchange(
        self, pair: Pair, ask: Ask, buffer: Tensor | None, options: list[dict[str, Any]] | None
    ) -> None:
        if ask.kind in (wire.STATE, wire.LOAD):
            self._tell_moments(pair, ask)
            return
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
                update = self._up.decode(raw, self.shard.values.numel())
                outcome = self.shard.push(ask.worker, ask.sequence, ask.base, update, options)
                kind, staleness = outcome.kind, outcome.staleness
            update_s = time.perf_counter() - start
            self._changed.notify_all()
            while self.shard.held(ask.worker) and not self._stop.is_set():
                self._changed.wait(timeout=1.0)
            values, version = (
                self.shard.answer(ask.worker) if ask.fetch else torch.empty(0),
                self.shard.version,
            )
        waited_s += time.perf_counter() - asked - update_s
        # before the answer: with a checkpoint at every update none that was answered can be lost
        self._save()
        self._reply(
            pair,
            self._down,
            values,
            ServerReply(
                version=version,
                staleness=staleness,
                outcome=kind,
                payload_bytes=0,
                receive_s=receive_s,
                update_s=update_s,
                waited_s=waited_s,
            ),
        )

    def _tell_moments(self, pair: Pair, ask: Ask) -> None:
        """The optimizer's state: taken from a worker, or told."""
        given = pair.receive_bytes(ask.payload_bytes) if ask.payload_bytes else None
        with self._changed:
            if given is not None:
                self.shard.load_moments(unpacked(given))
            told = (
                packed(self.shard.moments()) if ask.kind == wire.STATE else torch.empty(0, dtype=torch.uint8)
            )
            version = self.shard.version
        pair.send(
            ServerReply(
                version=version,
                staleness=0,
                outcome=0,
                payload_bytes=told.numel(),
                receive_s=0.0,
                update_s=0.0,
                waited_s=0.0,
            ).pack()
        )
        if told.numel():
            pair.send(told)

    def _reply(self, pair: Pair, down: Codec, values: Tensor, answer: ServerReply) -> None:
        payload = down.encode(values) if values.numel() else torch.empty(0, dtype=torch.uint8)
        with self._outward.take() as waited:
            pair.send(
                ServerReply(
                    version=answer.version,
                    staleness=answer.staleness,
                    outcome=answer.outcome,
                    payload_bytes=payload.numel(),
                    receive_s=answer.receive_s,
                    update_s=answer.update_s,
                    waited_s=answer.waited_s + waited,
                ).pack()
            )
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
                state = {**self.shard.state(), "run": self._run}
            if state["version"] > self._saved or force:
                partial = path.with_name(path.name + ".partial")
                torch.save(state, partial)
                partial.replace(path)
                self._saved = state["version"]


def name_of(optimizer: type[torch.optim.Optimizer]) -> str:
    """MODULE:CLASS of an optimizer."""
    return f"{optimizer.__module__}:{optimizer.__qualname__}"


def check_optimizer(name: str, trusted: str | None = None) -> None:
    """Raises where servers would not run an optimizer; `trusted` is one that their starter names itself."""
    module, _, kind = name.partition(":")
    if module == "__main__" or "." in kind:
        raise SpecError(
            f"servers run in processes of their own and cannot import {kind!r} from {module!r}; "
            "put it into a module"
        )
    known = any(module == one or module.startswith(f"{one}.") for one in _KNOWN_MODULES)
    if not known and name != trusted and name not in os.environ.get(OPTIMIZERS, "").split(","):
        raise SpecError(
            f"servers run optimizers of {' and '.join(_KNOWN_MODULES)}; got {name}; "
            f"to allow it, set {OPTIMIZERS}={name} where the run is started"
        )


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The optimizer called MODULE:CLASS, where servers may run it."""
    check_optimizer(name)
    module, _, kind = name.partition(":")
    found = getattr(import_module(module), kind, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise SpecError(f"no optimizer {kind!r} in {module}")
    return found


def _options(raw: Tensor, groups: int) -> list[dict[str, Any]]:
    """Options of each parameter group, as a worker sends them."""
    found = json.loads(bytes(raw.numpy()))
    if not (isinstance(found, list) and len(found) == groups and all(isinstance(one, dict) for one in found)):
        raise wire.Lost(f"not the options of {groups} parameter groups")
    return [_tuples(one) for one in found]


def _tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def publish(store: RunStore, spec: ServerSpec) -> None:
    """Leaves in the store what server `spec.number` is to serve, in this life and any later one."""
    fields = {
        "parts": [asdict(part) for part in spec.parts],
        "optimizer": spec.optimizer,
        "policy": asdict(spec.policy),
        "groups": spec.groups,
        "up": spec.up,
        "down": spec.down,
        "checkpoint_every": spec.checkpoint_every,
        "checkpoint": None if spec.checkpoint is None else str(spec.checkpoint),
        "streams": spec.streams,
        "pace_Bps": spec.pace_Bps,
        "timeout_s": spec.rendezvous.timeout_s,
    }
    store.put(f"start/{spec.number}", spec.start.float().numpy().tobytes())
    store.put(f"moments/{spec.number}", bytes(packed(spec.moments).numpy()))
    store.put(f"spec/{spec.number}", json.dumps(fields).encode())


def published(place: Rendezvous, number: int) -> ServerSpec:
    """What `publish` left."""
    store = place.store()
    fields = json.loads(store.take(f"spec/{number}"))
    parts = tuple(
        ParameterRun(**{**part, "options": _tuples(part["options"])}) for part in fields.pop("parts")
    )
    folder, policy = fields.pop("checkpoint"), UpdatePolicy(**fields.pop("policy"))
    place = replace(place, timeout_s=max(place.timeout_s, fields.pop("timeout_s")))
    if folder is None and (scratch := os.environ.get(SCRATCH)):
        folder = str(Path(scratch, f"server{number}.pt"))
    start = torch.frombuffer(bytearray(store.take(f"start/{number}")), dtype=torch.float32)
    return ServerSpec(
        number=number,
        rendezvous=place,
        start=start,
        parts=parts,
        policy=policy,
        moments=tuple(unpacked(store.take(f"moments/{number}"))),
        checkpoint=None if folder is None else Path(folder),
        **fields,
    )


def run(rendezvous: Rendezvous, number: int) -> Server:
    """Serves what stands in the store for that number, to its end; tells workers where it cannot."""
    try:
        server = Server(published(rendezvous, number))
    except StoreLost:
        raise
    except Exception as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        rendezvous.store().set(f"failed/{number}", said)
        raise RunError(f"server {number} cannot serve: {said}") from None
    server.serve()
    return server


def stop(store: RunStore | Store) -> None:
    """Tells all servers of a run to save and end."""
    store.set("stop", "1")


def main() -> None:
    """A server in a process of its own; it ends with the run's store."""
    torch.set_num_threads(1)
    place = Rendezvous.parse(os.environ[VARIABLE], number=int(os.environ[RUN_NUMBER]))
    number = int(sys.argv[1])
    try:
        run(place, number)
    except (StoreLost, wire.Lost) as error:
        with contextlib.suppress(KeyError):
            shutil.rmtree(os.environ[SCRATCH], ignore_errors=True)
        said = str(error).splitlines()[0]
        print(f"paceline: server {number} ends, since its run is gone: {said}", file=sys.stderr)
        os._exit(1)  # threads may wait for a store that does not answer
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        os._exit(CANNOT)


if __name__ == "__main__":
    main()
