"""Checkpoints that are whole or not there: written beside, checksummed, renamed; the last ones kept; of use
to any number of ranks.

    checkpoints = Checkpoints(folder)
    start = checkpoints.load(model, optimizer)              # 0 where there is none
    for step in range(start, steps):
        ...
        if (step + 1) % 100 == 0:
            checkpoints.save(step + 1, model, optimizer)    # returns when tensors are copied; a thread
                                                            # writes them

The model and the optimizer's state are stored as one process would have them. What a strategy keeps per rank
(what compressors hold back, random numbers) is stored per rank, and shared out anew where the number of ranks
has changed. The folder must be one that all ranks see.

Checkpoints hold tensors and plain data, and nothing else is loaded: one from elsewhere cannot run code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import threading
import time
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import PacelineError, RunError, SpecError
from paceline.spec.vocabulary import ALIASES
from paceline.train.comm import agree
from paceline.train.hooks import unwrapped
from paceline.train.split_state import gathered, load_model, optimizer_parts
from paceline.train.strategies.averager import Averager
from paceline.train.strategies.base import Strategy
from paceline.units import show

_MANIFEST, _PARTIAL, _FAILED = "manifest.json", ".partial", ".failed"
#: seconds after which a rank that has not written its part is given up
_PATIENCE_S = 120.0


class Checkpoints:
    """The checkpoints of one run, `keep` of them, in a folder."""

    def __init__(self, folder: Path | str, *, keep: int = 2, asynchronous: bool = True) -> None:
        if keep < 1:
            raise SpecError(f"at least one checkpoint must be kept, got {keep}")
        self.folder, self.keep, self.asynchronous = Path(folder), keep, asynchronous
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(
                f"no checkpoints can be written to {str(folder)!r}: {error.strerror}; name another folder"
            ) from None
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self._thread: threading.Thread | None = None
        #: what went wrong with the last one (a full disk, a rank that is gone); training goes on, the ones
        #: before stay
        self.problem: str | None = None
        #: step of the last one that is known to be whole (on rank 0)
        self.whole = 0

    # -- saving ----------------------------------------------------------------------------------------

    def save(
        self, step: int, model: nn.Module, optimizer: Optimizer, extra: dict[str, Any] | None = None
    ) -> None:
        """Saves the state after `step`; all ranks call it. Waits for the one before, if that is still being
        written.
        """
        self.wait()
        _check_plain(extra or {}, "extra")
        strategy = _strategy(optimizer)
        whole = {
            "step": step,
            "model": unwrapped(model).state_dict(),
            "extra": extra or {},
            "world": self.world,
            "optimizer": strategy.optimizer_state() if strategy else optimizer.state_dict(),
        }
        own = {
            "strategy": strategy.state_dict() if strategy else {},
            "name": strategy.name if strategy else "",
            "random": torch.get_rng_state(),
        }
        whole = gathered(whole, keep=self.rank == 0)
        copies = {f"rank{self.rank}.pt": _copy(own), **({"model.pt": _copy(whole)} if self.rank == 0 else {})}
        self._thread = threading.Thread(
            target=self._write, args=(step, copies), name="paceline-checkpoint", daemon=False
        )
        self._thread.start()
        if not self.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Returns when nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, step: int, files: dict[str, Any]) -> None:
        partial = self.folder / f"step-{step:09d}{_PARTIAL}"
        try:
            if self.rank == 0:  # first of all: on a full disk they are what takes the room
                self._sweep(step)
            partial.mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                temporary = partial / f"{name}.writing"
                torch.save(content, temporary)
                _flush(temporary)
                (partial / f"{name}.sha256").write_text(_digest(temporary))
                temporary.replace(partial / name)
            if self.rank == 0:
                self._complete(step, partial)
                self.whole = step
            self.problem = None
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            self.problem = f"checkpoint of step {step} was not written: {self._why(error)}"
            if self.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            else:
                # room for others, and a word to rank 0, which waits; an empty file fits on most full disks
                for name in files:
                    with contextlib.suppress(OSError):
                        (partial / f"{name}.writing").unlink(missing_ok=True)
                        (partial / f"{name}{_FAILED}").touch()

    def _complete(self, step: int, partial: Path) -> None:
        """Rank 0: once every rank's file is there, lists them, and makes the checkpoint appear."""
        names = ["model.pt", *(f"rank{r}.pt" for r in range(self.world))]
        deadline = time.monotonic() + _PATIENCE_S
        while not all((partial / name).exists() for name in names):
            if given_up := [name for name in names if (partial / f"{name}{_FAILED}").exists()]:
                raise OSError(f"{', '.join(given_up)} could not be written by its rank")
            if time.monotonic() > deadline:
                raise OSError(
                    f"no file of {', '.join(n for n in names if not (partial / n).exists())} after"
                    f" {_PATIENCE_S:g} s"
                )
            time.sleep(0.01)
        sums = {name: (partial / f"{name}.sha256").read_text() for name in names}
        (partial / _MANIFEST).write_text(json.dumps({"step": step, "world": self.world, "sha256": sums}))
        _flush(partial / _MANIFEST)
        final = self.folder / partial.name.removesuffix(_PARTIAL)
        shutil.rmtree(final, ignore_errors=True)
        partial.replace(final)
        _flush(self.folder)
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self.folder / f"step-{old:09d}", ignore_errors=True)

    def _sweep(self, step: int) -> None:
        """Removes what was begun before that step and never became whole: its run was killed, or there was no
        room.
        """
        for left in self.folder.glob(f"step-*{_PARTIAL}"):
            if int(left.name[5:14]) < step:
                shutil.rmtree(left, ignore_errors=True)

    def _why(self, error: OSError | RuntimeError) -> str:
        """In a few words. torch says where in a file it could not write, not why."""
        if isinstance(error, OSError):
            return str(error)
        try:
            return (
                f"torch could not write it; the disk has {show(shutil.disk_usage(self.folder).free, 'bytes')}"
                " left"
            )
        except OSError:
            return str(error).splitlines()[0]

    # -- loading ---------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Steps of which there is a checkpoint, in order; not looked into."""
        return sorted(
            int(path.name.removeprefix("step-"))
            for path in self.folder.glob("step-*")
            if not path.name.endswith(_PARTIAL)
        )

    def check(self, step: int) -> str | None:
        """What is wrong with a checkpoint, if anything."""
        place = self.folder / f"step-{step:09d}"
        try:
            manifest = json.loads((place / _MANIFEST).read_text())
            for name, wanted in manifest["sha256"].items():
                if _digest(place / name) != wanted:
                    return f"{place / name} is not what was written (checksum differs)"
        except (OSError, ValueError, KeyError) as error:
            return f"{place} cannot be read: {error}"
        return None

    def load(self, model: nn.Module, optimizer: Optimizer) -> int:
        """Takes up the last checkpoint that is whole, on all ranks; its step, or 0 where there is none."""
        step, world = agree(self._newest()) if dist.is_initialized() else self._newest()
        if not step:
            return 0
        place = self.folder / f"step-{step:09d}"
        whole = _read(place / "model.pt")
        strategy = _strategy(optimizer)
        try:
            load_model(unwrapped(model), whole["model"])
            load = strategy.load_optimizer_state if strategy else optimizer.load_state_dict
            load(optimizer_parts(optimizer, whole["optimizer"]))
        except PacelineError:
            raise
        except (RuntimeError, ValueError) as error:
            said = str(error).strip().splitlines()[-1].strip().rstrip(".")
            raise RunError(
                f"{place} is of another model or optimizer: {said}; name another folder, or remove it to"
                " begin anew"
            ) from None
        if strategy is None:
            return step
        ranks = range(world) if world != self.world else [self.rank]
        states = [_read(place / f"rank{r}.pt") for r in ranks]
        saved = states[0].get("name", strategy.name)
        if ALIASES.get(saved, saved) != strategy.name:
            return step  # what another strategy kept says nothing to this one
        if world == self.world:
            strategy.load_state_dict(states[0]["strategy"])
            torch.set_rng_state(states[0]["random"])
        elif isinstance(strategy, Averager):
            strategy.load_state_dict(strategy.reshard([state["strategy"] for state in states]))
        else:
            strategy.load_state_dict(states[0]["strategy"])
        return step

    def _newest(self) -> tuple[int, int]:
        problems = []
        for step in reversed(self.steps()):
            problem = self.check(step)
            if problem is None:
                return step, json.loads((self.folder / f"step-{step:09d}" / _MANIFEST).read_text())["world"]
            problems.append(problem)
        if problems:
            raise RunError(
                f"no checkpoint in {self.folder} is whole: {'; '.join(problems)}; remove the folder to begin"
                " anew"
            )
        return 0, 0


