"""Train a few models on this machine for real, and set the median step beside the prediction.

    paceline calibrate --output this-machine.toml
    python benchmarks/this_machine.py this-machine.toml

Several devices may be named, such as the file and the catalog's entry of the same GPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import nn

import paceline as pl
from paceline.catalog.models.gpt import gpt

#: seconds to spend on each model, about, after a first step that is not counted
BUDGET_S = 6.0
TARGET = "cuda" if torch.cuda.is_available() else "cpu"
#: a GPU takes larger batches
TIMES = 16 if TARGET == "cuda" else 1
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
}


def cases() -> Iterator[tuple[str, int, str, bool, tuple[Any, ...]]]:
    """Name, batch, optimizer, channels last, and (module, inputs, loss) of each model."""
    for width, batch in ((256, 32), (2048, 128 * TIMES)):
        yield (
            f"mlp of 4 x {width}",
            batch,
            "adamw",
            False,
            (_mlp(width), (torch.randn(batch, width),), lambda y: y.square().mean()),
        )
    for name in ("resnet18", "mobilenet_v2", "lstm-650"):
        entry = pl.models.get(name)
        yield (
            name,
            8 * TIMES,
            entry.optimizer,
            entry.family == "cnn",
            pl.models.build(entry, batch=8 * TIMES, device=TARGET),
        )
    yield (
        "gpt2 of 4 layers, 256 tokens",
        2 * TIMES,
        "adamw",
        False,
        gpt(batch=2 * TIMES, seq=256, width=768, depth=4, heads=12, context=1024, p=0.1),
    )


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())))


def _scores(y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(y, torch.zeros(y.shape[0], dtype=torch.int64, device=y.device))


def measure(built: tuple[Any, ...], optimizer: str, channels_last: bool) -> float:
    """Median seconds of a training step."""
    module, inputs, loss = built
    if channels_last:
        module = module.to(memory_format=torch.channels_last)
        inputs = tuple(x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x for x in inputs)
    update = OPTIMIZERS[optimizer](module.parameters())
    samples: list[float] = []
    begin = time.perf_counter()
    while len(samples) < 4 or (time.perf_counter() - begin < BUDGET_S and len(samples) < 300):
        start = time.perf_counter()
        update.zero_grad()
        (loss or _scores)(module(*inputs)).backward()
        update.step()
        if TARGET == "cuda":
            torch.cuda.synchronize()
        samples.append(time.perf_counter() - start)
    return median(samples[1:])


def main(*names: str) -> None:
    """Print a line for each model and device."""
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = False, True
    devices = [pl.devices.get(name) for name in names]
    print(
        f"{'model':<30} {'batch':>5} {'measured ms':>12} {'predicted ms':>13} {'error':>8}  90 % interval,"
        " device"
    )
    with torch.device(TARGET):
        for name, batch, optimizer, channels_last, built in cases():
            measured = measure(built, optimizer, channels_last)
            with torch.device("cpu"):
                workload = pl.capture(built, batch=batch, optimizer=optimizer, channels_last=channels_last)
            for device in devices:
                p = pl.predict(workload, device)
                inside = "inside" if p.step_s_low <= measured <= p.step_s_high else "outside"
                times = (
                    f"{1e3 * measured:>12.4g} {1e3 * p.step_s:>13.4g}"
                    f" {100 * (p.step_s / measured - 1):>+7.0f}%"
                )
                print(f"{name:<30} {batch:>5} {times}  {inside}, {device.name}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
