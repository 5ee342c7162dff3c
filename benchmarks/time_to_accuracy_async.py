"""Time to accuracy of synchronous and asynchronous training: a real task, several seeds, one slow worker.

    python benchmarks/time_to_accuracy_async.py [--seeds 5] [--workers 4] [--slow 0.02] [--parallel 1] [--json FILE]

Each run trains digits-cnn on real processes until worker 0 measures the target accuracy on held-out images, or gives up after
`--limit` steps. The last worker sleeps `--slow` seconds in every step. Learning rates were chosen per strategy on seed 100, not among
those reported (`--tune`). Prints the table of docs/asynchronous.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

#: strategy -> learning rate, momentum, options
SETTINGS: dict[str, tuple[float, float, dict[str, Any]]] = {
    "ps-sync": (0.05, 0.9, {}),
    "ps-async": (0.02, 0.7, {}),
    "ps-async, staleness-aware": (0.05, 0.7, {"staleness_aware": True}),
    "ps-bounded": (0.02, 0.7, {"staleness": 2}),
    "ps-backup": (0.05, 0.9, {"backups": 1}),
    "easgd": (0.05, 0.9, {"period": 4}),
    "easgd-sync": (0.05, 0.9, {"period": 4}),
    "hogwild": (0.05, 0.0, {}),
    "gossip": (0.05, 0.9, {"period": 1}),
}
RATES = (0.02, 0.05, 0.1)
EVERY = 10  # steps of worker 0 between measurements of accuracy
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


def worker(arguments: argparse.Namespace) -> None:
    """One worker of one run; worker 0 prints what it found."""
    import torch
    from torch.nn.functional import cross_entropy

    from paceline.train import tasks
    from paceline.train.asynchronous import strategies
    from paceline.train.asynchronous.wrap import rendezvous

    torch.set_num_threads(1)
    number, count = int(os.environ["PACELINE_WORKER"]), int(os.environ["PACELINE_WORKERS"])
    task = tasks.get("digits-cnn")
    torch.manual_seed(arguments.seed)
    model = task.model()
    plain = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=arguments.momentum)
    strategy = arguments.strategy.partition(",")[0]
    model, optimizer = strategies()[strategy](model, plain, **json.loads(arguments.options))
    store = rendezvous().store()
    store.add("begun", 1)
    while int(store.add("begun", 0)) < count:
        time.sleep(0.002)
    source = torch.Generator().manual_seed(1000 * arguments.seed + number)
    x, y = (part[number::count] for part in task.train)
    start, measuring, stale = time.perf_counter(), 0.0, []
    for step in range(1, arguments.limit + 1):
        pick = torch.randint(len(y), (task.batch // count,), generator=source)
        if number == count - 1:
            time.sleep(arguments.slow)
        optimizer.zero_grad()
        cross_entropy(model(x[pick]), y[pick]).backward()
        optimizer.step()
        if optimizer.last is not None:
            stale.append(optimizer.last.staleness)
        if step % EVERY == 0:
            if number == 0:
                begun = time.perf_counter()
                with torch.no_grad():
                    accuracy = (model(task.test[0]).argmax(1) == task.test[1]).float().mean().item()
                measuring += time.perf_counter() - begun
                if accuracy >= task.target:
                    store.set("reached", "1")
            if store.check(["reached"]):
                break
    if number == 0:
        found = {"seconds": time.perf_counter() - start - measuring, "steps": step, "accuracy": accuracy, "reached": accuracy >= task.target,
                 "staleness": statistics.mean(stale) if stale else 0.0}
        print("FOUND " + json.dumps(found), flush=True)
        store.set("reached", "1")
    optimizer.close()


def run(strategy: str, seed: int, lr: float, momentum: float, options: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """One run: its own launcher, in a process of its own."""
    command = [sys.executable, __file__, "--launch", "--strategy", strategy, "--seed", str(seed), "--lr", str(lr), "--momentum", str(momentum),
               "--options", json.dumps(options), "--workers", str(arguments.workers), "--slow", str(arguments.slow), "--limit", str(arguments.limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    if not lines:
        print(f"{strategy}, seed {seed} failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}", file=sys.stderr)
        return {"strategy": strategy, "seed": seed, "reached": False, "failed": True}
    return {"strategy": strategy, "seed": seed, "lr": lr, "momentum": momentum, **json.loads(lines[0][6:])}


def launch(arguments: argparse.Namespace) -> None:
    from paceline.train.asynchronous.launch import Local

    command = [sys.executable, __file__, "--worker", *sys.argv[2:]]
    with tempfile.TemporaryDirectory() as folder, Local(workers=arguments.workers, servers=1, checkpoint=Path(folder)) as local:
        local.start(command)
        local.wait(timeout_s=280, lost=0)


def interval(values: list[float]) -> str:
    """Mean and the half width of its 95 % interval."""
    if len(values) < 2:
        return f"{values[0]:.2f}" if values else "-"
    half = T95.get(len(values), 2.0) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):.2f} ± {half:.2f}"


def table(found: list[dict[str, Any]]) -> str:
    lines = ["| strategy | learning rate, momentum | seconds to 97 % | steps of worker 0 | staleness | reached |", "|---|---|---|---|---|---|"]
    for strategy, (lr, momentum, _) in SETTINGS.items():
        rows = [row for row in found if row["strategy"] == strategy]
        good = [row for row in rows if row["reached"]]
        if rows:
            stale = f"{statistics.mean(row['staleness'] for row in good):.1f}" if good else "-"
            seconds, steps = (interval([row[name] for row in good]) for name in ("seconds", "steps"))
            lines.append(f"| {strategy} | {rows[0].get('lr', lr):g}, {momentum:g} | {seconds} | {steps} | {stale} | {len(good)} of {len(rows)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--slow", type=float, default=0.02)
    parser.add_argument("--limit", type=int, default=1500)
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time; each needs workers + 1 cores")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--settings", type=Path, help="learning rates by strategy, written with --tune, read without")
    parser.add_argument("--tune", action="store_true", help="try learning rates on seed 100")
    for name in ("--launch", "--worker"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    for name, kind in (("--strategy", str), ("--seed", int), ("--lr", float), ("--momentum", float), ("--options", str)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker or arguments.launch:
        (worker if arguments.worker else launch)(arguments)
        return
    if arguments.tune:
        jobs = [(name, 100, lr, momentum, options) for lr in RATES for name, (_, momentum, options) in SETTINGS.items()]
    else:
        best = json.loads(arguments.settings.read_text()) if arguments.settings and arguments.settings.exists() else {}
        jobs = [(name, seed, best.get(name, lr), momentum, options) for seed in range(arguments.seeds)
                for name, (lr, momentum, options) in SETTINGS.items()]
    with ThreadPoolExecutor(arguments.parallel) as pool:
        found = list(pool.map(lambda job: run(*job, arguments), jobs))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    if arguments.tune:
        ranked = sorted(found, key=lambda row: (not row["reached"], row.get("seconds", math.inf)))
        for row in ranked:
            print(row)
        if arguments.settings:
            arguments.settings.write_text(json.dumps({name: next(r["lr"] for r in ranked if r["strategy"] == name and "lr" in r) for name in SETTINGS}))
    else:
        print(table(found))


if __name__ == "__main__":
    main()
