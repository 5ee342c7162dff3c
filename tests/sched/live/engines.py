"""Starts and stops real engines on this machine: Slurm with four nodes, Ray with four nodes."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

_CONF = """
ClusterName=paceline
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
SlurmdTimeout=20
KillWait=5
InactiveLimit=0
MinJobAge=60
StateSaveLocation={folder}/ctld
SlurmctldPidFile={folder}/ctld.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000
NodeName=n[1-4] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=1 State=UNKNOWN
PartitionName=all Nodes=n[1-4] Default=YES MaxTime=INFINITE State=UP
"""


def why_no_slurm():
    """What is missing for a Slurm of one's own, or nothing."""
    needed = ("slurmctld", "slurmd", "sbatch", "srun", "munged")
    missing = [name for name in needed if shutil.which(name) is None and not Path("/usr/sbin", name).exists()]
    if missing:
        return (
            f"Slurm is not installed: no {missing[0]} (Debian: apt-get install --no-install-recommends"
            " slurm-wlm munge)"
        )
    return "" if os.geteuid() == 0 else "slurmd and munged run as root only"


class Slurm:
    """munged, slurmctld and four slurmd in a folder of their own, on ports of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.chmod(0o755)
        first = _ports(5)
        conf = _CONF.format(
            host=socket.gethostname(), folder=folder, port=first, first=first + 1, last=first + 4
        )
        (folder / "slurm.conf").write_text(conf)
        (folder / "ctld").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        os.environ |= self.environment
        self.processes: dict[str, subprocess.Popen] = {}
        try:
            self._begin(
                "munged",
                "--foreground",
                "--force",
                f"--socket={folder}/munge.socket",
                f"--key-file={folder}/munge.key",
                f"--pid-file={folder}/munge.pid",
                f"--log-file={folder}/munge.log",
                f"--seed-file={folder}/munge.seed",
            )
            _until(lambda: (folder / "munge.socket").exists(), "munged")
            self._begin("slurmctld", "-D", "-c", "-f", str(folder / "slurm.conf"))
            for node in range(1, 5):
                self.begin_node(node)
            _until(lambda: self.sinfo().split() == ["idle"] * 4, "four idle nodes")
        except BaseException:
            self.close()
            raise

    def _begin(self, name: str, *words: str, key: str = "") -> None:
        path = shutil.which(name) or f"/usr/sbin/{name}"
        with (self.folder / f"{key or name}.out").open("ab") as out:
            self.processes[key or name] = subprocess.Popen(
                [path, *words], stdout=out, stderr=out, stdin=subprocess.DEVNULL, cwd="/"
            )

    def begin_node(self, node: int) -> None:
        """Starts the slurmd of n1, n2..."""
        self._begin("slurmd", "-D", "-N", f"n{node}", "-f", str(self.folder / "slurm.conf"), key=f"n{node}")

    def stop_controller(self) -> None:
        """Slurm does not answer any more; its nodes go on. (Killed outright it forgets young jobs, kills them
        later and drains their nodes.)
        """
        process = self.processes.pop("slurmctld")
        process.terminate()
        process.wait(30)

    def begin_controller(self) -> None:
        """It answers again, with what it saved."""
        self._begin("slurmctld", "-D", "-f", str(self.folder / "slurm.conf"))
        _until(lambda: self.sinfo().split(), "slurmctld")

    def kill_node(self, node: int) -> None:
        """A node dies: its slurmd is killed, and Slurm told so rather than left to find out."""
        process = self.processes.pop(f"n{node}")
        process.kill()
        process.wait()
        self.ask("scontrol", "update", f"nodename=n{node}", "state=down", "reason=killed")

    def mend_node(self, node: int) -> None:
        """A dead node comes back."""
        self.begin_node(node)
        self.ask("scontrol", "update", f"nodename=n{node}", "state=resume")
        _until(lambda: self.sinfo().split() == ["idle"] * 4, "four idle nodes")

    def sinfo(self) -> str:
        return subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], capture_output=True, text=True).stdout

    def ask(self, *words: str) -> str:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    def close(self) -> None:
        if "slurmctld" in self.processes:
            subprocess.run(["scancel", "--user=root"], capture_output=True)
            with contextlib.suppress(RuntimeError):
                _until(
                    lambda: not subprocess.run(["squeue", "-h"], capture_output=True).stdout,
                    "an empty queue",
                    10,
                )
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for left in _marked(f"SLURM_CONF={self.folder}/slurm.conf"):  # what outlived a slurmd that was killed
            with contextlib.suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)
        os.environ.pop("SLURM_CONF", None)


class Ray:
    """A Ray cluster of four nodes of one device each, all on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, _ports(1)
        self.address = f"127.0.0.1:{self.port}"
        ray = str(Path(sys.executable).with_name("ray"))
        self.nodes: list[subprocess.Popen] = []
        self.environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        os.environ |= self.environment
        common = [
            "--num-cpus=1",
            "--num-gpus=0",
            "--object-store-memory=80000000",
            "--disable-usage-stats",
            "--block",
            "--node-ip-address=127.0.0.1",
        ]
        try:
            # one after the other: two that start at once on one machine take the same socket
            for node in range(4):
                self._begin(ray, node, common)
        except BaseException:
            self.close()
            raise

    def _begin(self, ray: str, node: int, common: list[str]) -> None:
        head = ["--head", f"--port={self.port}", "--include-dashboard=false", f"--temp-dir={self.folder}"]
        where = head if node == 0 else [f"--address={self.address}"]
        output = self.folder / f"node{node}.out"
        with output.open("wb") as out:
            self.nodes.append(
                subprocess.Popen(
                    [ray, "start", *where, f"--node-name=n{node + 1}", *common],
                    stdout=out,
                    stderr=out,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )
        _until(lambda: "will now block forever" in output.read_text(), f"Ray's node {node + 1}", 120)

    def kill_node(self, node: int) -> None:
        """A node dies with all that Ray has on it."""
        process = self.nodes[node - 1]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        for process in self.nodes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # told to end, it takes half a minute
            process.wait()
        for name in self.environment:
            os.environ.pop(name, None)


def _marked(text: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(entry.name) != os.getpid() and text.encode() in (entry / "environ").read_bytes().split(
                b"\0"
            ):
                found.append(int(entry.name))
    return found


def _ports(count: int) -> int:
    """The first of so many free ports in a row."""
    for first in range(21000 + os.getpid() % 5000 * 2, 60000, count):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
                return first
            except OSError:
                continue
    raise RuntimeError("no free ports")


def _until(done, what: str, limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > end:
            raise RuntimeError(f"{what} did not come up within {limit_s:g} s")
        time.sleep(0.1)
