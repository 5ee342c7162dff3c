"""Hosts, links and a switch, made when entered and removed when left."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from paceline.bench.emulate import system
from paceline.bench.emulate.sweep import sweep
from paceline.errors import MissingExtra, RunError, SpecError
from paceline.train.launch import supervise
from paceline.units import show

#: the interface of every host, and its network
INTERFACE = "eth0"
_NETWORK = "10.91.{}.{}"
_PORT = 29400
#: of a token bucket: the largest packet that segmentation offload makes fits, and a scheduler's tick at the
#: rate
_LEAST_BURST, _BURST_S, _QUEUE = 65536, 2e-3, "200ms"
_MOST_HOSTS = 200
#: of the namespace of who writes it
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_count = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes on the wire of one host's interface, headers of Ethernet, IP and TCP included."""

    sent_bytes: int
    received_bytes: int

    def __sub__(self, before: Traffic) -> Traffic:
        return Traffic(
            sent_bytes=self.sent_bytes - before.sent_bytes,
            received_bytes=self.received_bytes - before.received_bytes,
        )


def burst_bytes(link_Bps: float) -> int:
    """What a link of that rate passes at once after a pause."""
    return max(_LEAST_BURST, round(link_Bps * _BURST_S))


def check(cpus: float | None = None) -> None:
    """Refuses, in one line, where this system cannot emulate a cluster."""
    if sys.platform != "linux":
        raise RunError(f"an emulated cluster needs Linux network namespaces; this is {sys.platform}")
    if os.geteuid() != 0:
        raise RunError(
            "an emulated cluster needs the right to make network namespaces; run as root (sudo), or in a"
            " privileged container"
        )
    if find_spec("pyroute2") is None:
        raise MissingExtra("pyroute2", "emulate", "an emulated cluster")
    if cpus is not None and system.cpu_root() is None:
        raise RunError(
            "CPU limits need a writable cgroup with the cpu controller under /sys/fs/cgroup; leave out the"
            " CPU limit to go on without"
        )