def _strategy(optimizer: Optimizer) -> Strategy | None:
    held = getattr(optimizer, "_paceline", None)
    return held.by if held is not None else None


def _read(path: Path) -> Any:
    """The content of a file: tensors and plain data. What else it may hold would be code, and is refused."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f" ({named[1]})" if named else ""
        raise RunError(
            f"{path} holds more than tensors and plain data{what}, which could run code; if it is "
            "yours, allow its types with torch.serialization.add_safe_globals"
        ) from None


#: types of which checkpoints may hold values beside tensors and containers
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)


def _check_plain(value: Any, name: str) -> None:
    """Raises where a value could not be loaded again."""
    if isinstance(value, dict):
        for key, item in value.items():
            _check_plain(key, f"a key of {name}")
            _check_plain(item, f"{name}[{key!r}]")
    elif type(value) in (list, tuple, set):
        for i, item in enumerate(value):
            _check_plain(item, f"{name}[{i}]")
    elif isinstance(value, Tensor):
        return
    elif type(value) not in (*_PLAIN, *torch.serialization.get_safe_globals()):
        raise SpecError(
            f"{name} is of type {type(value).__name__}; checkpoints hold tensors and plain data "
            "(numbers, words, lists, dictionaries), or types given to "
            "torch.serialization.add_safe_globals"
        )


def _copy(value: Any) -> Any:
    """The same with tensors copied to host memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(item) for item in value)
    return value


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Makes sure that it is on the disk before anything depends on it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems do not do this for folders
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
