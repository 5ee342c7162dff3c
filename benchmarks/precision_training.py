"""Check the advice of `paceline analyze --precision` by training: share of gradients lost in fp16, and what
training in each format ends with.

    python benchmarks/precision_training.py --out rows.jsonl
    python benchmarks/precision_training.py --show measurements/precision_training_cpu.jsonl

Of each task and seed, a float32 run is recorded (`paceline.train.Ranges`), and at its first, middle and last
step the same weights and samples go through fp16 without a loss scale, emulated and by torch.autocast:
gradients that are zero there and not in float32 are lost. Then the task is trained from the same start in
each format, with the loss scale that the analysis of the record advises and without.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.cost.format_losses import vanishing_gradients
from paceline.spec.number_formats import FP16
from paceline.spec.value_ranges import RangeRecord, TensorKind
from paceline.train import Ranges, Scaler
from paceline.train.emulated_formats import Emulated, EmulatedFormats
from paceline.train.precision import autocast
from paceline.train.tasks import get
from paceline.train.tasks.course import batches
from paceline.whatif.precision import precision

#: arm -> format of both passes, and whether the advised loss scale is used; None: torch.autocast
ARMS: dict[str, tuple[EmulatedFormats | None, bool]] = {
    "fp32": (EmulatedFormats(), False),
    "fp16": (EmulatedFormats(forward="fp16", backward="fp16"), False),
    "fp16, scaled": (EmulatedFormats(forward="fp16", backward="fp16"), True),
    "autocast fp16": (None, False),
    "autocast fp16, scaled": (None, True),
    "bf16": (EmulatedFormats(forward="bf16", backward="bf16"), False),
    "fp8 per tensor": (EmulatedFormats(forward="fp8-e4m3/tensor", backward="fp8-e5m2/tensor"), False),
    "mxfp8": (EmulatedFormats(forward="mxfp8-e4m3", backward="mxfp8-e4m3"), False),
    "mxint8": (EmulatedFormats(forward="mxint8", backward="mxint8"), False),
    "flex16": (EmulatedFormats(forward="flex16", backward="flex16"), False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exercise:
    """What is trained, with which loss and optimizer, and the figure that arms are compared by."""

    model: Callable[[], nn.Module]
    train: tuple[Tensor, Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    score: Callable[[nn.Module], float]
    figure: str
    batch: int
    steps: int


def classifier() -> Exercise:
    """The task digits-deep, for a third of its epochs."""
    task = get("digits-deep")

    def accuracy(net: nn.Module) -> float:
        with torch.no_grad():
            return float((net(task.test[0]).argmax(1) == task.test[1]).float().mean())

    return Exercise(
        model=task.model,
        train=task.train,
        loss=F.cross_entropy,
        optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=task.lr, momentum=task.momentum),
        score=accuracy,
        figure="test accuracy",
        batch=task.batch,
        steps=220,
    )


def autoencoder() -> Exercise:
    """Digits as images of 32 x 32 through 16 numbers; the loss is the mean over all pixels of a batch."""
    task = get("digits-deep")

    def large(images: Tensor) -> Tensor:
        return F.interpolate(images, size=(32, 32), mode="bilinear").flatten(1)

    train, test = large(task.train[0]), large(task.test[0])

    def network() -> nn.Module:
        widths = (1024, 128, 64, 16, 64, 128, 1024)
        layers = [nn.Linear(1024, widths[1])]
        for before, after in pairwise(widths[1:]):
            layers += [nn.Sigmoid(), nn.Linear(before, after)]
        return nn.Sequential(*layers)

    def error(net: nn.Module) -> float:
        with torch.no_grad():
            return float(F.mse_loss(net(test), test))

    return Exercise(
        model=network,
        train=(train, train),
        loss=F.mse_loss,
        optimizer=lambda net: torch.optim.Adam(net.parameters(), lr=3e-3),
        score=error,
        figure="test error",
        batch=256,
        steps=400,
    )


EXERCISES = {"digits-deep": classifier, "autoencoder": autoencoder}


def samples(exercise: Exercise, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of a run."""
    task = get("digits-deep")
    for indices in batches(task, [exercise.batch] * exercise.steps, seed):
        yield exercise.train[0][indices], exercise.train[1][indices]