class EmulatedCluster:
    """`hosts` namespaces round a switch; `link_Bps` bytes per second each way (None: unshaped), at most
    `cpus` cores each (None: no limit).

    `pin`: each host has cores of its own, where there is one for every host. `congestion`: how the hosts' TCP
    finds a link's rate (None: as the machine has it; with "bbr", all-reduces on a link of 20 Mbit/s took up
    to 30 % longer than the wire needs, with "reno" 2 %). A context manager. Processes that it starts end with
    it; if this process dies, a janitor removes everything.
    """

    def __init__(
        self,
        *,
        hosts: int,
        link_Bps: float | None = None,
        cpus: float | None = None,
        pin: bool = False,
        congestion: str | None = None,
    ) -> None:
        if not 1 <= hosts <= _MOST_HOSTS:
            raise SpecError(f"an emulated cluster has 1 to {_MOST_HOSTS} hosts, got {hosts}")
        if link_Bps is not None and link_Bps < 1e4:
            raise SpecError(f"a link carries at least 10 kB/s, got {show(link_Bps, 'bandwidth')}")
        if cpus is not None and not 0.05 <= cpus <= 4096:
            raise SpecError(f"a host gets between 0.05 and 4096 cores, got {cpus:g}")
        self.hosts, self.link_Bps, self.cpus, self.congestion = hosts, link_Bps, cpus, congestion
        self._cores = _split(sorted(os.sched_getaffinity(0)), hosts) if pin else []
        number = next(_count)
        self.name = f"{system.PREFIX}{os.getpid()}-{number}"
        self._net = (os.getpid() * 7 + number) % 250
        self._handles: list[Any] = []  # of pyroute2: the switch, then each host
        self._links: list[int] = []
        self._janitor: subprocess.Popen[bytes] | None = None
        self._processes: list[subprocess.Popen[bytes]] = []

    # -- creation and removal ----------------------------------------------------------------------

    def __enter__(self) -> EmulatedCluster:
        check(self.cpus)
        sweep()
        self._janitor = subprocess.Popen(
            [sys.executable, "-m", "paceline.bench.emulate", self.name],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self._create()
            self.shape(self.link_Bps)
        except BaseException as error:
            self.close()
            if isinstance(error, (OSError, _pyroute2().netlink.exceptions.NetlinkError)):
                raise RunError(f"this system does not allow an emulated cluster: {error}") from error
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process of the cluster and removes it; may be called twice."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()
        self._processes.clear()
        for handle in self._handles:
            with contextlib.suppress(Exception):
                handle.close()
        self._handles.clear()
        system.remove(self.name)
        if self._janitor is not None and self._janitor.stdin is not None:
            self._janitor.stdin.close()
            self._janitor.wait()
            self._janitor = None

    def _create(self) -> None:
        pyroute2 = _pyroute2()
        pyroute2.netns.create(self._switch)
        switch = pyroute2.NetNS(self._switch)
        self._handles.append(switch)
        switch.link("add", ifname="bridge", kind="bridge")
        bridge = switch.link_lookup(ifname="bridge")[0]
        switch.link("set", index=bridge, state="up")
        for host in range(self.hosts):
            pyroute2.netns.create(self.namespace(host))
            switch.link(
                "add",
                ifname=f"port{host}",
                kind="veth",
                peer={"ifname": INTERFACE, "net_ns_fd": self.namespace(host)},
            )
            port = switch.link_lookup(ifname=f"port{host}")[0]
            switch.link("set", index=port, state="up", master=bridge)
            inner = pyroute2.NetNS(self.namespace(host))
            self._handles.append(inner)
            for name in ("lo", INTERFACE):
                index = inner.link_lookup(ifname=name)[0]
                if name == INTERFACE:
                    inner.addr("add", index=index, address=self.address(host), prefixlen=24)
                inner.link("set", index=index, state="up")
            self._links.append(port)
            if self.congestion is not None:
                with self.inside(host), contextlib.suppress(OSError):  # whoever needs to know reads it there
                    CONGESTION.write_text(self.congestion)
            if self.cpus is not None:
                group = self._group(host)
                assert group is not None
                system.limit_cpus(group, self.cpus)
        # a kernel that cannot: connections work all the same, with some packets sent twice
        with contextlib.suppress(OSError):
            self._steer()

    def _steer(self) -> None:
        """What a host receives costs that host, what a switch does the host that sends, and a wire keeps the
        order of packets.

        By itself the kernel handles a packet on the core that lets it go, which is that of the sender or that
        of a token bucket's timer: two queues, of which one overtakes the other. TCP takes that for loss, and
        a connection may be slow for the rest of its life.
        """
        cores = self._cores or [sorted(os.sched_getaffinity(0))] * self.hosts
        for host in range(self.hosts):
            with self.inside(host), system.interfaces() as found:
                system.steer(found / INTERFACE, cores[host])
        with system.within(self._switch), system.interfaces() as found:
            for host in range(self.hosts):
                system.steer(found / f"port{host}", cores[host])

    def shape(self, link_Bps: float | None, hosts: Sequence[int] | None = None) -> None:
        """Sets the rate of every link, or of those of `hosts`, each way (None: as fast as the machine goes);
        also while processes run.
        """
        if hosts is None:
            self.link_Bps = link_Bps
        switch, *all_hosts = self._handles
        for number in range(self.hosts) if hosts is None else hosts:
            port, host = self._links[number], all_hosts[number]
            for handle, index in ((switch, port), (host, host.link_lookup(ifname=INTERFACE)[0])):
                if link_Bps is not None:
                    handle.tc(
                        "replace",
                        "tbf",
                        index=index,
                        handle="1:",
                        rate=round(link_Bps),
                        burst=burst_bytes(link_Bps),
                        latency=_QUEUE,
                    )
                elif any(q.get_attr("TCA_KIND") == "tbf" for q in handle.get_qdiscs(index=index)):
                    handle.tc("del", index=index, root=True)

    # -- hosts -------------------------------------------------------------------------------------

    @property
    def _switch(self) -> str:
        return f"{self.name}-switch"

    def namespace(self, host: int) -> str:
        """The network namespace of a host, as `ip netns` lists it."""
        return f"{self.name}-host{host}"

    def address(self, host: int) -> str:
        """The address of a host inside the cluster."""
        return _NETWORK.format(self._net, host + 1)

    def inside(self, host: int) -> contextlib.AbstractContextManager[None]:
        """This thread is on a host until the block ends; sockets that it opens there stay there."""
        return system.within(self.namespace(host))

    def _group(self, host: int) -> Path | None:
        root = system.cpu_root() if self.cpus is not None else None
        return root / self.namespace(host) if root else None

    def traffic(self) -> list[Traffic]:
        """Bytes that each host has sent and received since it was made, as its interface counts them."""
        stats = {link["index"]: link.get_attr("IFLA_STATS64") for link in self._handles[0].get_links()}
        return [
            Traffic(sent_bytes=stats[port]["rx_bytes"], received_bytes=stats[port]["tx_bytes"])
            for port in self._links
        ]

    # -- processes ---------------------------------------------------------------------------------

    def start(
        self,
        host: int,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        output: IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Starts a command on a host; it ends at the latest with the cluster or with this process."""
        group = self._group(host)
        entered = [
            sys.executable,
            str(Path(__file__).with_name("enter.py")),
            self.namespace(host),
            str(group or "-"),
            *command,
        ]
        process = subprocess.Popen(
            entered,
            env={**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, **(environment or {})},
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
        )
        if self._cores:  # before it has threads: those to come have the same
            os.sched_setaffinity(process.pid, self._cores[host])
        self._processes.append(process)
        return process

    def variables(self, rank: int, ranks_per_host: int = 1) -> dict[str, str]:
        """What torch.distributed reads in the process of a rank; ranks fill one host after another."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.hosts * ranks_per_host),
            "LOCAL_RANK": str(rank % ranks_per_host),
            "LOCAL_WORLD_SIZE": str(ranks_per_host),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(_PORT),
            "OMP_NUM_THREADS": "1",
        }

    def launch(
        self,
        command: Sequence[str],
        *,
        ranks_per_host: int = 1,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
    ) -> list[str]:
        """Runs one process per rank to its end; what each printed. A rank that fails or is late ends the
        others.
        """

        def start(rank: int, output: IO[bytes]) -> subprocess.Popen[bytes]:
            return self.start(
                rank // ranks_per_host,
                command,
                {**self.variables(rank, ranks_per_host), **(environment or {})},
                output,
            )

        try:
            return supervise(start, self.hosts * ranks_per_host, timeout_s)
        finally:
            self._processes = [process for process in self._processes if process.poll() is None]


def _split(cores: Sequence[int], hosts: int) -> list[Sequence[int]]:
    """Neighbouring cores for each host, as many for each; none where there are too few."""
    each = len(cores) // hosts
    return [cores[host * each : (host + 1) * each] for host in range(hosts)] if each else []


def _pyroute2() -> Any:
    """The package that speaks to the kernel; an extra, without types."""
    package = import_module("pyroute2")
    # its children are forks of this process and ended by TERM: with whatever handler this process has for
    # that they would not end
    package.config.disable_mp_signal = True
    return package
