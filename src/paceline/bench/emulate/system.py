"""What an emulated cluster asks of Linux: namespaces, CPU groups, and who is still alive. Standard library
only: the janitor runs it too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

#: where `ip netns` keeps its names, and ours in it: paceline-<owner's process>-<count>-<host>
NAMESPACES = Path("/run/netns")
PREFIX = "paceline-"
_CGROUPS = Path("/sys/fs/cgroup")
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_MNT_DETACH = 2
#: numbers of calls, on all architectures, since Linux 5.2
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_FSCONFIG_CREATE = 6


def libc() -> ctypes.CDLL:
    """The C library, with errno kept."""
    return ctypes.CDLL(None, use_errno=True)


def enter(namespace: str) -> None:
    """Moves this process into a named network namespace."""
    with (NAMESPACES / namespace).open("rb") as file:
        enter_open(file.fileno())


def enter_open(descriptor: int) -> None:
    """Moves this thread into the network namespace of an open file."""
    if libc().setns(descriptor, _CLONE_NEWNET):
        _fail()


@contextlib.contextmanager
def within(namespace: str) -> Iterator[None]:
    """This thread is in a named network namespace until the block ends."""
    with Path("/proc/thread-self/ns/net").open("rb") as home:
        enter(namespace)
        try:
            yield
        finally:
            enter_open(home.fileno())


def die_with_parent() -> None:
    """Asks the kernel to end this process when the one that started it ends."""
    libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@contextlib.contextmanager
def interfaces() -> Iterator[Path]:
    """The folder in which the kernel shows the interfaces of this thread's network namespace: what is mounted
    elsewhere shows another's.

    A mount without a place, which goes with its descriptor, also when this process is killed.
    """
    context = _call(_FSOPEN, b"sysfs", 0)
    try:
        _call(_FSCONFIG, context, _FSCONFIG_CREATE, None, None, 0)
        mount = _call(_FSMOUNT, context, 0, 0)
    finally:
        os.close(context)
    try:
        yield Path(f"/proc/self/fd/{mount}/class/net")
    finally:
        os.close(mount)


def _call(number: int, *arguments: int | bytes | None) -> int:
    """A call of the kernel for which the C library has no name everywhere."""
    result: int = libc().syscall(
        *(ctypes.c_long(value) if isinstance(value, int) else value for value in (number, *arguments))
    )
    if result < 0:
        _fail()
    return result


def _fail() -> NoReturn:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number))


def steer(interface: Path, cores: Sequence[int]) -> None:
    """Has what an interface receives handled by some of the cores, all packets of a connection by the same
    one, so that they keep their order.
    """
    bits = sum(1 << core for core in cores)
    words = [f"{bits >> at & 0xFFFFFFFF:08x}" for at in range(0, max(1, bits.bit_length()), 32)]
    for queue in (interface / "queues").glob("rx-*"):
        (queue / "rps_cpus").write_text(",".join(reversed(words)))


def remove_namespace(namespace: str) -> None:
    """Unmounts and removes a name; its links go with it once no process is inside."""
    path = NAMESPACES / namespace
    libc().umount2(os.fsencode(path), _MNT_DETACH)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def inside(namespace: str) -> Iterator[int]:
    """Processes that are in a network namespace."""
    try:
        wanted = (NAMESPACES / namespace).stat().st_ino
    except FileNotFoundError:
        return
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "ns" / "net").stat().st_ino == wanted:
                    yield int(entry.name)


def cpu_root() -> Path | None:
    """The folder in which groups with a CPU limit can be made: version 1 or 2, None where neither is
    writable.
    """
    first, second = _CGROUPS / "cpu", _CGROUPS
    if (first / "cpu.cfs_quota_us").exists() or (first / "cpu.shares").exists():
        return first if os.access(first, os.W_OK) else None
    with contextlib.suppress(OSError):
        if "cpu" in (second / "cgroup.controllers").read_text().split() and os.access(second, os.W_OK):
            (second / "cgroup.subtree_control").write_text("+cpu")
            return second
    return None


def limit_cpus(group: Path, cpus: float) -> None:
    """Makes a group that gets at most `cpus` cores' worth of time."""
    group.mkdir()
    period = 20_000  # microseconds: short, so that a host is not stopped for long stretches
    quota = max(1000, round(cpus * period))
    if (group / "cpu.cfs_quota_us").exists():
        (group / "cpu.cfs_period_us").write_text(str(period))
        (group / "cpu.cfs_quota_us").write_text(str(quota))
    else:
        (group / "cpu.max").write_text(f"{quota} {period}")


def remove_group(group: Path) -> None:
    """Ends what is in a CPU group and removes it."""
    for _ in range(50):
        try:
            members = [int(word) for word in (group / "cgroup.procs").read_text().split()]
        except OSError:
            members = []
        end(members)
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:  # the last ones are still going
            time.sleep(0.02)


def end(processes: list[int]) -> None:
    """Kills processes that may have ended already, never this one."""
    for process in processes:
        if process not in (os.getpid(), 1):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def alive(process: int) -> bool:
    """Whether a process exists."""
    return Path(f"/proc/{process}").exists()


def remains() -> dict[str, int]:
    """Names of emulated clusters (namespaces and groups) that still exist, with the process that made
    each.
    """
    found: dict[str, int] = {}
    root = cpu_root() if sys.platform == "linux" else None
    places = [NAMESPACES, *([root] if root else [])]
    for place in places:
        for entry in place.glob(f"{PREFIX}*") if place.is_dir() else ():
            owner, _, rest = entry.name.removeprefix(PREFIX).partition("-")
            if owner.isdigit():
                found[f"{PREFIX}{owner}-{rest.partition('-')[0]}"] = int(owner)
    return found


def remove(cluster: str) -> None:
    """Ends the processes of an emulated cluster, then takes away its groups and namespaces."""
    names = [path.name for path in NAMESPACES.glob(f"{cluster}-*")] if NAMESPACES.is_dir() else []
    for name in names:
        end(list(inside(name)))
    root = cpu_root()
    for group in root.glob(f"{cluster}-*") if root else ():
        remove_group(group)
    for name in names:
        remove_namespace(name)
