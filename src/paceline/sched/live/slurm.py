"""Jobs on a Slurm cluster, by its commands: sbatch, squeue, scancel, sinfo.

Each run is one batch job on named nodes that starts one watcher on each of them (`srun`). A resize is TERM,
the end of that job, a new sbatch: Slurm's own requeue holds a job back for two minutes. The state folder must
be on a file system that the nodes share.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import RunError
from paceline.sched.live.driver import PENDING, RUNNING, Driver, EngineAway, Node, command
from paceline.sched.live.run import Attempt, AttemptFolder

_COMMANDS = ("sbatch", "squeue", "scancel", "sinfo")
#: states of a batch job that has not begun, and of one that has not ended
_WAITS = {"PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED"}
_RUNS = {"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED"}
#: unknown: a controller that just started has not heard from it yet; it says down when it has not for long
_USABLE = ("idle", "mixed", "alloc", "comp", "resv", "plan", "unk")
_GPUS = re.compile(r"gpu:(?:([A-Za-z][\w.-]*):)?(\d+)")


class SlurmDriver(Driver):
    """A Slurm cluster, or one partition of it.

    Devices of a node are its GPUs, or its processors where no node has GPUs.
    """

    name = "slurm"
    poll_s = 0.5

    def __init__(self, state: Path, partition: str = "") -> None:
        super().__init__(state)
        if missing := [name for name in _COMMANDS if shutil.which(name) is None]:
            raise RunError(
                f"engine slurm needs Slurm's command {missing[0]}, which is not on the PATH; run this where"
                " sbatch works"
            )
        self._partition = ["--partition", partition] if partition else []
        self._gpus = False

    def nodes(self) -> list[Node]:
        rows = sorted(
            {
                tuple(line.split("|"))
                for line in self._ask("sinfo", "-h", "-N", *self._partition, "-o", "%N|%c|%G|%T").splitlines()
            }
        )
        found: dict[str, Node] = {}
        counts = {row[0]: sum(int(m[2]) for m in _GPUS.finditer(row[2])) for row in rows}
        self._gpus = any(counts.values())
        for name, processors, gres, status in rows:
            kind = next((m[1] for m in _GPUS.finditer(gres) if m[1]), "gpu") if self._gpus else "cpu"
            devices = counts[name] if self._gpus else int(processors)
            if devices:
                found[name] = Node(
                    name=name, devices=devices, kind=kind, up=status.lower().startswith(_USABLE)
                )
        return sorted(found.values(), key=lambda node: _natural(node.name))

    def launch(self, run: Attempt, folder: AttemptFolder, node_names: Sequence[str]) -> None:
        if self._jobs(folder.name):
            return  # an earlier daemon handed it in
        # one size for all nodes is all that srun can say; what is uneven is counted here, not by Slurm
        each = min(count for _, count in run.allocation)
        size = [f"--gpus-per-node={each}"] if self._gpus else [f"--cpus-per-task={each}"]
        watch = shlex.join(command(folder, "slurm"))
        script = (
            f"#!/bin/sh\nexport PACELINE_RUN={shlex.quote(str(folder.path))}\n"
            f"exec srun --kill-on-bad-exit=0 --cpu-bind=none {watch}\n"
        )
        # Slurm puts numbers in the place of %j and others
        output = f"{folder.path}/slurm.out".replace("%", "%%")
        self._ask(
            "sbatch",
            "--parsable",
            *self._partition,
            f"--job-name={folder.name}",
            f"--nodes={run.ranks}",
            f"--nodelist={','.join(node_names)}",
            "--ntasks-per-node=1",
            *size,
            "--no-requeue",
            "--no-kill",
            f"--output={output}",
            "--open-mode=append",
            "--chdir=/",
            given=script,
        )

    def has(self, runs: Sequence[tuple[Attempt, AttemptFolder]]) -> dict[str, str]:
        status: dict[str, str] = {}
        for line in self._ask("squeue", "-h", "--me", "-o", "%j|%T").splitlines():
            name, _, word = line.partition("|")
            status[name] = word
        out = {}
        for run, folder in runs:
            word = status.get(folder.name, "")
            if word in _RUNS or word in _WAITS:
                out[run.token] = (
                    RUNNING if all(folder.claimed(rank) for rank in range(run.ranks)) else PENDING
                )
        return out

    def destroy(self, run: Attempt, folder: AttemptFolder) -> None:
        for job in self._jobs(folder.name):
            self._ask("scancel", job)

    def _jobs(self, name: str) -> list[str]:
        return self._ask("squeue", "-h", "--me", f"--name={name}", "-o", "%i").split()

    def _ask(self, *words: str, given: str | None = None) -> str:
        """What a command of Slurm prints."""
        try:
            found = subprocess.run(words, input=given, capture_output=True, text=True, timeout=60)
        except subprocess.TimeoutExpired:
            raise EngineAway(f"Slurm's {words[0]} did not answer within 60 s") from None
        if found.returncode:
            raise EngineAway(f"Slurm's {words[0]} failed: {' '.join(found.stderr.split())[:300]}")
        return found.stdout


def _natural(name: str) -> list[int | str]:
    """node2 before node10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
