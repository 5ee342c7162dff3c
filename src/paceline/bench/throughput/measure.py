"""Takes the data set: real processes on hosts with shaped links, many small runs side by side, one core each.

    python -m paceline.bench.throughput.measure OUT.csv [--hosts 16] [--seconds 600] [--links 150,300]
        [--workers 1..8] [--models mlp,cnn]

Run as root on Linux with pyroute2 installed, each process is a host of its own: a network namespace behind a
token bucket. Without either, processes meet on loopback and servers pace their transfers themselves, which
the column `shaping` says. Cores of one machine differ in speed by a fifth and more for seconds at a time,
since what else shares them differs; hosts change cores at random ten times a second, so that all compute
alike. A run whose workers still computed 8 % faster or slower than the middle one of its curve (same model,
mode, link and servers) was disturbed and is taken again, by that alone and not by its throughput; all lines
stay in the file, the last of a run counts. Runs that are in OUT.csv already are not repeated; steps of runs
with one or two workers go to OUT.profiles.jsonl beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.bench.throughput.conductor import COLUMNS, Conductor, done
from paceline.bench.throughput.runs import ThroughputRun, standard
from paceline.errors import PacelineError
from paceline.train.asynchronous.store import VARIABLE, Rendezvous, TCPStore, secret, serve_store
from paceline.units import counts

_PORT = 29455
#: seconds between changes of cores
_TURN_S = 0.1
#: of agents; torch would warn that hosts of an emulated cluster have no names
_VARIABLES = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hosts:
    """Agents that were started, the store they listen to, and how their links are set (None: servers pace
    themselves).
    """

    store: TCPStore
    place: Rendezvous
    processes: list[subprocess.Popen[bytes]]
    shaping: str
    prepare: Callable[[float, Sequence[int]], None] | None = None


def take(
    runs: Sequence[ThroughputRun],
    out: Path,
    *,
    hosts: int = 16,
    seconds: float = 600.0,
    machine: str = "1",
    tries: int = 1,
    loopback: bool = False,
) -> list[ThroughputRun]:
    """Measures `runs` that `out` does not have yet, on `hosts` hosts one of which conducts; those that were
    left when the time was up.
    """
    if not out.exists():
        out.write_text(",".join(COLUMNS) + "\n")
    known, until = done(out), time.time() + seconds
    todo = [run for run in runs if run.key not in known]
    with contextlib.ExitStack() as stack:
        try:
            if loopback:
                raise PacelineError("asked for loopback")
            made = stack.enter_context(_namespaces(hosts))
        except (PacelineError, OSError, ImportError) as error:
            print(f"no emulated cluster ({error}); servers pace themselves", flush=True)
            made = stack.enter_context(_loopback(hosts))
        stack.enter_context(_mixed([process.pid for process in made.processes]))
        conductor = Conductor(
            made.store,
            made.place,
            range(1, hosts),
            out,
            shaping=made.shaping,
            machine=machine,
            prepare=made.prepare,
            tries=tries,
        )
        conductor.wait_for_agents()
        left = conductor.conduct(todo, until)
        conductor.dismiss()
        for process in made.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10.0)
        return left


@contextlib.contextmanager
def _mixed(agents: Sequence[int]) -> Iterator[None]:
    """Agents change places on the cores while this lasts; the first core is the conductor's."""
    over = threading.Event()
    mixer = threading.Thread(target=_mix, args=(agents, sorted(os.sched_getaffinity(0)), over), daemon=True)
    mixer.start()
    try:
        yield
    finally:
        over.set()
        mixer.join()


def _mix(agents: Sequence[int], cores: Sequence[int], over: threading.Event) -> None:
    for turn in itertools.count():
        places = [(cores[1:] or cores)[i % max(1, len(cores) - 1)] for i in range(len(agents))]
        random.Random(turn).shuffle(places)
        for process, core in zip(agents, places, strict=True):
            with contextlib.suppress(OSError):  # it has ended, or a thread of it has
                for thread in Path(f"/proc/{process}/task").iterdir():
                    os.sched_setaffinity(int(thread.name), {core})
        if over.wait(_TURN_S):
            return


def _command(rank: int) -> list[str]:
    return [sys.executable, "-m", "paceline.bench.throughput.agent", str(rank)]


def _session(host: str, store: TCPStore) -> Rendezvous:
    return Rendezvous(host=host, port=store.port, run=secret())


@contextlib.contextmanager
def _namespaces(hosts: int) -> Iterator[_Hosts]:
    """An emulated cluster; this process conducts from outside, through a store on host 0."""
    from paceline.bench.emulate import EmulatedCluster

    with EmulatedCluster(hosts=hosts) as cluster:
        with cluster.inside(0):
            store = serve_store(cluster.address(0), _PORT)
        place = _session(cluster.address(0), store)
        variables = {**_VARIABLES, VARIABLE: str(place)}
        processes = [cluster.start(rank, _command(rank), variables) for rank in range(1, hosts)]
        yield _Hosts(
            store=store,
            place=place,
            processes=processes,
            shaping="tbf",
            prepare=lambda link, ranks: cluster.shape(link * 1e6 / 8, ranks),
        )


@contextlib.contextmanager
def _loopback(hosts: int) -> Iterator[_Hosts]:
    store = serve_store("127.0.0.1")
    place = _session("127.0.0.1", store)
    variables = {**os.environ, **_VARIABLES, VARIABLE: str(place)}
    processes = [subprocess.Popen(_command(rank), env=variables) for rank in range(1, hosts)]
    try:
        yield _Hosts(store=store, place=place, processes=processes, shaping="pacing")
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--hosts", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument(
        "--machine",
        default="1",
        help="what the column `machine` says: runs are predicted from profiles of the same machine",
    )
    parser.add_argument(
        "--tries",
        type=int,
        default=3,
        help="for a run that computed 8 %% faster or slower than the others of its curve",
    )
    for name in ("links", "models", "modes", "servers", "workers"):
        parser.add_argument(f"--{name}", help="only these, separated by commas")
    parser.add_argument("--loopback", action="store_true")
    arguments = parser.parse_args()
    left = take(
        _chosen(arguments),
        arguments.out,
        hosts=arguments.hosts,
        seconds=arguments.seconds,
        machine=arguments.machine,
        tries=arguments.tries,
        loopback=arguments.loopback,
    )
    print(f"{len(left)} runs left", flush=True)


def _chosen(arguments: argparse.Namespace) -> list[ThroughputRun]:
    """The runs of the data set that the options let through."""
    runs = standard()
    for name, text in {"model": arguments.models, "mode": arguments.modes}.items():
        runs = [run for run in runs if not text or getattr(run, name) in text.split(",")]
    for name, text in {"servers": arguments.servers, "workers": arguments.workers}.items():
        runs = [run for run in runs if not text or getattr(run, name) in counts(text)]
    links = [float(link) for link in arguments.links.split(",")] if arguments.links else []
    return [run for run in runs if not links or run.link_Mbps in links]


if __name__ == "__main__":
    main()
