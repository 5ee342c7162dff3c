"""Run a function over many tasks on an existing Ray cluster, with the results that this machine would
give.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from paceline import extend
from paceline.errors import MissingExtra, RunError, UnknownName

ENGINES = ("local", "ray")
A = TypeVar("A")
B = TypeVar("B")


def check(engine: str) -> None:
    """Refuses what is neither this machine nor Ray."""
    if engine not in ENGINES:
        raise UnknownName("engine", engine, ENGINES, f"allowed: {', '.join(ENGINES)}")


def connect(ray: Any, **options: Any) -> None:
    """`ray.init` that leaves this process its own answer to TERM: Ray's would end, by an exception, every
    child forked from here as well.
    """
    answer = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    finally:
        if answer is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, answer)


def over(run: Callable[[A], B], tasks: Sequence[A], done: Callable[[int], None] = lambda _: None) -> list[B]:
    """`run` of each task, in their order, one CPU of the cluster each; `done` hears how many are. `run` is a
    function of a module.
    """
    with _connected() as ray:
        remote = ray.remote(num_cpus=1)(_there)
        waiting = [remote.remote(run, task, str(Path.cwd()), extend.loaded()) for task in tasks]
        left = list(waiting)
        try:
            while left:
                _, left = ray.wait(left)
                done(len(tasks) - len(left))
        except KeyboardInterrupt:
            for task in left:
                ray.cancel(task)
            raise
        return list(ray.get(waiting))


def _there(run: Callable[[A], B], task: A, folder: str, extensions: Sequence[str]) -> B:
    """Runs in a worker of the cluster; paths are those of whoever asks, where both see the same files."""
    if Path(folder).is_dir():
        os.chdir(folder)
    extend.load_all(extensions)
    return run(task)


@contextmanager
def _connected() -> Iterator[Any]:
    """The ray package, in touch with a cluster: one that this process already uses, that RAY_ADDRESS names,
    or that runs on this machine.
    """
    try:
        ray = import_module("ray")
    except ImportError:
        raise MissingExtra("ray", "ray", "--engine ray") from None
    if ray.is_initialized():
        yield ray
        return
    try:
        connect(ray, address="auto")
    except ConnectionError:
        raise RunError(
            "--engine ray: no Ray cluster is found; start one (`ray start --head`), set RAY_ADDRESS, or leave"
            " --engine out"
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()
