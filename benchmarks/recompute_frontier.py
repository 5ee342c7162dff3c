"""Run recomputation policies and set measured peak memory and step time beside the prediction.

    paceline calibrate --output this-machine.toml
    python benchmarks/recompute_frontier.py --spec this-machine.toml --out rows.jsonl
    python benchmarks/recompute_frontier.py --device cuda --spec h200 --out rows.jsonl
    python benchmarks/recompute_frontier.py --show measurements/recompute_frontier_cpu.jsonl

Peak memory on a CPU is the largest sum of what torch's allocator reports during a step to its profiler, and
what is there before; on a GPU it is `torch.cuda.max_memory_allocated`. Policies of a model share its
parameters and take turns, so that a slow minute is slow for all; times are medians over the rounds of
processor time of one thread on a CPU (other programs do not count), of wall-clock time on a GPU. Gradients of
every policy are compared with those of the plain step, bit by bit.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from paceline.catalog import devices
from paceline.catalog.models.cnn import resnet
from paceline.catalog.models.gpt import gpt
from paceline.spec.memory_frontier import FrontierPoint, MemoryFrontier
from paceline.train import recompute
from paceline.whatif.memory_frontier import memory_frontier

#: of the plain and of the policies' steps: as torch runs them with TF32 off, or for convolutions and products
#: on, or under autocast
PRECISIONS = ("fp32", "tf32", "amp_bf16")

#: points of a frontier that are run, beside the plain step and those with names
OPTIMAL = 5


class _Level(nn.Module):
    """Two convolutions of one resolution of a U-Net."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.body(x))


