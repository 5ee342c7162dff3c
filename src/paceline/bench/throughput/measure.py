"""Takes the data set: real processes on hosts with shaped links, many small runs side by side, one core each.

    python -m paceline.bench.throughput.measure OUT.csv [--hosts 16] [--seconds 500] [--links 150,300,600,1200] [--workers 1..8]

Run as root on Linux with pyroute2 installed, each process is a host of its own: a network namespace behind a token bucket. Without
either, processes meet on loopback and servers pace their transfers themselves, which the column `shaping` says. Runs that are in OUT.csv
already are not repeated; steps of runs with one or two workers go to OUT.profiles.jsonl beside it.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench.throughput.jobs import JOBS
from paceline.errors import PacelineError
from paceline.train.asynchronous import server
from paceline.train.asynchronous.wire import Rendezvous, serve_store

COLUMNS = ("model", "parameters", "batch", "mode", "link_Mbps", "servers", "workers", "steps_per_s", "samples_per_s", "compute_s", "staleness",
           "stalenesses", "steps", "seconds", "shaping")
#: profiles are taken from runs with at most this many workers
PROFILED = 2
_RUN = "measure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measurement."""

    model: str
    mode: str
    link_Mbps: float
    servers: int
    workers: int

    @property
    def key(self) -> tuple[str, ...]:
        return (self.model, self.mode, f"{self.link_Mbps:g}", str(self.servers), str(self.workers))

    @property
    def hosts(self) -> int:
        return self.servers + self.workers

    def seconds(self, megabytes: float) -> float:
        """How long to measure: ten cycles or so, five at least, by a rough idea of a cycle."""
        transfer, compute = 8 * megabytes / self.link_Mbps, JOBS[self.model].compute_s
        if self.mode == "sync":
            cycle = compute + 2 * transfer * max(1.0, self.workers / self.servers)
        else:
            cycle = max(compute + 2 * transfer, transfer * self.workers / self.servers)
        return max(min(max(10 * cycle, 0.9), 2.4), 5 * cycle) * (1.5 if self.workers <= PROFILED else 1.0)


def grid(links: list[float], workers: list[int]) -> list[Run]:
    """All runs: profiles first, then those that need most hosts."""
    out = [Run(model=model, mode=mode, link_Mbps=link, servers=servers, workers=count)
           for model, mode, link, servers, count in itertools.product(JOBS, ("async", "sync"), links, (1, 2), workers)]
    random.Random(7).shuffle(out)
    return sorted(out, key=lambda run: (run.workers > PROFILED, -run.hosts))


def megabytes() -> dict[str, float]:
    return {name: sum(p.numel() for p in job.build().parameters()) * 4e-6 for name, job in JOBS.items()}


class Conductor:
    """Gives parts to agents that are free, and writes down what they report; runs on host 0."""

    def __init__(self, place: Rendezvous, agents: list[int], out: Path, shaping: str) -> None:
        self._place, self._store, self._out, self._shaping = place, place.store(), out, shaping
        self._free, self._next = set(agents), dict.fromkeys(agents, 0)
        self._running: list[tuple[Run, list[int], list[int], str]] = []
        self._count = itertools.count()
        self._sizes = megabytes()

    def conduct(self, runs: list[Run], until: float) -> int:
        """Runs that did not fit in the time."""
        waiting = list(runs)
        while waiting or self._running:
            late = time.time() > until
            fits = None if late else next((run for run in waiting if run.hosts <= len(self._free)), None)
            if fits is not None:
                waiting.remove(fits)
                self._start(fits)
                continue
            if late and not self._running:
                break
            self._collect()
            time.sleep(0.004)
        for rank in self._next:
            self._give(rank, {"role": "end"})
        return len(waiting)

    def _give(self, rank: int, part: dict[str, Any]) -> None:
        self._store.set(f"part/{rank}/{self._next[rank]}", json.dumps(part))
        self._next[rank] += 1

    def _start(self, run: Run) -> None:
        taken = [self._free.pop() for _ in range(run.hosts)]
        workers, servers, name = taken[: run.workers], taken[run.workers :], f"{_RUN}{run.link_Mbps:g}-{next(self._count)}"
        pace = {} if self._shaping == "tbf" else {"pace_Bps": run.link_Mbps * 1e6 / 8}
        for number, rank in enumerate(servers):
            self._give(rank, {"role": "server", "run": name, "number": number})
        for number, rank in enumerate(workers):
            self._give(rank, {"role": "worker", "run": name, "number": number, "model": run.model, "mode": run.mode, "workers": run.workers,
                              "servers": run.servers, "seconds": run.seconds(self._sizes[run.model]), **pace})
        self._running.append((run, workers, servers, name))

    def _collect(self) -> None:
        for entry in list(self._running):
            run, workers, servers, name = entry
            keys = {rank: f"result/{rank}/{self._next[rank] - 1}" for rank in (*workers, *servers)}
            if not self._store.check([keys[rank] for rank in workers]):
                continue
            inside = Rendezvous(host=self._place.host, port=self._place.port, run=name)
            server.stop(inside.store())
            results = [json.loads(self._store.get(keys[rank])) for rank in workers]
            for rank in servers:
                self._store.get(keys[rank])
            self._free.update(workers, servers)
            self._running.remove(entry)
            self._write(run, results)

    def _write(self, run: Run, results: list[dict[str, Any]]) -> None:
        failed = [result["error"] for result in results if "error" in result]
        if failed:
            print(f"failed: {run}: {failed[0]}", flush=True)
            return
        row = summary(run, results, self._shaping)
        with self._out.open("a", newline="") as f:
            csv.DictWriter(f, COLUMNS).writerow(row)
        if run.workers <= PROFILED:
            names = ("at_s", "compute_s", "round_s", "up_s", "update_s", "down_s", "waited_s", "staleness")
            first = min(result["steps"][0][0] for result in results)
            steps = [[{**dict(zip(names, step, strict=True)), "at_s": round(step[0] - first, 6)} for step in result["steps"]] for result in results]
            with profiles(self._out).open("a") as f:
                head = {"model": run.model, "mode": run.mode, "link_Mbps": run.link_Mbps, "servers": run.servers, "workers": run.workers}
                f.write(json.dumps({**head, "parameters": results[0]["parameters"], "steps": steps}) + "\n")


