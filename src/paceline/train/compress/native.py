"""`kernels.c`, built once per machine with the C compiler that is there, and called through ctypes (which
lets other threads run).

Without a compiler `library()` is None, and what encodes falls back on torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("kernels.c")
#: sums may be regrouped where the source says so; nothing else may round differently from torch
FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp-simd",
    "-fvisibility=hidden",
    "-shared",
    "-fPIC",
)
#: bytes of the checksum at the end of a cached library
_DIGEST = hashlib.sha256().digest_size
#: elements below which another thread costs more than it gains, and threads that one encoder takes at most,
#: unless torch has more
SHARE, MOST = 1 << 19, 4


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None if this machine cannot build them."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    try:
        loaded = ctypes.CDLL(str(_built(compiler)))
    except (OSError, subprocess.SubprocessError):
        return None
    loaded.accumulate.restype = loaded.sparse_decode.restype = ctypes.c_int64
    loaded.threshold.restype = ctypes.c_float
    return loaded


def _built(compiler: str) -> Path:
    """Where the library lies; named after what it was built from, so that another source or another processor
    gets its own.
    """
    source = SOURCE.read_bytes()
    name = hashlib.sha256(
        b"\0".join([source, compiler.encode(), " ".join(FLAGS).encode(), _processor()])
    ).hexdigest()[:20]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="paceline-"))
    target = folder / f"kernels-{name}.so"
    if not _sound(target):
        # ranks of one host may build at the same time: each its own file, the last one stays
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".so", delete=False) as file:
            made = Path(file.name)
        try:
            command = [*shlex.split(compiler), *FLAGS, str(SOURCE), "-o", str(made), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            _seal(made)
            made.replace(target)
        finally:
            made.unlink(missing_ok=True)
    return target


def _seal(library: Path) -> None:
    """Appends a checksum, which loaders do not see: a file that was cut or changed is noticed before it is
    loaded.
    """
    content = library.read_bytes()
    with library.open("ab") as file:
        file.write(hashlib.sha256(content).digest())
        file.flush()
        os.fsync(file.fileno())


def _sound(library: Path) -> bool:
    """Whether a cached library is whole, and nobody else could have written it."""
    try:
        about, content = library.stat(), library.read_bytes()
    except OSError:
        return False
    own = about.st_uid == os.geteuid() and not about.st_mode & 0o022
    return own and hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]


def _processor() -> bytes:
    """What tells processors apart: a home folder may be shared by hosts that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor().encode()
    return "\n".join(
        sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    ).encode()


def serves(tensor: Tensor) -> bool:
    """Whether the C kernels can take a tensor: in the host's memory, contiguous, fewer than 2^31 elements."""
    return (
        library() is not None
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and tensor.numel() < 1 << 31
    )


def address(tensor: Tensor | None) -> ctypes.c_void_p:
    """Of a tensor's memory; null for None."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """An array of them."""
    return (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))


def floats(values: Sequence[float]) -> ctypes.Array[ctypes.c_float]:
    """An array of single-precision numbers."""
    return (ctypes.c_float * len(values))(*values)


def cores() -> int:
    """Cores of the host that this rank has to itself, as far as is known."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, own // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def threads() -> int:
    """That an encoder takes: as many as torch may use, or a few where the rank has more cores (launchers give
    it one, however many it has). Also the core of the passes, which wait for the last of it."""
    return max(torch.get_num_threads(), min(MOST, cores()))


def share(count: int, elements: int, call: Callable[[int, int], object]) -> None:
    """Runs `call(lo, hi)` over [0, count), in several threads if there are enough elements."""
    parts = 1 if elements < 2 * SHARE else min(threads(), elements // SHARE)
    if parts == 1:
        call(0, count)
        return
    edges = [count * i // parts for i in range(parts + 1)]
    for done in [_pool().submit(call, lo, hi) for lo, hi in pairwise(edges)]:
        done.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="paceline-kernel")