class UNet(nn.Module):
    """U-Net (Ronneberger et al. 2015) with padded convolutions and batch norms."""

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(depth)]
        inputs = [3, *widths[:-1]]
        self.down = nn.ModuleList(_Level(i, o) for i, o in zip(inputs, widths, strict=True))
        self.pool = nn.ModuleList(nn.MaxPool2d(2) for _ in widths[1:])
        deep = list(reversed(widths))
        pairs = list(pairwise(deep))
        self.up = nn.ModuleList(nn.ConvTranspose2d(i, o, 2, stride=2) for i, o in pairs)
        self.merge = nn.ModuleList(_Level(2 * o, o) for _, o in pairs)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level, pool in zip(self.down, [*self.pool, None], strict=True):
            x = level(x)
            if pool is not None:
                skips.append(x)
                x = pool(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model with its sizes on a CPU and on a GPU."""

    name: str
    build: Callable[..., tuple[nn.Module, tuple[Tensor, ...], Callable[[Any], Tensor]]]
    cpu: dict[str, int]
    cuda: dict[str, int]
    channels_last: bool = False


def _images(batch: int, image: int) -> tuple[Tensor]:
    return (torch.randn(batch, 3, image, image),)


def _first_class(scores: Tensor) -> Tensor:
    """The loss of images that are all of the first class."""
    return nn.functional.cross_entropy(
        scores, torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
    )


def _resnet50(batch: int, image: int) -> tuple[nn.Module, tuple[Tensor, ...], Callable[[Any], Tensor]]:
    return resnet(batch=batch, image=image)[0], _images(batch, image), _first_class


def _unet(
    batch: int, image: int, width: int
) -> tuple[nn.Module, tuple[Tensor, ...], Callable[[Any], Tensor]]:
    return UNet(width, 4, 4), _images(batch, image), lambda y: y.square().mean()


CASES = {
    case.name: case
    for case in (
        Case(
            name="resnet50",
            build=_resnet50,
            cpu={"batch": 16, "image": 128},
            cuda={"batch": 64, "image": 224},
            channels_last=True,
        ),
        Case(
            name="gpt",
            build=gpt,
            cpu={"batch": 4, "seq": 256, "width": 256, "depth": 8, "heads": 4, "vocab": 2048},
            cuda={"batch": 8, "seq": 1024, "width": 768, "depth": 12, "heads": 12},
        ),
        Case(
            name="unet",
            build=_unet,
            cpu={"batch": 4, "image": 128, "width": 32},
            cuda={"batch": 16, "image": 256, "width": 64},
            channels_last=True,
        ),
    )
}


# -- measuring -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Runner:
    """One policy on a copy of the model that shares its parameters."""

    point: FrontierPoint
    model: nn.Module
    inputs: tuple[Tensor, ...]
    loss: Callable[[Any], Tensor]
    optimizer: torch.optim.Optimizer
    autocast: Callable[[], AbstractContextManager[None]]
    seconds: list[float]

    def passes(self) -> None:
        with self.autocast():
            loss = self.loss(self.model(*self.inputs))
        loss.backward()

    def step(self) -> None:
        self.passes()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def timed(self, cuda: bool) -> None:
        """One step, added to the times."""
        clock = time.perf_counter if cuda else time.process_time
        _finish(cuda)
        start = clock()
        self.step()
        _finish(cuda)
        self.seconds.append(clock() - start)


def _finish(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()


def runners(
    case: Case, sizes: dict[str, int], points: Sequence[FrontierPoint], device: str, precision: str
) -> list[Runner]:
    """A runner for each point, with the same parameters."""
    torch.manual_seed(0)
    with torch.device(device):
        model, inputs, loss = case.build(**sizes)
    if case.channels_last:
        model = model.to(memory_format=torch.channels_last)
        inputs = tuple(x.to(memory_format=torch.channels_last) for x in inputs)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, foreach=False)
    autocast = partial(torch.autocast, device, torch.bfloat16, enabled=precision == "amp_bf16")
    shared = {id(tensor): tensor for tensor in model.parameters()}
    found = []
    for point in points:
        mine = copy.deepcopy(model, dict(shared))
        if point.policy:
            recompute(mine, point.policy)
        found.append(Runner(point, mine, inputs, loss, optimizer, autocast, []))
    return found


def peak_bytes(runner: Runner, cuda: bool) -> int:
    """The most bytes that are live during a step."""
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        runner.step()
        return torch.cuda.max_memory_allocated()
    there = [*runner.model.parameters(), *runner.model.buffers(), *runner.inputs]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        runner.step()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most + sum(tensor.numel() * tensor.element_size() for tensor in there)


def gradients(runner: Runner) -> list[Tensor]:
    """Gradients of one pair of passes from the same state, and what they leave in buffers of batch norms."""
    torch.manual_seed(1)
    runner.passes()
    found = [p.grad.clone() for p in runner.model.parameters() if p.grad is not None]
    runner.optimizer.zero_grad(set_to_none=True)
    return found + [buffer.clone() for buffer in runner.model.buffers()]


def same_bits(running: Sequence[Runner]) -> list[bool]:
    """Whether the gradients of each are those of the first, where algorithms leave no order to chance."""
    torch.backends.cudnn.deterministic = True
    # each copy has buffers of its own, which have run as often as those of the others
    results = [gradients(runner) for runner in running]
    torch.backends.cudnn.deterministic = False
    return [all(map(torch.equal, results[0], result)) for result in results]


def chosen(frontier: MemoryFrontier) -> list[FrontierPoint]:
    """The plain step, points with names, and some optimal ones."""
    optimal = [p for p in frontier.points if p.name.startswith("optimal")]
    step = max(1, -(-len(optimal) // OPTIMAL))
    picked = optimal[::-1][::step]
    names = ("keep all", "every block", "square root", "offload 50 %", "offload 100 %")
    named = [p for p in frontier.points if p.name in names]
    selective = [p for p in frontier.points if p.name.startswith("keep ") and p not in named]
    selective = sorted(selective, key=lambda p: p.peak_bytes)[:1]
    return sorted([*named, *selective, *picked], key=lambda p: p.name != "keep all")


def rows(case: Case, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every policy of a model that is run, predicted and measured."""
    cuda = args.device == "cuda"
    sizes = case.cuda if cuda else case.cpu
    device = devices.get(args.spec)
    with torch.device("meta"):
        built = case.build(**sizes)
    frontier = memory_frontier(
        built,
        device,
        batch=sizes["batch"],
        precision=args.precision,
        optimizer="sgd-plain-single",
        channels_last=case.channels_last,
    )
    running = runners(case, sizes, chosen(frontier), args.device, args.precision)
    plain = running[0]
    same = same_bits(running)
    peaks = [peak_bytes(runner, cuda) for runner in running]
    for _ in range(args.rounds):
        for runner in running:
            runner.timed(cuda)
    for runner, peak, equal in zip(running, peaks, same, strict=True):
        ratios = [mine / base for mine, base in zip(runner.seconds, plain.seconds, strict=True)]
        yield {
            "model": case.name,
            **sizes,
            "precision": args.precision,
            "device": device.name,
            "torch": torch.__version__,
            "policy": runner.point.name,
            "words": runner.point.words,
            "spans": [str(span) for span in runner.point.policy.spans],
            "offload": list(runner.point.policy.offload),
            "predicted_peak_bytes": runner.point.peak_bytes,
            "measured_peak_bytes": peak,
            "predicted_step_s": runner.point.step_s,
            "measured_step_s": statistics.median(runner.seconds),
            "predicted_overhead": runner.point.overhead,
            "measured_overhead": statistics.median(ratios) - 1,
            "more_flops": runner.point.compute,
            "rounds": args.rounds,
            "same_bits": equal,
        }


# -- a table ---------------------------------------------------------------------------------------


def table(found: Sequence[dict[str, Any]]) -> str:
    """Predicted beside measured, in Markdown, with the errors that matter below."""
    lines = [
        "| model | policy | peak, MB | predicted | off by | more time | predicted | off by | same bits |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    peaks, times = [], []
    for row in found:
        peak = row["predicted_peak_bytes"] / row["measured_peak_bytes"] - 1
        step = (1 + row["predicted_overhead"]) / (1 + row["measured_overhead"]) - 1
        peaks.append(abs(peak))
        if row["policy"] != "keep all":  # whose times are the measure
            times.append(abs(step))
        lines.append(
            f"| {row['model']} | {row['policy']} | {row['measured_peak_bytes'] / 1e6:.1f}"
            f" | {row['predicted_peak_bytes'] / 1e6:.1f} | {100 * peak:+.2f} %"
            f" | {100 * row['measured_overhead']:+.1f} % | {100 * row['predicted_overhead']:+.1f} %"
            f" | {100 * step:+.1f} % | {'yes' if row['same_bits'] else 'no'} |"
        )
    lines.append("")
    for what, errors in (("peak memory", peaks), ("step time over that of the plain step", times)):
        lines.append(
            f"{what}: mean error {100 * statistics.mean(errors):.2f} %, largest {100 * max(errors):.2f} %"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where torch runs")
    parser.add_argument("--spec", default="this-machine.toml", help="the same as a device of Paceline")
    parser.add_argument("--models", nargs="+", choices=sorted(CASES), default=sorted(CASES))
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="of the steps")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each policy that are timed")
    parser.add_argument("--out", type=Path, help="write the rows here")
    parser.add_argument("--show", type=Path, help="print the table of rows that were written")
    args = parser.parse_args()
    if args.show is not None:
        print(table([json.loads(line) for line in args.show.read_text(encoding="utf-8").splitlines()]))
        return
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.precision != "fp32"
    found = []
    for name in args.models:
        found += rows(CASES[name], args)
        print(table([row for row in found if row["model"] == name]), flush=True)
    if args.out is not None:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")


if __name__ == "__main__":
    main()
