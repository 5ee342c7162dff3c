"""A loop that may be stopped, made larger or smaller, and started again: what `paceline schedule` asks of a
job, in two lines.

    pt.join()                         # the process group, by what the scheduler (or torchrun) says
    model, optimizer = pt.parallelize(model, optimizer, plan="overlap")
    job = pt.Job(model, optimizer)    # takes up the last checkpoint of PACELINE_CHECKPOINT, if there is one
    for step in job.steps(400):       # 1 to 400, or on from where the run before was stopped
        ...

On TERM (to any rank, as often as it likes) all ranks agree on the step after which they stop, write a
checkpoint and leave the loop; the process then ends with code 0. Work done is appended to PACELINE_PROGRESS.
Without a scheduler and without a folder it is a plain loop.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.optim import Optimizer

from paceline.errors import RunError, SpecError
from paceline.train.asynchronous.store import serve_store, store_on
from paceline.train.checkpoint import Checkpoints
from paceline.train.comm import TIMEOUT_S
from paceline.train.launch import LISTENER, NOTE, Place
from paceline.train.transport import give_back, said

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
#: seconds between two looks at the file that says how far a job may go
_LOOK_S = 0.01


def join(backend: str = "gloo", *, timeout_s: float = 1800.0) -> None:
    """Makes the default process group: where a scheduler has started this process, one rank on each node;
    else as torchrun says.

    Its collectives fail after `timeout_s`, where a rank hangs; strategies have a limit of their own.
    """
    limit = timedelta(seconds=timeout_s)
    place = Place.given()
    rank = os.environ.get("RANK")
    if place is not None:  # ranks that `paceline train` started on this node have numbers of their own
        number = int(rank) if rank is not None else place.node_rank
        world = int(os.environ["WORLD_SIZE"]) if rank is not None else place.nodes
        dist.init_process_group(
            backend, init_method=place.rendezvous, rank=number, world_size=world, timeout=limit
        )
    elif os.environ.get("MASTER_ADDR") in _LOOPBACK and "TORCHELASTIC_RUN_ID" not in os.environ:
        number, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = _local_store(number, timeout_s)
        dist.init_process_group(backend, store=store, rank=number, world_size=world, timeout=limit)
    else:
        dist.init_process_group(backend, timeout=limit)


def _local_store(rank: int, timeout_s: float) -> TCPStore:
    """The store of ranks that are all on this machine: rank 0 keeps it, on the loopback interface only. That
    which torch makes by itself listens on all interfaces.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0 and (held := os.environ.pop(LISTENER, None)) is not None:
        return store_on(socket.socket(fileno=int(held)), timeout_s)
    if rank == 0:
        return serve_store(host, port, timeout_s)
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


class Job:
    """The steps of a run, its checkpoints and its progress; all ranks make one, after `parallelize`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        folder: Path | str | None = None,
        every: int = 50,
        keep: int = 2,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        if every < 1:
            raise SpecError(f"a checkpoint every so many steps, 1 or more; got {every}")
        self.model, self.optimizer, self.every = model, optimizer, every
        place = folder if folder is not None else os.environ.get("PACELINE_CHECKPOINT")
        self.checkpoints = Checkpoints(place, keep=keep) if place else None
        #: steps that were done before this run
        self.start = self.checkpoints.load(model, optimizer) if self.checkpoints is not None else 0
        #: told to end before the last step
        self.stopped = False
        self._told = False
        self._group: Any = (
            dist.new_group(timeout=timedelta(seconds=timeout_s))
            if self.checkpoints is not None and _world() > 1
            else None
        )
        self._progress = os.environ.get("PACELINE_PROGRESS") if _rank() == 0 else None
        self._limit = os.environ.get("PACELINE_LIMIT")

    def steps(self, total: int) -> Iterator[int]:
        """Numbers of the steps to take, the last of them `total`; saves every so many, after the last, and
        when told to end.
        """
        with self._listening():
            for step in range(self.start + 1, total + 1):
                self._wait(step - 1)
                yield step
                self.stopped = self._agree() and step < total
                self._after(step, last=self.stopped or step == total)
                if self.stopped:
                    break

    def mean(self, value: float) -> float:
        """The mean of a number over ranks, where they meet after each step anyway; else as it is."""
        return self._sum(value) / _world() if self._group is not None else value

    def close(self) -> None:
        """Gives its process group back; all ranks do together, after the loop."""
        if self._group is not None:
            group, self._group = self._group, None
            give_back([group], well=True)

    def _after(self, step: int, *, last: bool) -> None:
        saved = self.checkpoints
        if saved is not None and (last or step % self.every == 0):
            saved.save(step, self.model, self.optimizer)
            if last:
                saved.wait()
            if saved.problem and _rank() == 0:
                print(f"{NOTE}{saved.problem}", file=sys.stderr, flush=True)
        if self._progress:
            kept = max(self.start, saved.whole) if saved is not None else 0
            # a full disk: training goes on
            with contextlib.suppress(OSError), Path(self._progress).open("a", encoding="utf-8") as file:
                file.write(f"{step} {kept}\n")

    def _wait(self, done: int) -> None:
        """On the model's clock the scheduler says how far the job may go; elsewhere there is no such file."""
        while self._limit and not self._told:
            try:
                if done < float(Path(self._limit).read_text(encoding="utf-8")):
                    return
            except (OSError, ValueError):
                return
            time.sleep(_LOOK_S)

    def _agree(self) -> bool:
        """Whether any rank was told to end: TERM does not come to all of them in the same step."""
        return self._sum(float(self._told)) > 0 if self._group is not None else self._told

    def _sum(self, value: float) -> float:
        total = torch.tensor([value], dtype=torch.float64)
        try:
            dist.all_reduce(total, group=self._group)
        except RuntimeError as error:
            raise RunError(
                f"rank {_rank()} of {_world()}: another rank is gone, or hangs ({said(error)})"
            ) from None
        return float(total)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """TERM is noted, not obeyed at once, if there is a checkpoint to write. Under a scheduler it is
        ignored afterwards: it comes again, and to some ranks late, while they end; a handler would not do,
        since Python takes it away before the process is gone."""
        if self.checkpoints is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, self._note)
        try:
            yield
        finally:
            signal.signal(
                signal.SIGTERM, signal.SIG_IGN if self._told or Place.given() is not None else before
            )

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._told = True


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
