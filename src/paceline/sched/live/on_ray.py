"""Jobs on a Ray cluster. Each rank is a detached actor pinned to its node, which runs a watcher; actors
outlive the daemon, and are found by name when it comes back. The state folder must be on a file system that
the nodes share."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline import on_ray
from paceline.errors import MissingExtra, RunError
from paceline.sched.live.driver import PENDING, RUNNING, Driver, EngineAway, Node, command
from paceline.sched.live.run import Attempt, AttemptFolder

_SPACE = "paceline"


class _Rank:
    """The actor: begins the watcher of one rank, and is there as long as it is."""

    def __init__(self, words: list[str], run: str) -> None:
        import os
        import threading

        self._ray = import_module("ray")
        self._me = self._ray.get_runtime_context().current_actor
        self._process = subprocess.Popen(
            words,
            env={**os.environ, "PACELINE_RUN": run},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        self._process.wait()
        self._ray.kill(self._me)  # the actor goes with it, and gives its devices back


class RayDriver(Driver):
    """A Ray cluster. Devices of a node are its GPUs, or its processors where no node has GPUs."""

    name = "ray"
    poll_s = 0.5

    def __init__(self, state: Path, address: str = "") -> None:
        super().__init__(state)
        if find_spec("ray") is None:
            raise MissingExtra("ray", "ray", "engine ray")
        _reach(address)
        self._ray: Any = import_module("ray")  # an extra, without types
        try:
            if not self._ray.is_initialized():
                on_ray.connect(self._ray, address=address or "auto", namespace=_SPACE)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise RunError(
                f"no Ray cluster answers at {address or 'this machine'}"
                f" ({' '.join(str(error).split())[:200]}); start one with: ray start --head"
            ) from None
        self._ids: dict[str, str] = {}
        self._gpus = False

    def nodes(self) -> list[Node]:
        rows = list(self._ask(self._ray.nodes))
        self._gpus = any(row["Resources"].get("GPU") for row in rows)
        found: dict[str, Node] = {}
        # a node that left stays in the list; one that came back under its name stands after it
        for row in sorted(rows, key=lambda row: bool(row["Alive"])):
            devices = int(row["Resources"].get("GPU" if self._gpus else "CPU", 0))
            name = self._name(row)
            self._ids[name] = row["NodeID"]
            if devices or name in found:
                kind = next(
                    (
                        key.partition(":")[2].lower()
                        for key in row["Resources"]
                        if key.startswith("accelerator_type:")
                    ),
                    "gpu",
                )
                found[name] = Node(
                    name=name,
                    devices=devices or found[name].devices,
                    kind=kind if self._gpus else "cpu",
                    up=bool(row["Alive"]),
                )
        return sorted(found.values(), key=lambda node: node.name)

    def _name(self, row: dict[str, Any]) -> str:
        """Several nodes of one machine share its name; their own then tells them apart."""
        given = row.get("NodeName") or ""
        return (
            given
            if given and given != row["NodeManagerAddress"]
            else f"{row['NodeManagerAddress']}-{row['NodeID'][:8]}"
        )

    def launch(self, run: Attempt, folder: AttemptFolder, node_names: Sequence[str]) -> None:
        pinned = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        for rank, ((_, count), name) in enumerate(zip(run.allocation, node_names, strict=True)):
            if folder.claimed(rank):
                continue
            size = {"num_gpus": count, "num_cpus": 0} if self._gpus else {"num_cpus": count}
            actor = self._ray.remote(_Rank).options(
                name=f"{folder.name}-{rank}",
                namespace=_SPACE,
                lifetime="detached",
                max_restarts=0,
                get_if_exists=True,
                scheduling_strategy=pinned(node_id=self._ids[name], soft=False),
                **size,
            )
            self._ask(lambda actor=actor, rank=rank: actor.remote(command(folder, rank), str(folder.path)))

    def has(self, runs: Sequence[tuple[Attempt, AttemptFolder]]) -> dict[str, str]:
        alive = {
            row["name"]
            for row in self._ask(lambda: self._ray.util.list_named_actors(all_namespaces=True))
            if row["namespace"] == _SPACE
        }
        out = {}
        for run, folder in runs:
            missing = [
                rank
                for rank in range(run.ranks)
                if not folder.exit(rank) and f"{folder.name}-{rank}" not in alive
            ]
            if not missing:
                out[run.token] = (
                    RUNNING if all(folder.claimed(rank) for rank in range(run.ranks)) else PENDING
                )
        return out

    def destroy(self, run: Attempt, folder: AttemptFolder) -> None:
        for rank in range(run.ranks):
            with contextlib.suppress(ValueError):
                if folder.exit(rank):  # others still have to say how they ended
                    self._ray.kill(self._ray.get_actor(f"{folder.name}-{rank}", namespace=_SPACE))

    def close(self) -> None:
        self._ray.shutdown()

    def _ask(self, call: Any) -> Any:
        try:
            return call()
        except (ConnectionError, TimeoutError, RuntimeError) as error:
            raise EngineAway(f"Ray does not answer: {' '.join(str(error).split())[:200]}") from None


def _reach(address: str) -> None:
    """Ray waits for minutes for a head that is not there: a look first."""
    host, colon, port = address.rpartition(":")
    if not colon or "://" in address or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), 5.0).close()
    except OSError as error:
        raise RunError(
            f"no Ray cluster answers at {address} ({error.strerror or error}); start one with: ray start"
            " --head"
        ) from None
