"""Whole training runs behind docs/training.md: parts recipe, accuracy, large, faults and hangs of
benchmarks/training.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import Namespace

    from paceline.train.tasks.compare import Runs

#: settings are chosen with these seeds, and reported with others
TUNING, REPORTED = (100, 101), (0, 1, 2, 3, 4)
#: settings that were tried, with all-reduce in float32; what is left out is the task's
RECIPES: dict[str, list[dict]] = {
    "digits-cnn": [{"lr": lr} for lr in (0.02, 0.05, 0.1)],
    "digits-deep": [{"lr": lr} for lr in (0.02, 0.05, 0.1)],
    "text-mlp": [
        {"lr": 0.1, "epochs": 16, "weight_decay": 5e-4},
        *({"lr": 0.1, "weight_decay": decay} for decay in (5e-4, 1e-3, 1.5e-3, 2e-3)),
        *({"lr": lr} for lr in (0.2, 0.4)),
    ],
}


def recipe(options: Namespace) -> str:
    from paceline.train.tasks import get

    lines = [
        "| task | learning rate | batch | epochs | weight decay | accuracy, float32, tuning seeds | |",
        f"|{'---|' * 7}",
    ]
    for task in options.tasks.split(","):
        chosen = get(task)
        own = {
            "lr": chosen.lr,
            "batch": chosen.batch,
            "epochs": chosen.epochs,
            "weight_decay": chosen.weight_decay,
        }
        tried = [{**own, **one} for one in RECIPES[task]]
        settings = [
            {key: one[key] for key in ("lr", "batch", "weight_decay")}
            | {"steps": 40 if options.quick else one["epochs"] * len(chosen.train[1]) // one["batch"]}
            for one in tried
        ]
        rows = _rows(task, settings, TUNING, options)
        lines += [
            f"| {task} | {one['lr']:g} | {one['batch']} | {one['epochs']} | {one['weight_decay']:g} |"
            f" {row.accuracy:.2%} | {'taken' if one == own else ''} |"
            for one, row in zip(tried, rows, strict=True)
        ]
        print("\n".join(lines[-len(tried) :]), flush=True)
    return "\n".join(lines)


def accuracy(options: Namespace) -> str:
    from paceline.train.tasks import get
    from paceline.train.tasks.compare import gathered

    lines = [
        (
            "| task | strategy | seeds | accuracy, mean | 95 % interval | against ddp, seed by seed, 95 %"
            " interval | training loss against ddp | |"
        ),
        f"|{'---|' * 8}",
    ]
    for task in options.tasks.split(","):
        chosen = get(task)
        steps = 40 if options.quick else chosen.epochs * len(chosen.train[1]) // chosen.batch
        dgc = f"dgc:ratio=0.01,warmup_steps={steps // 10}"
        # what is special about each; of what it is an ablation
        arms = {
            "ddp": ("", ""),
            "terngrad": ("", ""),
            "terngrad:clip=0": ("without clipping", "terngrad"),
            dgc: ("", ""),
            f"{dgc},masking=false": ("without factor masking", dgc),
            f"{dgc},momentum=0": ("without momentum correction", dgc),
            f"dgc:ratio=0.001,min_elements=50000,warmup_steps={steps // 10}": (
                "the largest layer; the others in float32",
                "",
            ),
        }
        seeds = REPORTED[: 2 if options.quick else 5]
        found = dict(
            zip(
                arms,
                _by_seed(task, [{"strategy": name, "steps": steps} for name in arms], seeds, options),
                strict=True,
            )
        )
        before = len(lines)
        for name, (note, whole) in arms.items():
            compared = (name, "ddp", whole or "ddp")
            common = [seed for seed in seeds if all(seed in found[one] for one in compared)]
            if len(common) < 2:  # of `--known`
                continue
            row, base, parent = (gathered(one, [found[one][seed] for seed in common]) for one in compared)
            against = ("", "") if name == "ddp" else _apart(row, base)
            if whole:
                note += "; against the whole: {}, loss {}".format(*_apart(row, parent))
            lines.append(
                f"| {task} | {name} | {len(row.accuracies)} | {row.accuracy:.2%} | ± {row.interval:.2%} |"
                f" {' | '.join(against)} | {note} |"
            )
        print("\n".join(lines[before:]), flush=True)
    return "\n".join(lines)


def _apart(row: Runs, other: Runs) -> tuple[str, str]:
    """How far one strategy is from another, seed by seed: in accuracy, and in the loss at the end."""
    (points, half), (loss, width) = row.against(other), row.against(other, "losses")
    return f"{points * 100:+.2f} ± {half * 100:.2f} points", f"{loss:+.4f} ± {width:.4f}"


def large(options: Namespace) -> str:
    """Every learning rate that was tried, of both."""
    settings = [
        {"optimizer": "sgd", "batch": 64, "lr": 0.05, "steps": 674},
        *(
            {"optimizer": "sgd", "batch": 718, "lr": lr, "steps": 60, "warmup": 10}
            for lr in (0.1, 0.2, 0.3, 0.4, 0.5, 0.8)
        ),
        *(
            {"optimizer": "lars", "batch": 718, "lr": lr, "steps": 60, "warmup": 10}
            for lr in (0.25, 0.5, 1.0, 1.5, 2.0)
        ),
    ]
    strategy = "ddp" if options.alone else "overlap"
    rows = _rows(
        "digits-deep",
        [{"strategy": strategy, **one} for one in settings],
        REPORTED[: 2 if options.quick else 5],
        options,
    )
    lines = [
        (
            "| optimizer | batch | steps | learning rate | accuracy, mean of seeds | 95 % interval | worst |"
            " best |"
        ),
        f"|{'---|' * 8}",
    ]
    lines += [
        f"| {one['optimizer']} | {one['batch']} | {one['steps']} | {one['lr']:g} | {row.accuracy:.2%} | ±"
        f" {row.interval:.2%} | {min(row.accuracies):.2%} | {max(row.accuracies):.2%} |"
        for one, row in zip(settings, rows, strict=True)
    ]
    return "\n".join(lines)


def _rows(task: str, settings: list[dict], seeds: tuple[int, ...], options: Namespace) -> list:
    """A row for each setting: runs with all seeds."""
    from paceline.train.tasks.compare import gathered

    return [
        gathered(one.get("strategy", "ddp"), list(results.values()))
        for one, results in zip(settings, _by_seed(task, settings, seeds, options), strict=True)
    ]


def _by_seed(
    task: str, settings: list[dict], seeds: tuple[int, ...], options: Namespace
) -> list[dict[int, dict]]:
    """Results by seed, of each setting; runs that `--raw` holds are not done again, and with `--known` the
    others are left out.
    """
    from paceline.train.tasks.compare import side_by_side

    runs = [{"task": task, "seed": seed, "strategy": "ddp", **one} for seed in seeds for one in settings]
    known = (
        {_key(line): line for line in map(json.loads, options.raw.read_text().splitlines())}
        if options.raw and options.raw.exists()
        else {}
    )
    missing = [] if options.known else [one for one in runs if _key(one) not in known]
    raw = str(options.raw.resolve()) if options.raw else None
    for one, result in zip(
        missing, side_by_side(missing, world=2, jobs=options.jobs, alone=options.alone, raw=raw), strict=True
    ):
        known[_key(one)] = result
    return [
        {one["seed"]: known[_key(one)] for one in runs[i :: len(settings)] if _key(one) in known}
        for i in range(len(settings))
    ]


def _key(run: dict) -> tuple:
    """What names a run."""
    return tuple(
        run.get(name)
        for name in (
            "task",
            "seed",
            "strategy",
            "steps",
            "batch",
            "lr",
            "optimizer",
            "weight_decay",
            "warmup",
        )
    )


_STEPS, _EVERY, _KILLS = 600, 10, 5
#: small pieces, of which those of the convolutions are lazy: with the usual ones the network is one piece;
#: checkpoints fall into the interval
_LAZY = "lazy:least_bytes=10000,adapt=false"


def faults(options: Namespace) -> str:
    """A rank killed at random moments; the loss and all parameters at the end against those of a run that was
    left alone.
    """
    strategies = (
        ("terngrad",)
        if options.quick
        else ("allreduce", "terngrad", "dgc:ratio=0.01", "overlap", "priority", _LAZY)
    )
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max(1, options.jobs // 2)) as pool:

        def both(strategy: str) -> tuple[Ended, Ended]:
            return _run(Path(folder, strategy), strategy), _run(
                Path(folder, f"{strategy}-killed"), strategy, Path(folder, strategy)
            )

        found = list(pool.map(both, strategies))
    lines = [
        (
            "| strategy | killed | final loss | undisturbed | loss and parameters equal | steps repeated |"
            " seconds | undisturbed |"
        ),
        f"|{'---|' * 8}",
    ]
    for strategy, (alone, cut) in zip(strategies, found, strict=True):
        same = "yes" if (cut.loss, cut.parameters) == (alone.loss, alone.parameters) else "NO"
        lines.append(
            f"| {strategy} | {cut.kills} times | {cut.loss} | {alone.loss} | {same} | {cut.again} |"
            f" {cut.seconds:.0f} | {alone.seconds:.0f} |"
        )
    return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a run ended: its loss in all digits, a digest of its parameters, seconds, how often a rank was
    killed, steps that were done again.
    """

    loss: str
    parameters: str
    seconds: float
    kills: int
    again: int


