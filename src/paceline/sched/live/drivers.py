"""Engines by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline.errors import UnknownName
from paceline.sched.live.driver import Driver


def _local(state: Path, nodes: str) -> Driver:
    from paceline.sched.live.local import LocalDriver

    return LocalDriver(state, nodes)


def _slurm(state: Path, nodes: str) -> Driver:
    from paceline.sched.live.slurm import SlurmDriver

    return SlurmDriver(state, nodes)


def _ray(state: Path, nodes: str) -> Driver:
    from paceline.sched.live.on_ray import RayDriver

    return RayDriver(state, nodes)


ENGINES: dict[str, Callable[[Path, str], Driver]] = {"local": _local, "slurm": _slurm, "ray": _ray}


def make(name: str, state: Path, nodes: str) -> Driver:
    """The engine of that name; `nodes`: local 4x2 (nodes x devices), slurm PARTITION, ray ADDRESS (by default
    the one that runs here).
    """
    if name not in ENGINES:
        raise UnknownName("engine", name, ENGINES, f"allowed: {', '.join(ENGINES)}")
    return ENGINES[name](state, nodes)
