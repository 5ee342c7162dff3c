"""State that ranks share out, brought to whichever rank asks for it, also where it asks alone.

`if rank == 0: torch.save(optimizer.state_dict(), ...)` cannot be a collective: the other ranks have gone on.
So the rank that asks says so in the store of the process group. On the others, the thread that communicates
looks there whenever nothing has happened for a while (`LOOK_S`), and sends its shards through the store. They
cannot change meanwhile: the next update needs gradients of the rank that asks. Where they have changed all
the same, because it asked between `backward()` and `step()`, the answer is a refusal in words.

Keys, with a token that all ranks agree on: `asks` counts requests, `ask/K` is the K-th of them, `K/RANK/I`
the I-th message of a rank in answer to it (the first says whether there is one), `left/RANK` that a rank has
ended and answers no more.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import RunError
from paceline.train._torch import default_store
from paceline.train.comm import CLOSE_S, LOOK_S, Engine, Ticket, agree
from paceline.train.strategies.parts import Part

#: bytes of a message; the store takes a few MB at a time
_MESSAGE_BYTES = 2 << 20
#: messages that may lie in the store before they are fetched
_BEHIND = 8
#: between two looks at the store while something is waited for, at least and at most
_SOON_S, _LATER_S = 1e-3, 50e-3
#: for ranks to come to a read of gradients, until it is asked where they are
_PATIENCE_S = 1.0
_HERE = b"here"
#: the store was on a rank that is gone, or cannot be asked; or the rank that asked does not wait any more
_SILENT = (RuntimeError, NotImplementedError, RunError)


class Shards:
    """What this rank keeps of the parts of a strategy, for the others, and what they keep, for this one."""

    def __init__(self, engine: Engine, parts: Sequence[Part]) -> None:
        self._engine, self._parts = engine, parts
        self._rank, self._world = engine.rank, engine.world
        self._token = agree(secrets.token_hex(8))
        # held here: the end of the process comes after the user's `destroy_process_group`
        self._store: Any = default_store()
        #: requests that have been looked at
        self._seen = 0
        #: those of them that wait for a decision: number, rank, reads, position
        self._open: list[tuple[int, int, int, int]] = []
        #: how often gradients were read here, and how many passes and steps there were
        self.reads, self.position = 0, 0

    # -- on the rank that asks -------------------------------------------------------------------------

    def fetch(self) -> Iterator[tuple[Part, list[list[Tensor]]]]:
        """Each part with what every rank keeps of its state."""
        number = self._ask(updates=[part.updates for part in self._parts])
        sent = [self._messages(number, rank) for rank in range(self._world)]
        for rank in self._others():
            answer = next(sent[rank])
            if answer != _HERE:
                raise RunError(answer.decode())
        for part in self._parts:
            own = part.state()
            yield (
                part,
                [
                    own if rank == self._rank else self._received(own, messages)
                    for rank, messages in enumerate(sent)
                ],
            )

    def together(self, ticket: Ticket) -> None:
        """Waits for gradients that all ranks read together; says where another rank has gone on without."""
        self.reads += 1
        if not ticket.ends_within(_PATIENCE_S):
            number = self._ask(reads=self.reads, position=self.position)
            while not ticket.ends_within(LOOK_S):
                for rank in self._others():
                    if self._there(key := self._key(f"{number}/{rank}/0")):
                        raise RunError(self._store.get(key).decode())
        ticket.wait()

    def _ask(self, **what: Any) -> int:
        """Has the others know of a request; its number."""
        number = int(self._store.add(self._key("asks"), 1))
        self._store.set(self._key(f"ask/{number}"), json.dumps({"rank": self._rank, **what}))
        return number

    def _messages(self, number: int, rank: int) -> Iterator[bytes]:
        """What a rank sends in answer, as it comes."""
        at = 0
        while True:
            key = self._key(f"{number}/{rank}/{at}")
            self._wait(lambda key=key: self._there(key), rank)  # type: ignore[misc]
            yield self._store.get(key)
            self._store.delete_key(key)
            at += 1

    def _received(self, like: Sequence[Tensor], messages: Iterator[bytes]) -> list[Tensor]:
        """Tensors of the same form as these."""
        size = sum(tensor.nbytes for tensor in like)
        if not size:
            return list(like)
        data = bytearray().join(next(messages) for _ in range(_count(size)))
        apart = torch.frombuffer(data, dtype=torch.uint8).split([tensor.nbytes for tensor in like])
        return [
            piece.clone().view(tensor.dtype).view(tensor.shape).to(tensor.device)
            for piece, tensor in zip(apart, like, strict=True)
        ]

    def _wait(self, there: Callable[[], bool], rank: int) -> None:
        """Returns when there is something; raises where that rank cannot send it any more."""
        deadline, pause = time.monotonic() + self._engine.timeout_s, _SOON_S
        while not there():
            self._engine.check()
            if self._there(self._key(f"left/{rank}")) and not there():
                raise RunError(
                    f"rank {self._rank} of {self._world}: the optimizer's state is shared out over the "
                    f"ranks, and rank {rank} has ended with its part; call optimizer.state_dict() earlier"
                )
            if time.monotonic() > deadline:
                raise RunError(
                    f"rank {self._rank} of {self._world}: no answer from rank {rank}, which keeps a part of "
                    f"the optimizer's state, in {self._engine.timeout_s:g} s"
                )
            time.sleep(pause)
            pause = min(_LATER_S, 2 * pause)

    # -- on the others ---------------------------------------------------------------------------------

    def look(self) -> None:
        """Answers what has been asked meanwhile; on the engine's thread, between two messages."""
        try:
            asked = int(self._store.add(self._key("asks"), 0))
            while self._seen < asked:
                self._seen += 1
                ask = json.loads(self._store.get(self._key(f"ask/{self._seen}")))
                if ask["rank"] == self._rank:
                    continue
                if "updates" in ask:
                    self._answer(self._seen, ask["rank"], ask["updates"])
                else:
                    self._open.append((self._seen, ask["rank"], ask["reads"], ask["position"]))
            self._open = [one for one in self._open if not self._settled(*one)]
        except _SILENT:
            return

    def _answer(self, number: int, to: int, updates: Sequence[int]) -> None:
        key = self._key(f"{number}/{self._rank}")
        data = [_bytes(part.state()) for part in self._parts]
        if [part.updates for part in self._parts] != list(updates):
            refusal = (
                f"rank {to} of {self._world} asked for the optimizer's state between backward() and step(), "
                f"while rank {self._rank} went on with that step; call optimizer.state_dict() after the step"
            )
            self._store.set(f"{key}/0", refusal)
            return
        messages = [_HERE, *(one for shard in data for one in _cut(shard))]
        for at, message in enumerate(messages):
            if at >= _BEHIND:
                before = f"{key}/{at - _BEHIND}"
                self._wait(lambda before=before: not self._there(before), to)  # type: ignore[misc]
            self._store.set(f"{key}/{at}", message)

    def _settled(self, number: int, of: int, reads: int, position: int) -> bool:
        """Whether a rank that reads gradients was joined in that, or told that this rank has gone on."""
        if self.reads < reads and self.position > position:
            refusal = (
                f"rank {of} of {self._world} reads or changes p.grad, which all ranks must do together where "
                f"gradients are shared out, but rank {self._rank} has gone on; do it on all ranks"
            )
            self._store.set(self._key(f"{number}/{self._rank}/0"), refusal)
            return True
        return self.reads >= reads

    def leave(self, *, well: bool) -> None:
        """Says that this rank answers no more; where all is well, once the others end: they may still ask."""
        try:
            self._store.set(self._key(f"left/{self._rank}"), "")
            deadline = time.monotonic() + CLOSE_S
            while well and time.monotonic() < deadline:
                self.look()
                if all(self._there(self._key(f"left/{rank}")) for rank in self._others()):
                    break
                time.sleep(_LATER_S)
            if self._rank:
                self._store.set(self._key(f"gone/{self._rank}"), "")
            while well and not self._rank and time.monotonic() < deadline:  # the store may end with rank 0
                if all(self._there(self._key(f"gone/{rank}")) for rank in self._others()):
                    break
                time.sleep(_LATER_S)
        except _SILENT:
            return

    def _others(self) -> list[int]:
        return [rank for rank in range(self._world) if rank != self._rank]

    def _key(self, name: str) -> str:
        return f"paceline/shards/{self._token}/{name}"

    def _there(self, key: str) -> bool:
        return bool(self._store.check([key]))


def _count(size: int) -> int:
    """Messages that so many bytes take."""
    return math.ceil(size / _MESSAGE_BYTES)


def _bytes(tensors: Sequence[Tensor]) -> bytes:
    flat = [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return b"".join(tensor.numpy().tobytes() for tensor in flat)


def _cut(data: bytes) -> Iterator[bytes]:
    for at in range(0, len(data), _MESSAGE_BYTES):
        yield data[at : at + _MESSAGE_BYTES]
