"""Gives parts of runs to agents that are free, and writes down what they report."""

from __future__ import annotations

import csv
import itertools
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.bench.throughput.agent import FIELDS, WARM_UP
from paceline.bench.throughput.dataset import KEY
from paceline.bench.throughput.jobs import JOBS
from paceline.bench.throughput.runs import PROFILED, ThroughputRun
from paceline.train.asynchronous import server
from paceline.train.asynchronous.store import PrefixStore, Rendezvous, Store

COLUMNS = (
    *KEY,
    "parameters",
    "batch",
    "steps_per_s",
    "samples_per_s",
    "compute_s",
    "staleness",
    "stalenesses",
    "steps",
    "seconds",
    "shaping",
    "machine",
)
_POLL_S = 0.002
#: runs that may overtake others which need more hosts: runs of one curve stay close in time, since a
#: machine's pace drifts
_WINDOW = 24
#: a run that computed this much faster or slower than the middle one of its curve was disturbed
_ODD = 0.08


class Conductor:
    """Runs side by side on as many hosts as there are; `prepare` sets the links of hosts before a run."""

    def __init__(
        self,
        store: Store,
        place: Rendezvous,
        agents: Iterable[int],
        out: Path,
        *,
        shaping: str,
        machine: str,
        prepare: Callable[[float, Sequence[int]], None] | None = None,
        tries: int = 1,
    ) -> None:
        self._all, self._place = store, place
        self._store = PrefixStore(place.prefix, store)
        self._out, self._shaping, self._machine, self._prepare, self._tries = (
            out,
            shaping,
            machine,
            prepare,
            tries,
        )
        self._compute_s = done(out)
        self._next = dict.fromkeys(agents, 0)
        self._free = set(self._next)
        self._links: dict[int, float] = {}
        self._running: list[tuple[ThroughputRun, list[int], list[int], str]] = []
        self._count = itertools.count()

    def wait_for_agents(self, timeout_s: float = 120.0) -> None:
        """Until every agent is there, or those that are have to do."""
        deadline = time.monotonic() + timeout_s
        while not self._store.check([f"here/{rank}" for rank in self._next]) and time.monotonic() < deadline:
            time.sleep(0.02)
        here = {rank for rank in self._next if self._store.check([f"here/{rank}"])}
        self._next = {rank: 0 for rank in self._next if rank in here}
        self._free = set(self._next)

    def conduct(self, runs: Sequence[ThroughputRun], until: float) -> list[ThroughputRun]:
        """Runs that did not fit in the time, or on the hosts. One that failed is taken once more; one that
        computed at another pace than the rest of its curve, up to `tries` times in all, whatever its
        throughput: the last line in the file counts."""
        waiting = [run for run in runs if run.hosts <= len(self._next)]
        left = [run for run in runs if run.hosts > len(self._next)]
        failures, taken = Counter[ThroughputRun](), Counter[ThroughputRun]()
        while waiting or self._running:
            late = time.time() > until
            fits = (
                None
                if late
                else next((run for run in waiting[:_WINDOW] if run.hosts <= len(self._free)), None)
            )
            if fits is not None:
                waiting.remove(fits)
                self._start(fits)
                continue
            if late and not self._running:
                break
            for run, worked in self._collect():
                if not worked:
                    failures[run] += 1
                    (left if failures[run] > 1 else waiting).append(run)
                    continue
                taken[run] += 1
                curve = [one for one in runs if one.curve == run.curve]
                if not any(one in curve for one in (*waiting, *(entry[0] for entry in self._running))):
                    waiting[:0] = [one for one in self._odd(curve) if taken[one] < self._tries]
            time.sleep(_POLL_S)
        return left + waiting

    def _odd(self, curve: Sequence[ThroughputRun]) -> list[ThroughputRun]:
        """Runs of a curve that were disturbed; a slow worker makes the pace depend on their number."""
        paces = {
            run: self._compute_s[run.key] for run in curve if run.key in self._compute_s and run.slow == 1
        }
        if len(paces) <= PROFILED:
            return []
        middle = statistics.median(paces.values())
        return [run for run, pace in paces.items() if abs(pace / middle - 1) > _ODD]

    def dismiss(self) -> None:
        """Agents end."""
        for rank in self._next:
            self._give(rank, {"role": "end"})

    def _give(self, rank: int, part: dict[str, Any]) -> None:
        self._store.set(f"part/{rank}/{self._next[rank]}", json.dumps(part))
        self._next[rank] += 1

    def _take(self, run: ThroughputRun) -> list[int]:
        """Hosts for a run; those whose links have its rate already come first."""
        taken = sorted(self._free, key=lambda rank: (self._links.get(rank) != run.link_Mbps, rank))[
            : run.hosts
        ]
        self._free.difference_update(taken)
        changed = [rank for rank in taken if self._links.get(rank) != run.link_Mbps]
        if self._prepare is not None and changed:
            self._prepare(run.link_Mbps, changed)
        self._links.update(dict.fromkeys(taken, run.link_Mbps))
        return taken

    def _start(self, run: ThroughputRun) -> None:
        taken, name = self._take(run), f"{self._place.run}-{next(self._count)}"
        workers, servers = taken[: run.workers], taken[run.workers :]
        pace = {} if self._prepare is not None else {"pace_Bps": run.link_Mbps * 1e6 / 8}
        for number, rank in enumerate(servers):
            self._give(rank, {"role": "server", "run": name, "number": number})
        for number, rank in enumerate(workers):
            last = number == run.workers - 1
            self._give(
                rank,
                {
                    "role": "worker",
                    "run": name,
                    "number": number,
                    "model": run.model,
                    "mode": run.mode,
                    "workers": run.workers,
                    "servers": run.servers,
                    "seconds": run.seconds(),
                    "slow": run.slow if last else 1.0,
                    "overlap": run.overlap,
                    **pace,
                },
            )
        self._running.append((run, workers, servers, name))

    def _collect(self) -> Iterator[tuple[ThroughputRun, bool]]:
        """Writes down the runs that have ended; whether each worked."""
        for entry in list(self._running):
            run, workers, servers, name = entry
            keys = {rank: f"result/{rank}/{self._next[rank] - 1}" for rank in (*workers, *servers)}
            if not self._store.check([keys[rank] for rank in workers]):
                continue
            server.stop(PrefixStore(replace(self._place, run=name).prefix, self._all))
            if not self._store.check([keys[rank] for rank in servers]):
                continue
            results = [json.loads(self._store.get(keys[rank])) for rank in workers]
            self._free.update(workers, servers)
            self._running.remove(entry)
            errors = [result["error"] for result in results if "error" in result]
            row = {} if errors else summary(run, results, self._shaping, self._machine)
            if errors or not row["steps"]:
                print(
                    f"failed: {run}: {errors[0] if errors else 'no time in which all workers ran'}",
                    flush=True,
                )
            else:
                self._write(run, row, results)
            yield run, not errors and bool(row["steps"])

    def _write(
        self, run: ThroughputRun, row: Mapping[str, Any], results: Sequence[Mapping[str, Any]]
    ) -> None:
        with self._out.open("a", newline="") as f:
            csv.DictWriter(f, COLUMNS).writerow(row)
        self._compute_s[run.key] = float(row["compute_s"])
        if run.workers <= PROFILED:
            with profiles(self._out).open("a") as f:
                f.write(json.dumps(_steps(run, results, self._machine)) + "\n")