def profiles(out: Path) -> Path:
    """Where the steps of small runs go."""
    return out.with_suffix(".profiles.jsonl")


def summary(run: Run, results: list[dict[str, Any]], shaping: str) -> dict[str, Any]:
    """Steps per second of all workers, while all of them were running and warm."""
    from paceline.bench.throughput.agent import WARM_UP

    start = max(result["steps"][WARM_UP - 1][0] for result in results)
    end = min(result["steps"][-1][0] for result in results)
    rate, steps, compute, stale = 0.0, 0, [], []
    for result in results:
        inside = [step for step in result["steps"] if start - 1e-9 <= step[0] <= end + 1e-9]
        if len(inside) > 1:
            rate += (len(inside) - 1) / (inside[-1][0] - inside[0][0])
        steps += len(inside)
        compute += [step[1] for step in inside]
        stale += [step[7] for step in inside]
    job = JOBS[run.model]
    mean = sum(compute) / max(1, len(compute))
    return {"model": run.model, "parameters": results[0]["parameters"], "batch": job.batch, "mode": run.mode, "link_Mbps": f"{run.link_Mbps:g}",
            "servers": run.servers, "workers": run.workers, "steps_per_s": f"{rate:.4f}", "samples_per_s": f"{rate * job.batch:.2f}",
            "compute_s": f"{mean:.5f}", "staleness": f"{sum(stale) / max(1, len(stale)):.3f}", "steps": steps, "seconds": f"{end - start:.3f}",
            "shaping": shaping, "stalenesses": " ".join(f"{value}:{count}" for value, count in sorted(Counter(stale).items()))}


def done(out: Path) -> set[tuple[str, ...]]:
    """Runs that the file has already."""
    if not out.exists():
        return set()
    with out.open() as f:
        return {tuple(row[name] for name in ("model", "mode", "link_Mbps", "servers", "workers")) for row in csv.DictReader(f)}


def _rank_main(out: Path, link: float, workers: list[int], until: float, shaping: str) -> None:
    """One rank of a launch: the conductor, or an agent."""
    rank, size, address = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    if rank:
        from paceline.bench.throughput.agent import serve_parts

        serve_parts(Rendezvous(host=address, port=port), rank)
        return
    kept = serve_store(address, port)
    known = done(out)
    runs = [run for run in grid([link], workers) if run.key not in known and run.hosts < size]
    left = Conductor(Rendezvous(host=address, port=port), list(range(1, size)), out, shaping).conduct(runs, until)
    print(f"link {link:g} Mbit/s: {len(runs) - left} runs, {left} left", flush=True)
    time.sleep(1.0)
    del kept


def _commands(arguments: argparse.Namespace, links: list[float], end: float) -> Iterator[tuple[float, list[str]]]:
    for i, link in enumerate(links):
        # time that one link leaves over is the next one's
        share = (end - time.time()) * (1 / (len(links) - i)) * (1.6 if i < len(links) - 1 else 1.0)
        yield link, [sys.executable, "-m", "paceline.bench.throughput.measure", str(arguments.out), "--rank-of", f"{link:g}",
                     "--workers", arguments.workers, "--until", str(time.time() + min(share, end - time.time()))]


def _on_loopback(command: list[str], hosts: int) -> None:
    variables = {"WORLD_SIZE": str(hosts), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29455", "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([*command, "--shaping", "pacing"], env={**os.environ, **variables, "RANK": str(rank)}) for rank in range(hosts)]
    for process in ranks:
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--hosts", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--links", default="150,300,600,1200")
    parser.add_argument("--workers", default="1..8")
    parser.add_argument("--loopback", action="store_true")
    parser.add_argument("--rank-of", type=float)
    parser.add_argument("--until", type=float)
    parser.add_argument("--shaping", default="tbf")
    arguments = parser.parse_args()
    low, _, high = arguments.workers.partition("..")
    counts = list(range(int(low), int(high or low) + 1))
    if arguments.rank_of is not None:
        _rank_main(arguments.out, arguments.rank_of, counts, arguments.until, arguments.shaping)
        return
    if not arguments.out.exists():
        arguments.out.write_text(",".join(COLUMNS) + "\n")
    end = time.time() + arguments.seconds
    for link, command in _commands(arguments, [float(link) for link in arguments.links.split(",")], end):
        try:
            if arguments.loopback:
                raise PacelineError("asked for loopback")
            from paceline.bench.emulate import EmulatedCluster

            with EmulatedCluster(hosts=arguments.hosts, link_Bps=link * 1e6 / 8) as cluster:
                print(*cluster.launch(command, timeout_s=end - time.time() + 60)[:1], sep="")
        except (PacelineError, OSError, ImportError) as error:
            print(f"no emulated cluster ({error}); servers pace themselves", flush=True)
            _on_loopback(command, arguments.hosts)


if __name__ == "__main__":
    main()