def recorded(exercise: Exercise, seed: int, every: int) -> tuple[RangeRecord, float, list[dict[str, Any]]]:
    """A float32 run: its record, its figure, and shares of gradients that fp16 loses at three steps."""
    torch.manual_seed(seed)
    net = exercise.model()
    optimizer = exercise.optimizer(net)
    lost = []
    with Ranges(net, optimizer, every=every) as ranges:
        for step, (x, y) in enumerate(samples(exercise, seed)):
            if step in (0, exercise.steps // 2, exercise.steps - 1):
                lost.append({"step": step, **gradients_lost(exercise, net, x, y)})
            optimizer.zero_grad()
            exercise.loss(net(x), y).backward()
            optimizer.step()
    return ranges.result(), exercise.score(net), lost


def gradients_lost(exercise: Exercise, net: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Shares of gradients that fp16 loses in one step: predicted from float32, emulated, and by torch."""
    plain = one_step(exercise, net, x, y, lambda module: module)
    emulated = one_step(exercise, net, x, y, lambda module: Emulated(module, FP16_BOTH))
    real = one_step(exercise, net, x, y, lambda module: autocast(module, "fp16"))
    vanishing = vanishing_gradients(plain.ranges, FP16)
    found = {}
    for kind in (TensorKind.ACTIVATION_GRADIENTS, TensorKind.WEIGHT_GRADIENTS):
        there = sum(each.total for each in plain.of(kind=kind))
        name = str(kind).replace(" ", "_")
        found[f"{name}_predicted"] = sum(count for key, count in vanishing.items() if key[1] == kind) / there
        for how, record in (("emulated", emulated), ("autocast", real)):
            left = sum(each.total for each in record.of(kind=kind))
            found[f"{name}_{how}"] = 1 - left / there
    return found


FP16_BOTH = EmulatedFormats(forward="fp16", backward="fp16")


def one_step(
    exercise: Exercise, net: nn.Module, x: Tensor, y: Tensor, run: Callable[[nn.Module], nn.Module]
) -> RangeRecord:
    """Ranges of one step of a copy."""
    twin = copy.deepcopy(net)
    for module in twin.modules():  # the copy has the hooks of the original
        module._forward_hooks.clear()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.0)
    with Ranges(twin, optimizer) as ranges:  # before what rounds, so that it sees rounded gradients
        exercise.loss(run(twin)(x).float(), y).backward()
        optimizer.step()
    return ranges.result()


def trained(exercise: Exercise, seed: int, formats: EmulatedFormats | None, scale: float) -> dict[str, Any]:
    """A run in some format: its figure, and how many steps were skipped for an overflow."""
    torch.manual_seed(seed)
    net = exercise.model()
    optimizer = exercise.optimizer(net)
    running = autocast(net, "fp16") if formats is None else Emulated(net, formats)
    scaler = Scaler(scale, growth=10**9)
    for x, y in samples(exercise, seed):
        optimizer.zero_grad()
        scaler.scale(exercise.loss(running(x).float(), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    return {"figure": exercise.score(running), "skipped": scaler.skipped}


def measure(names: Sequence[str], arms: Sequence[str], seeds: int) -> Iterator[dict[str, Any]]:
    """Rows of all tasks, seeds and arms."""
    for name in names:
        exercise = EXERCISES[name]()
        for seed in range(seeds):
            record, figure, lost = recorded(exercise, seed, every=20)
            analysis = precision(record)
            window = analysis.window("fp16")
            head = {"task": name, "seed": seed, "figure_of": exercise.figure}
            yield {
                **head,
                "recorded": figure,
                "advised": window.advised,
                "window": window.tolerant,
                "lost_plain": window.lost_plain,
                "lost_advised": window.lost_advised,
                "steps": lost,
            }
            for arm in arms:
                formats, scaled = ARMS[arm]
                scale = 2.0**window.advised if scaled else 1.0
                yield {**head, "arm": arm, **trained(exercise, seed, formats, scale)}


def show(path: Path) -> None:
    """Tables of docs/precision.md."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for task in dict.fromkeys(row["task"] for row in rows if "task" in row):
        mine = [row for row in rows if row.get("task") == task]
        _show_lost(task, list({row["seed"]: row for row in mine if "steps" in row}.values()))
        _show_arms(task, [row for row in mine if "arm" in row])


def _show_lost(task: str, rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n{task}: advised scales 2^{sorted(row['advised'] for row in rows)}\n")
    print("| step | gradients of | predicted | emulated fp16 | autocast fp16 |\n|---:|---|---:|---:|---:|")
    for place, step in enumerate(row["step"] for row in rows[0]["steps"]):
        for kind in ("activation_gradients", "weight_gradients"):
            shares = [
                statistics.mean(100 * row["steps"][place][f"{kind}_{how}"] for row in rows)
                for how in ("predicted", "emulated", "autocast")
            ]
            cells = " | ".join(f"{share:.2f} %" for share in shares)
            print(f"| {step} | {kind.removesuffix('_gradients')}s | {cells} |")


def _show_arms(task: str, rows: Sequence[dict[str, Any]]) -> None:
    fp32 = {row["seed"]: row["figure"] for row in rows if row["arm"] == "fp32"}
    print(f"\n{task}, {rows[0]['figure_of']}\n")
    head = ("format", "seeds", "mean", "mean difference to fp32", "from", "to", "steps skipped")
    print(f"| {' | '.join(head)} |\n|---|{'---:|' * (len(head) - 1)}")
    for arm in dict.fromkeys(row["arm"] for row in rows):
        mine = [row for row in rows if row["arm"] == arm]
        mean = statistics.mean(row["figure"] for row in mine)
        differences = [row["figure"] - fp32[row["seed"]] for row in mine]
        ends = (statistics.mean(differences), min(differences), max(differences))
        skipped = sum(row["skipped"] for row in mine)
        cells = " | ".join(f"{value:+.4f}" for value in ends)
        print(f"| {arm} | {len(mine)} | {mean:.4f} | {cells} | {skipped} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=list(EXERCISES), choices=EXERCISES)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", type=Path)
    options = parser.parse_args()
    if options.show is not None:
        show(options.show)
        return
    torch.set_num_threads(1)
    about = {"torch": torch.__version__, "machine": platform.machine()}
    with options.out.open("a", encoding="utf-8") as file:
        for row in measure(options.tasks, options.arms, options.seeds):
            print(row, flush=True)
            file.write(json.dumps({**row, **about}) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
