"""Time to accuracy of synchronous and asynchronous training: a real task, several seeds, one slow worker.

    python benchmarks/time_to_accuracy_async.py [--seeds 5] [--workers 4] [--slow 0.02] [--tune]
        [--json FILE] [--print]

Each run trains digits-cnn on real processes until worker 0 measures the target accuracy on held-out images,
or gives up after `--limit` seconds. The last worker sleeps `--slow` seconds in every step. With `--tune` the
learning rate of each strategy is chosen first, on a seed that is not among those reported; otherwise it is
the one below. As many runs go side by side as there are cores for their processes. Writes the table of
docs/asynchronous.md; `--from FILE` writes it from runs of an earlier `--json`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from document import DOCS, fill

#: strategy -> learning rate, momentum, options
SETTINGS: dict[str, tuple[float, float, dict[str, Any]]] = {
    "ps-sync": (0.1, 0.9, {}),
    "ps-async": (0.05, 0.7, {}),
    "ps-async, staleness-aware": (0.05, 0.7, {"staleness_aware": True}),
    "ps-bounded": (0.05, 0.7, {"staleness": 2}),
    "ps-backup": (0.05, 0.9, {"backups": 1}),
    "easgd": (0.1, 0.9, {"period": 4}),
    "easgd-sync": (0.1, 0.9, {"period": 4}),
    "hogwild": (0.1, 0.0, {}),
    "gossip": (0.1, 0.9, {"period": 1}),
}
RATES = (0.02, 0.05, 0.1)
EVERY = 10  # steps of worker 0 between measurements of accuracy
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


def worker(arguments: argparse.Namespace) -> None:
    """One worker of all runs of a lane, one after another; worker 0 writes down what it found."""
    import torch

    from paceline.train import tasks
    from paceline.train.asynchronous.store import Rendezvous

    torch.set_num_threads(1)
    task = tasks.get("digits-cnn")
    session = Rendezvous.parse(os.environ["PACELINE_RENDEZVOUS"])
    for number, job in enumerate(json.loads(arguments.jobs.read_text()), 1):  # as the strategies count runs
        found = train(task, job, arguments, replace(session, number=number).store())
        if arguments.number == 0:
            with arguments.json.open("a") as f:
                f.write(json.dumps({**job, **found}) + "\n")


def train(task: Any, job: dict[str, Any], arguments: argparse.Namespace, store: Any) -> dict[str, Any]:
    """One run, until worker 0 measures the target accuracy."""
    import torch
    from torch.nn.functional import cross_entropy

    from paceline.train.asynchronous import server, strategies

    number, count, strategy = arguments.number, arguments.workers, job["strategy"].partition(",")[0]
    torch.manual_seed(job["seed"])
    model = task.model()
    plain = torch.optim.SGD(model.parameters(), lr=job["lr"], momentum=job["momentum"])
    model, optimizer = strategies()[strategy](model, plain, workers=count, **SETTINGS[job["strategy"]][2])
    store.add("begun", 1)
    while store.add("begun", 0) < count:
        time.sleep(0.002)
    source = torch.Generator().manual_seed(1000 * job["seed"] + number)
    x, y = (part[number::count] for part in task.train)
    start, measuring, accuracy, stale = time.perf_counter(), 0.0, 0.0, []
    for step in itertools.count(1):
        pick = torch.randint(len(y), (task.batch // count,), generator=source)
        if number == count - 1:
            time.sleep(arguments.slow)
        optimizer.zero_grad()
        cross_entropy(model(x[pick]), y[pick]).backward()
        optimizer.step()
        if optimizer.last is not None:
            stale.append(optimizer.last.staleness)
        if number == 0 and step % EVERY == 0:
            begun = time.perf_counter()
            with torch.no_grad():
                accuracy = (model(task.test[0]).argmax(1) == task.test[1]).float().mean().item()
            measuring += time.perf_counter() - begun
            if accuracy >= task.target or time.perf_counter() - start > arguments.limit:
                break
        if number and step % 5 == 0 and store.check(["reached"]):
            break
    taken = time.perf_counter() - start - measuring
    if number == 0:
        store.set("reached", "1")
    optimizer.close()
    store.add("ended", 1)
    while store.add("ended", 0) < count:
        time.sleep(0.002)
    if number == 0:
        server.stop(store)
    return {
        "seconds": taken,
        "steps": step,
        "accuracy": accuracy,
        "reached": accuracy >= task.target,
        "staleness": statistics.mean(stale) if stale else 0.0,
    }


def serve(arguments: argparse.Namespace) -> None:
    """The parameter server of all runs that have one."""
    import torch

    from paceline.train.asynchronous import server
    from paceline.train.asynchronous.store import Rendezvous

    torch.set_num_threads(1)
    session = Rendezvous.parse(os.environ["PACELINE_RENDEZVOUS"])
    for number, job in enumerate(json.loads(arguments.jobs.read_text()), 1):
        if not job["strategy"].startswith(("hogwild", "gossip")):
            server.run(replace(session, number=number, timeout_s=600.0), 0)


def run(jobs: list[dict[str, Any]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All runs, in lanes side by side; each lane is one set of processes, so that no run pays for starting
    Python.
    """
    cores = sorted(os.sched_getaffinity(0))
    size = arguments.workers + 1
    lanes = max(1, len(cores) // size)
    jobs = random.Random(0).sample(jobs, len(jobs))
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        outs = [Path(folder) / f"found{lane}.jsonl" for lane in range(lanes)]
        for lane, out in enumerate(outs):
            out.touch()
            own = [cores[(lane * size + i) % len(cores)] for i in range(size)] if len(cores) >= size else []
            processes += stack.enter_context(_lane(jobs[lane::lanes], out, own, arguments))
        found: list[dict[str, Any]] = []
        while len(found) < len(jobs):
            time.sleep(0.5)
            if any(process.poll() for process in processes):
                raise SystemExit("a worker or server failed")
            rows = [
                json.loads(line)
                for out in outs
                for line in out.read_text().splitlines(keepends=True)
                if line.endswith("\n")
            ]
            if arguments.json and len(rows) > len(found):
                _append(arguments.json, [row for row in rows if row not in found])
            found = rows
        return found


def _append(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("a") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)


@contextlib.contextmanager
def _lane(
    jobs: list[dict[str, Any]], out: Path, cores: list[int], arguments: argparse.Namespace
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Workers and a server for some of the runs, one core each where there are enough."""
    from paceline.train.asynchronous.store import Rendezvous, secret, serve_store

    store, todo = serve_store(), out.with_suffix(".jobs")
    session = Rendezvous(host="127.0.0.1", port=store.port, run=secret())
    todo.write_text(json.dumps(jobs))
    common = [
        "--jobs",
        str(todo),
        "--json",
        str(out),
        "--workers",
        str(arguments.workers),
        "--slow",
        str(arguments.slow),
        "--limit",
        str(arguments.limit),
    ]
    roles = [["--serve"], *(["--worker", "--number", str(number)] for number in range(arguments.workers))]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PACELINE_RENDEZVOUS": str(session)}
    processes = []
    for i, role in enumerate(roles):
        core = ["--core", str(cores[i])] if cores else []
        processes.append(subprocess.Popen([sys.executable, __file__, *role, *common, *core], env=variables))
    try:
        yield processes
    finally:
        for process in processes[1:]:  # workers end by themselves, and remove what they share
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=3.0)
        for process in processes:
            process.kill()
            process.wait()
        del store


def tuned(arguments: argparse.Namespace) -> dict[str, float]:
    """For each strategy the learning rate that reached the target soonest in the tuning."""
    found = run(work([100], dict.fromkeys(SETTINGS, RATES)), arguments)
    best = {}
    for name in SETTINGS:
        rows = {
            rate: [row for row in found if (row["strategy"], row["lr"]) == (name, rate)] for rate in RATES
        }
        *_, best[name] = min(
            (-sum(row["reached"] for row in tried), statistics.mean(row["seconds"] for row in tried), rate)
            for rate, tried in rows.items()
        )
    return best


def work(seeds: Iterable[int], rates: Mapping[str, Iterable[float]]) -> list[dict[str, Any]]:
    """Runs of all strategies, seed by seed."""
    return [
        {"strategy": name, "seed": seed, "lr": rate, "momentum": momentum}
        for seed in seeds
        for name, (_, momentum, _) in SETTINGS.items()
        for rate in rates[name]
    ]


def interval(values: list[float]) -> str:
    """Mean and the half width of its 95 % interval."""
    if len(values) < 2:
        return f"{values[0]:.2f}" if values else "-"
    half = T95.get(len(values), 2.0) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):.2f} ± {half:.2f}"


def table(found: list[dict[str, Any]]) -> str:
    lines = [
        "| strategy | learning rate, momentum | seconds to 97 % | steps of worker 0 | staleness | reached |",
        "|---|---|---|---|---|---|",
    ]
    for strategy, (lr, momentum, _) in SETTINGS.items():
        rows = [row for row in found if row["strategy"] == strategy]
        good = [row for row in rows if row["reached"]]
        if rows:
            stale = f"{statistics.mean(row['staleness'] for row in good):.1f}" if good else "-"
            seconds, steps = (interval([row[name] for row in good]) for name in ("seconds", "steps"))
            lines.append(
                f"| {strategy} | {rows[0].get('lr', lr):g}, {momentum:g} | {seconds} | {steps} | {stale} |"
                f" {len(good)} of {len(rows)} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--slow", type=float, default=0.02)
    parser.add_argument("--limit", type=float, default=20.0, help="seconds after which a run gives up")
    parser.add_argument("--json", type=Path, help="also write each run as a line of JSON")
    parser.add_argument("--tune", action="store_true", help="choose learning rates first, on other seeds")
    parser.add_argument("--from", dest="earlier", type=Path, help="runs that --json wrote earlier")
    parser.add_argument("--print", action="store_true", help="print, and leave the document as it is")
    for name in ("--serve", "--worker"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    for name, kind in (("--jobs", Path), ("--number", int), ("--core", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker or arguments.serve:
        if arguments.core is not None:
            os.sched_setaffinity(0, {arguments.core})
        (worker if arguments.worker else serve)(arguments)
        return
    if arguments.earlier:
        found = [json.loads(line) for line in arguments.earlier.read_text().splitlines()]
    else:
        rates = tuned(arguments) if arguments.tune else {name: lr for name, (lr, _, _) in SETTINGS.items()}
        found = run(work(range(arguments.seeds), {name: [rate] for name, rate in rates.items()}), arguments)
    text = table([row for row in found if row["seed"] < 100])
    print(text)
    if not arguments.print:
        fill(DOCS / "asynchronous.md", "time to accuracy", text)


if __name__ == "__main__":
    main()
