"""Where the processes of a run find each other: a store of keys that the launcher or rank 0 keeps.

It listens on the address it is given. torch's store has no authentication of its own: the name of a run is
random, and nothing that is read from the store is executed: specifications are JSON, tensors are loaded
with `weights_only=True`.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from paceline.errors import RunError
from paceline.train.patience import within

__all__ = [
    "TIMEOUT_S",
    "VARIABLE",
    "PrefixStore",
    "Rendezvous",
    "RunStore",
    "Store",
    "StoreLost",
    "TCPStore",
    "own_address",
    "resolve",
    "secret",
    "serve_store",
    "store_on",
]

T = TypeVar("T")

#: for others to answer, where no strategy says another limit
TIMEOUT_S = 60.0
#: host:port:run of a session, set by whoever started the workers
VARIABLE = "PACELINE_RENDEZVOUS"
#: seconds beyond a store's own limit before it counts as stopped
_GRACE_S = 5.0
_ADVICE = "set MASTER_ADDR to an address of rank 0's machine"
#: bytes of one value: the store itself takes a few MB at a time
_PIECE = 2**21


class StoreLost(RunError):
    """The process that keeps the store of a run is stopped, gone or cut off."""


class RunStore:
    """The keys of one run. Calls that are not answered raise `StoreLost` after the limit of the store."""

    def __init__(self, raw: Store, where: str, limit_s: float) -> None:
        self.raw, self._where, self._limit_s = raw, where, limit_s

    def bounded(self, call: Callable[[], T]) -> T:
        """What a call that uses this store returns."""
        try:
            return within(self._limit_s + _GRACE_S, call)
        except TimeoutError:
            waited = f"{self._limit_s + _GRACE_S:g} s"
            raise StoreLost(
                f"the store of this run at {self._where} has not answered for {waited}; the "
                "process that keeps it (rank 0, or the launcher) is stopped or cut off"
            ) from None

    def set(self, key: str, value: str | bytes) -> None:
        self.bounded(lambda: self.raw.set(key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """The value, once it is there."""
        return self.bounded(lambda: self.raw.get(key))

    def add(self, key: str, amount: int) -> int:
        return self.bounded(lambda: int(self.raw.add(key, amount)))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of them are there."""
        return self.bounded(lambda: bool(self.raw.check(list(keys))))

    def put(self, key: str, data: bytes) -> None:
        """Any number of bytes under a key."""
        pieces = [data[i : i + _PIECE] for i in range(0, len(data), _PIECE)]
        for i, piece in enumerate(pieces):
            self.set(f"{key}/{i}", piece)
        self.set(key, str(len(pieces)))

    def take(self, key: str) -> bytes:
        """What `put` left under a key, once it is complete."""
        return b"".join(self.get(f"{key}/{i}") for i in range(int(self.get(key))))


def secret() -> str:
    """A name that nobody guesses."""
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """A run of a session, which is what a launcher starts. Each has parameters and servers of its own."""

    host: str
    port: int
    #: random name of the session; whoever knows it takes part
    run: str = field(repr=False)
    #: of the run: the how manyth strategy that a worker starts in this session
    number: int = 1
    timeout_s: float = TIMEOUT_S

    @classmethod
    def parse(cls, text: str, number: int = 1) -> Rendezvous:
        """Reads host:port:run."""
        host, _, rest = text.partition(":")
        if text.count(":") > 2:  # an IPv6 address
            host, _, rest = text.rpartition(":")[0].rpartition(":")[0], "", ":".join(text.rsplit(":", 2)[1:])
        port, _, run = rest.partition(":")
        if not (host and port.isdecimal() and run):
            raise RunError(f"{VARIABLE} must be HOST:PORT:RUN as the launcher has set it; got {text[:60]!r}")
        return cls(host=host, port=int(port), run=run, number=number)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}:{self.run}"

    @property
    def prefix(self) -> str:
        """Under which the keys of this run stand."""
        return f"{self.run}/{self.number}"

    def store(self) -> RunStore:
        """Keys of this run, over a new connection: a thread that waits must not hold up the others."""
        return self._connected(self.prefix)

    def session(self) -> RunStore:
        """Keys of the session, which all of its runs share."""
        return self._connected(self.run)

    def _connected(self, prefix: str) -> RunStore:
        where, limit = f"{self.host}:{self.port}", timedelta(seconds=self.timeout_s)

        def connect() -> Store:
            return TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=limit)

        try:
            store = within(self.timeout_s + _GRACE_S, connect)
        except (RuntimeError, DistError, TimeoutError) as error:
            said = str(error).splitlines()[0]
            raise StoreLost(f"no rendezvous at {where} within {self.timeout_s:g} s: {said}") from None
        return RunStore(PrefixStore(prefix, store), where, self.timeout_s)


def resolve(host: str) -> tuple[socket.AddressFamily, str]:
    """The address of a host, of IPv4 where it has one."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RunError(f"the address of {host!r} cannot be found: {error.strerror}; {_ADVICE}") from None
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, str(address[0])


def serve_store(host: str = "127.0.0.1", port: int = 0, timeout_s: float = TIMEOUT_S) -> TCPStore:
    """A store for sessions, to be kept as long as they last. It listens on that address and no other.

    Its `port` is the one to pass on.
    """
    family, address = resolve(host)
    try:
        listener = socket.create_server((address, port), family=family)
    except OSError as error:
        raise RunError(f"cannot listen on {host}:{port}: {error.strerror}; {_ADVICE}") from None
    return store_on(listener, timeout_s)


def store_on(listener: socket.socket, timeout_s: float = TIMEOUT_S) -> TCPStore:
    """The same, on a socket that listens; the store takes it over."""
    host, port, *_ = listener.getsockname()
    return TCPStore(
        host,
        int(port),
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def own_address(host: str, port: int) -> str:
    """The address by which this machine reaches `host`: connections of the run are made on it."""
    family, address = resolve(host)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting it sends nothing
        probe.connect((address, port))
        return str(probe.getsockname()[0])