def _steps(run: ThroughputRun, results: Sequence[Mapping[str, Any]], machine: str) -> dict[str, Any]:
    """All steps of a small run, times from its first step on."""
    first = min(result["steps"][0][0] for result in results)
    steps = [
        [
            {**dict(zip(FIELDS, step, strict=True)), "at_s": round(step[0] - first, 6)}
            for step in result["steps"]
        ]
        for result in results
    ]
    return {
        "model": run.model,
        "mode": run.mode,
        "link_Mbps": run.link_Mbps,
        "servers": run.servers,
        "workers": run.workers,
        "slow": run.slow,
        "overlap": int(run.overlap),
        "machine": machine,
        "parameters": results[0]["parameters"],
        "steps": steps,
    }


def profiles(out: Path) -> Path:
    """Where the steps of small runs go."""
    return out.with_suffix(".profiles.jsonl")


def summary(
    run: ThroughputRun, results: Sequence[Mapping[str, Any]], shaping: str, machine: str
) -> dict[str, Any]:
    """Steps per second of all workers, while all of them were running and warm."""
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
    return {
        **dict(zip(KEY, run.key, strict=True)),
        "parameters": results[0]["parameters"],
        "batch": job.batch,
        "steps_per_s": f"{rate:.4f}",
        "samples_per_s": f"{rate * job.batch:.2f}",
        "compute_s": f"{mean:.5f}",
        "staleness": f"{sum(stale) / max(1, len(stale)):.3f}",
        "steps": steps,
        "seconds": f"{end - start:.3f}",
        "shaping": shaping,
        "machine": machine,
        "stalenesses": " ".join(f"{value}:{count}" for value, count in sorted(Counter(stale).items())),
    }


def done(out: Path) -> dict[tuple[str, ...], float]:
    """Runs that the file has already, and seconds of compute of each."""
    if not out.exists():
        return {}
    with out.open() as f:
        return {tuple(row[name] for name in KEY): float(row["compute_s"]) for row in csv.DictReader(f)}
