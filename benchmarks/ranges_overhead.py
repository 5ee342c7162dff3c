"""Time that `paceline.train.Ranges` adds to a step: one that is counted, and one that is not.

    python benchmarks/ranges_overhead.py --out rows.jsonl

Steps without hooks, with hooks that do not look, and with hooks that do take turns; medians of the processor
time of one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.catalog.models.cnn import resnet
from paceline.catalog.models.gpt import gpt
from paceline.train import Ranges
from paceline.train.tasks import get

#: never within a benchmark
_NEVER = 10**9
ARMS = {"plain": 0, "hooked": _NEVER, "counted": 1}


def cases() -> dict[str, tuple[nn.Module, Callable[[nn.Module], Tensor]]]:
    """Networks with a function that runs them to their loss."""
    task = get("digits-deep")
    images, labels = task.train[0][:64], task.train[1][:64]

    def classes(net: nn.Module) -> Tensor:
        return nn.functional.cross_entropy(net(images), labels)

    found = {"digits-deep, batch 64": (task.model(), classes)}
    for name, built in (
        ("resnet-18, batch 8, 64 x 64", resnet(batch=8, image=64, layers=(2, 2, 2, 2), bottleneck=False)),
        ("gpt, width 256, 4 layers, batch 4", gpt(batch=4, seq=128, width=256, depth=4, heads=4, vocab=8192)),
    ):
        module, inputs, loss = built
        found[name] = (module, _forward(inputs, loss))
    return found


def _forward(inputs: tuple[Tensor, ...], loss: Any) -> Callable[[nn.Module], Tensor]:
    def run(net: nn.Module) -> Tensor:
        output = net(*inputs)
        if loss is not None:
            return loss(output)
        return nn.functional.cross_entropy(output, torch.zeros(len(output), dtype=torch.int64))

    return run


def measure(net: nn.Module, forward: Callable[[nn.Module], Tensor], rounds: int) -> dict[str, float]:
    """Median seconds of a step, by arm."""
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for _ in range(rounds):
        for arm, every in ARMS.items():
            ranges = Ranges(net, optimizer, every=every) if every else None
            if every == _NEVER:
                _step(net, forward, optimizer)  # the first step is counted
            seconds[arm].append(_step(net, forward, optimizer))
            if ranges is not None:
                ranges.close()
    return {f"{arm}_s": statistics.median(found) for arm, found in seconds.items()}


def _step(net: nn.Module, forward: Callable[[nn.Module], Tensor], optimizer: torch.optim.Optimizer) -> float:
    start = time.process_time()
    optimizer.zero_grad()
    forward(net).backward()
    optimizer.step()
    return time.process_time() - start


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with options.out.open("w", encoding="utf-8") as file:
        for name, (net, forward) in cases().items():
            found = measure(net, forward, options.rounds)
            counted = found["counted_s"] / found["plain_s"] - 1
            row = {"model": name, **found, "overhead_every_200": counted / 200}
            print(row, flush=True)
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
