"""Which run a worker takes part in: each strategy that it starts is a run with servers of its own."""

from __future__ import annotations

import ipaddress
import itertools
import os
import socket
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous as rendezvous_of_torch

from paceline.errors import RunError
from paceline.train._torch import default_store
from paceline.train.asynchronous.store import TIMEOUT_S, VARIABLE, Rendezvous, resolve
from paceline.train.launch import Place
from paceline.train.patience import within

#: for rank 0 to start the run, where torchrun's store says no other limit
_PATIENCE_S = 300.0

#: runs that this process has started, by session. All workers of a session start the same ones in one order.
_counts: dict[str, Iterator[int]] = defaultdict(lambda: itertools.count(1))
#: torchrun's store, once this process is connected to it
_torchrun: list[Any] = []


def rendezvous(timeout_s: float = TIMEOUT_S, trusted: str | None = None) -> Rendezvous:
    """Where the next run of this process meets.

    In the session that `PACELINE_RENDEZVOUS` names, or in one that rank 0 keeps: the others hear of it
    through the store of the default process group, or torchrun's. Whoever does not answer within
    `timeout_s` counts as gone. `trusted` names the optimizer that servers of this process may run.
    """
    return replace(_next(trusted), timeout_s=timeout_s)


def _next(trusted: str | None) -> Rendezvous:
    named = os.environ.get(VARIABLE)
    if named and Place.given() is None:  # a scheduler's rendezvous is one of process groups
        return Rendezvous.parse(named, number=next(_counts[named]))
    store, rank, limit_s = _met_by()
    number = next(_counts[""])
    key = f"paceline/asynchronous/{number}"
    if rank == 0:
        from paceline.train.asynchronous.launch import keep

        place = keep(_host(store), trusted)
        within(limit_s, lambda: store.set(key, str(place)))
        return replace(place, number=number)
    try:
        text = within(limit_s, lambda: store.get(key)).decode()
    except (RuntimeError, TimeoutError):
        raise RunError(
            f"rank {rank}: rank 0 has not started this run within {limit_s:g} s; all ranks "
            "parallelize together, and rank 0 must be alive"
        ) from None
    return Rendezvous.parse(text, number=number)


def world(workers: int | None) -> int:
    """Workers of this run, as given or as the launcher says."""
    if workers is not None:
        return workers
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("PACELINE_WORKERS", os.environ.get("WORLD_SIZE", "1")))


def nodes() -> int:
    """Nodes of this run, as the launcher says; 1 where nobody does."""
    everywhere, here = (int(os.environ.get(name, "0")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return max(1, everywhere // here) if here else 1


def _met_by() -> tuple[Any, int, float]:
    """A store that all ranks share, the rank of this process, and seconds to wait for the others."""
    if dist.is_initialized():
        store = default_store()
        return store, dist.get_rank(), min(_PATIENCE_S, store.timeout.total_seconds())
    if "MASTER_ADDR" not in os.environ:
        raise RunError(
            "no run to join: start workers with `paceline train` or torchrun, "
            f"or set {VARIABLE}=HOST:PORT:RUN"
        )
    if not _torchrun:
        try:
            found, rank, _ = next(rendezvous_of_torch("env://", timeout=timedelta(seconds=_PATIENCE_S)))
        except (ValueError, RuntimeError) as error:
            said = str(error).splitlines()[0]
            raise RunError(f"no run to join: {said}; start workers with torchrun") from None
        _torchrun.extend([found, rank])
    return _torchrun[0], _torchrun[1], _PATIENCE_S


def _host(store: Any) -> str:
    """This machine as other ranks know it: MASTER_ADDR, the address of the store, or the machine's name."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = os.environ.get("MASTER_ADDR") or getattr(store, "host", "") or socket.gethostname()
    here, everywhere = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    if here != everywhere and here is not None and ipaddress.ip_address(resolve(host)[1]).is_loopback:
        raise RunError(
            f"{host!r} is a loopback address on rank 0's machine, which ranks of other machines cannot reach;"
            " set MASTER_ADDR to an address of its network"
        )
    return host