def _run(folder: Path, strategy: str, alone: Path | None = None) -> Ended:
    """A run that is left alone, or, given the folder of that one, killed at random steps all over it.

    It begins with the other's first checkpoint: what a strategy chooses in its first step depends on the link
    and the device as measured then.
    """
    from paceline.train.launch import elastic

    chance = random.Random(strategy)
    moments = sorted(chance.sample(range(_EVERY + 5, _STEPS - 5), _KILLS)) if alone is not None else []
    if alone is not None:
        shutil.copytree(alone / f"step-{_EVERY:09d}", folder / f"step-{_EVERY:09d}")
    arguments = [
        "--task",
        "digits-cnn",
        "--strategy",
        strategy,
        "--steps",
        str(_STEPS),
        "--checkpoint",
        str(folder),
        "--every",
        str(_EVERY),
        "--keep",
        "2" if alone is not None else str(_STEPS),
        "--timeout-s",
        "20",
        "--record",
        str(folder / "record"),
    ]
    record = folder / "record" / "record.jsonl"
    began, done = time.perf_counter(), 0
    with tempfile.TemporaryFile() as output:
        process = elastic(
            "paceline.train.tasks.loop", arguments, world=2, restarts=len(moments), output=output
        )
        for moment in moments:
            while process.poll() is None and _reached(record) < moment:
                time.sleep(0.01)
            ranks = [
                int(e.name) for e in Path("/proc").iterdir() if e.name.isdigit() and _parent(e) == process.pid
            ]
            if ranks:
                os.kill(chance.choice(ranks), signal.SIGKILL)
                done += 1
        process.wait()
        output.seek(0)
        text = output.read().decode()
    steps = [
        line["step"] for line in map(json.loads, record.read_text().splitlines()) if line["kind"] == "step"
    ]
    losses = re.findall(r"loss (\S+) from", text)
    return Ended(
        loss=losses[-1] if losses else f"none: {text.strip()[-200:]}",
        parameters=_parameters(folder),
        seconds=time.perf_counter() - began,
        kills=done,
        again=len(steps) - len(set(steps)),
    )


def _parameters(folder: Path) -> str:
    """A digest of the model in the last checkpoint of a run."""
    import torch

    last = folder / f"step-{_STEPS:09d}" / "model.pt"
    if not last.exists():
        return "none"
    model = torch.load(last, weights_only=True)["model"]
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.values())).hexdigest()


def _reached(record: Path) -> int:
    """The last step of a record that the run which writes it has done."""
    lines = record.read_text().splitlines() if record.exists() else []
    try:
        return int(json.loads(lines[-1]).get("step", 0))
    except (IndexError, json.JSONDecodeError):  # nothing yet, or half a line
        return 0


def _parent(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
