"""Figures of docs/training.md, measured here: python benchmarks/training.py [--only steps,accuracy,faults] [--quick]

steps       seconds per step under each strategy on emulated links, predicted and measured (needs root on Linux, and pyroute2)
accuracy    mean accuracy over seeds of each strategy on both tasks
large       LARS and SGD at a large batch
faults      a rank killed with -9 at random moments: the final loss against that of a run that was left alone

Writes the tables between the markers of docs/training.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import re
import signal
import statistics
import tempfile
import time
from pathlib import Path

DOC = Path(__file__).parents[1] / "docs" / "training.md"
PARTS = ("steps", "accuracy", "large", "faults")


def steps(quick: bool) -> str:
    from paceline.bench.strategies import STRATEGIES, compare

    lines = ["| model | hosts | link | strategy | measured | predicted | of ddp | sent per step |", "|---|---|---|---|---|---|---|---|"]
    errors, places = [], []
    for model, hosts, links in (("vgg-like", 2, (12.5e6, 125e6, None)), ("cnn", 2, (12.5e6, 125e6, None)), ("cnn", 4, (125e6,)))[: 1 if quick else 3]:
        for link in links[: 1 if quick else 3]:
            found = compare(model=model, hosts=[hosts], links_Bps=[link], strategies=STRATEGIES, steps=3 if link == 12.5e6 else 5, rounds=2)
            base = next(row.step_s for row in found.rows if row.strategy == "ddp")
            for row in found.rows:
                name = "unshaped" if link is None else f"{link * 8e-6:g} Mbit/s"
                note = f" ({row.note})" if row.note else ""
                lines.append(f"| {model} | {hosts} | {name} | {row.strategy}{note} | {row.step_s * 1e3:.1f} ms | {row.predicted_s * 1e3:.1f} ms "
                             f"| {row.step_s / base:.3f} | {row.sent_bytes / 1e6:.2f} MB |")
            errors += [abs(row.predicted_s / row.step_s - 1) for row in found.rows]
            places.append(_agreement(found.rows))
    lines.append(f"\nMean error of the prediction {statistics.fmean(errors):.0%} over {len(errors)} rows; "
                 f"{statistics.fmean(places):.0%} of the pairs more than 10 % apart are in the right order.")
    return "\n".join(lines)


def _agreement(rows) -> float:
    """Share of pairs of strategies, more than 10 % apart, that the prediction puts in the right order."""
    pairs = [(a, b) for i, a in enumerate(rows) for b in rows[i + 1 :] if abs(a.step_s - b.step_s) > 0.1 * max(a.step_s, b.step_s)]
    return statistics.fmean((a.step_s < b.step_s) == (a.predicted_s < b.predicted_s) for a, b in pairs) if pairs else 1.0


def accuracy(quick: bool) -> str:
    from paceline.train.tasks.compare import compare

    seeds = 2 if quick else 5
    lines = ["| task | strategy | accuracy, mean of seeds | 95 % interval | against ddp |", "|---|---|---|---|---|"]
    for task, warm in (("digits-cnn", 66), ("text-mlp", 180)):
        names = ["ddp", "overlap", "terngrad", "terngrad:clip=4", "terngrad:clip=0", f"dgc:ratio=0.01;warmup_steps={warm}", "topk:ratio=0.01"]
        found = compare(task, names, seeds=seeds, steps=100 if quick else None)
        base = found.rows[0].accuracy
        lines += [f"| {task} | {row.strategy} | {row.accuracy:.2%} | ± {row.interval:.2%} | {(row.accuracy - base) * 100:+.2f} points |"
                  for row in found.rows]
    return "\n".join(lines)


def large(quick: bool) -> str:
    from paceline.train.tasks.compare import compare

    lines = ["| optimizer | batch | learning rate | accuracy |", "|---|---|---|---|"]
    for optimizer, batch, lr in (("sgd", 64, 0.05), ("sgd", 718, 0.56), ("lars", 718, 2.0)):
        found = compare("digits-cnn", ["overlap"], seeds=2 if quick else 3, batch=batch, lr=lr, optimizer=optimizer, warmup=4 if batch > 64 else 0,
                        steps=None if batch == 64 else 24)
        lines.append(f"| {optimizer} | {batch} | {lr:g} | {found.rows[0].accuracy:.2%} ± {found.rows[0].interval:.2%} |")
    return "\n".join(lines)


def faults(quick: bool) -> str:
    from paceline.train.launch import elastic

    def run(folder: Path, kills: int, seed: int) -> tuple[str, float]:
        chance = random.Random(seed)
        arguments = ["--task", "digits-cnn", "--strategy", "terngrad", "--steps", "80", "--checkpoint", str(folder), "--every", "10",
                     "--timeout-s", "20", "--record", str(folder / "record")]
        record = folder / "record" / "record.jsonl"
        began = time.perf_counter()
        with tempfile.TemporaryFile() as output:
            process = elastic("paceline.train.tasks.loop", arguments, world=2, restarts=kills, output=output)
            for kill in range(kills):
                while process.poll() is None and (not record.exists() or record.read_text().count('"kind": "run"') <= kill):
                    time.sleep(0.05)
                time.sleep(chance.random())
                ranks = [int(e.name) for e in Path("/proc").iterdir() if e.name.isdigit() and _parent(e) == process.pid]
                if ranks:
                    os.kill(chance.choice(ranks), signal.SIGKILL)
            process.wait()
            output.seek(0)
            return re.findall(r"loss (\S+) from", output.read().decode())[-1], time.perf_counter() - began

    with tempfile.TemporaryDirectory() as folder:
        whole, seconds = run(Path(folder, "whole"), 0, 0)
        rounds = 1 if quick else 5
        results = [run(Path(folder, str(i)), 4, i) for i in range(rounds)]
    same = sum(loss == whole for loss, _ in results)
    return (f"A rank killed 4 times in each of {rounds} runs of 80 steps with a checkpoint every 10: {same} of {rounds} end with the very "
            f"loss of the run that was left alone ({whole}); {statistics.fmean(s for _, s in results):.0f} s against {seconds:.0f} s.")


def _parent(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--print", action="store_true", help="print, and leave the document as it is")
    chosen = parser.parse_args()
    for part in chosen.only.split(","):
        text = {"steps": steps, "accuracy": accuracy, "large": large, "faults": faults}[part](chosen.quick)
        text += f"\n\n{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}."
        print(text, flush=True)
        if not chosen.print:
            document = DOC.read_text()
            begin, end = f"<!-- {part} -->", f"<!-- end {part} -->"
            head, _, rest = document.partition(begin)
            _, _, tail = rest.partition(end)
            DOC.write_text(f"{head}{begin}\n\n{text}\n\n{end}{tail}")


if __name__ == "__main__":
    main()
