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

import contextlib
import itertools
import json
import math
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import RunError
from paceline.train._torch import default_store
from paceline.train.comm import CLOSE_S, LOOK_S, Engine, Ticket, agree
from paceline.train.strategies.parts import DeferredPart

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

    def __init__(self, engine: Engine, parts: Sequence[DeferredPart]) -> None:
        self._engine, self._parts = engine, parts
        self._rank, self._world = engine.rank, engine.world
        self._others = {*range(engine.world)} - {engine.rank}
        token = agree(secrets.token_hex(8))
        # held here: the end of the process comes after the user's `destroy_process_group`
        prefix = f"paceline/shards/{token}"
        self._store: Any = dist.PrefixStore(prefix, default_store())  # type: ignore[attr-defined]
        #: requests that have been looked at
        self._seen = 0
        #: those of them that wait for a decision
        self._open: list[dict[str, int]] = []
        #: how often gradients were read here, and how many passes and steps there were
        self.reads, self.position = 0, 0

    # -- on the rank that asks -------------------------------------------------------------------------

    def fetch(self) -> Iterator[tuple[DeferredPart, list[list[Tensor]]]]:
        """Each part with what every rank keeps of its state."""
        number = self._ask(updates=[part.updates for part in self._parts])
        sent = {rank: self._messages(number, rank) for rank in self._others}
        for messages in sent.values():
            answer = next(messages)
            if answer != _HERE:
                raise RunError(answer.decode())
        for part in self._parts:
            own = part.state()
            rows = {rank: _received(own, messages) for rank, messages in sent.items()}
            yield part, [rows.get(rank, own) for rank in range(self._world)]

    def together(self, ticket: Ticket) -> None:
        """Waits for gradients that all ranks read together; says where another rank has gone on without."""
        self.reads += 1
        if not ticket.ends_within(_PATIENCE_S):
            number = self._ask(reads=self.reads, position=self.position)
            while not ticket.ends_within(LOOK_S):
                for answer in (f"{number}/{rank}/0" for rank in self._others):
                    if self._there(answer):
                        raise RunError(self._store.get(answer).decode())
        ticket.wait()

    def _ask(self, **what: Any) -> int:
        """Has the others know of a request; its number."""
        number = int(self._store.add("asks", 1))
        self._store.set(f"ask/{number}", json.dumps({"number": number, "rank": self._rank, **what}))
        return number

    def _messages(self, number: int, rank: int) -> Iterator[bytes]:
        """What a rank sends in answer, as it comes."""
        for name in (f"{number}/{rank}/{at}" for at in itertools.count()):
            self._wait(name, rank)
            yield self._store.get(name)
            self._store.delete_key(name)

    def _wait(self, name: str, rank: int, *, gone: bool = False) -> None:
        """Returns when there is something, or (`gone`) when it was taken away; raises where that rank cannot
        do so any more.
        """
        deadline, pause = time.monotonic() + self._engine.timeout_s, _SOON_S
        here = f"rank {self._rank} of {self._world}"
        while self._there(name) == gone:
            self._engine.check()
            if self._there(f"left/{rank}") and self._there(name) == gone:
                raise RunError(
                    f"{here}: the optimizer's state is shared out over the ranks, and rank {rank} has ended "
                    "with its part; call optimizer.state_dict() earlier"
                )
            if time.monotonic() > deadline:
                raise RunError(
                    f"{here}: no answer from rank {rank}, which keeps a part of the optimizer's state, in "
                    f"{self._engine.timeout_s:g} s"
                )
            time.sleep(pause)
            pause = min(_LATER_S, 2 * pause)

    # -- on the others ---------------------------------------------------------------------------------

    def look(self) -> None:
        """Answers what has been asked meanwhile; on the engine's thread, between two messages."""
        with contextlib.suppress(*_SILENT):
            asked = int(self._store.add("asks", 0))
            for number in range(self._seen + 1, asked + 1):
                self._seen = number
                ask = json.loads(self._store.get(f"ask/{number}"))
                if "updates" not in ask:
                    self._open.append(ask)
                elif ask["rank"] != self._rank:
                    self._answer(**ask)
            self._open = [ask for ask in self._open if not self._settled(**ask)]

    def _answer(self, number: int, rank: int, updates: Sequence[int]) -> None:
        """Sends the shards of this rank to another one."""
        messages = [_HERE, *itertools.chain(*(_cut(_bytes(part.state())) for part in self._parts))]
        if [part.updates for part in self._parts] != list(updates):
            refusal = (
                f"rank {rank} of {self._world} asked for the optimizer's state between backward() and step(),"
                f" while rank {self._rank} went on with that step; call optimizer.state_dict() after the step"
            )
            messages = [refusal.encode()]
        for at, message in enumerate(messages):
            if at >= _BEHIND:
                self._wait(f"{number}/{self._rank}/{at - _BEHIND}", rank, gone=True)
            self._store.set(f"{number}/{self._rank}/{at}", message)

    def _settled(self, number: int, rank: int, reads: int, position: int) -> bool:
        """Whether a rank that reads gradients was joined in that, or told that this rank has gone on."""
        if self.reads >= reads or rank == self._rank:
            return True
        if self.position > position:
            self._store.set(
                f"{number}/{self._rank}/0",
                f"rank {rank} of {self._world} reads or changes p.grad, which all ranks must do together "
                f"where gradients are shared out, but rank {self._rank} has gone on; do it on all ranks",
            )
        return self.position > position

    def leave(self, *, well: bool) -> None:
        """Says that this rank answers no more; where all is well, once the others end: they may still ask.
        The store may end with rank 0, which goes last.
        """
        deadline = time.monotonic() + (CLOSE_S if well else 0.0)
        with contextlib.suppress(*_SILENT):
            self._store.set(f"left/{self._rank}", "")
            self._wait_for_all("left", deadline)
            if self._rank:
                self._store.set(f"gone/{self._rank}", "")
            else:
                self._wait_for_all("gone", deadline)

    def _wait_for_all(self, word: str, deadline: float) -> None:
        """Answers until all others have said so."""
        while time.monotonic() < deadline:
            self.look()
            if all(self._there(f"{word}/{rank}") for rank in self._others):
                return
            time.sleep(_LATER_S)

    def _there(self, name: str) -> bool:
        return bool(self._store.check([name]))


def _received(like: Sequence[Tensor], messages: Iterator[bytes]) -> list[Tensor]:
    """Tensors of the same form as these."""
    sizes = [tensor.nbytes for tensor in like]
    if not sum(sizes):
        return list(like)
    data = bytearray().join(itertools.islice(messages, math.ceil(sum(sizes) / _MESSAGE_BYTES)))
    apart = torch.frombuffer(data, dtype=torch.uint8).split(sizes)
    return [
        piece.clone().view(tensor.dtype).view(tensor.shape).to(tensor.device)
        for piece, tensor in zip(apart, like, strict=True)
    ]


def _bytes(tensors: Sequence[Tensor]) -> bytes:
    flat = [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return b"".join(tensor.numpy().tobytes() for tensor in flat)


def _cut(data: bytes) -> Iterator[bytes]:
    for at in range(0, len(data), _MESSAGE_BYTES):
        yield data[at : at + _MESSAGE_BYTES]
