"""How long what-if questions take, and the answers that docs/whatif.md shows.

python benchmarks/whatif.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from paceline.whatif.compare import compare
from paceline.whatif.edits import apply
from paceline.whatif.explain import explain
from paceline.whatif.resources import resources
from paceline.whatif.subject import Subject
from paceline.whatif.sweep import sweep

TEN = ["ddp", "overlap", "terngrad", "dgc", "powersgd", "local-sgd", "diloco", "ps-sync", "ps-async", "easgd"]
CODES = ["terngrad", "dgc", "powersgd", "qsgd", "signsgd", "onebit", "topk", "compress=fp16"]
#: the networks of TernGrad's two clusters
CLUSTERS = {"1 Gb/s, PCIe": "{}x4xp4@1Gb/s/node", "100 Gb/s, NVLink": "{}x4xp100-sxm@100Gb/s/node"}


def timed(name: str, ask: Callable[[], Any]) -> Any:
    """The answer, after printing the CPU time it took."""
    began = time.process_time()
    answer = ask()
    print(f"{name:60s} {time.process_time() - began:6.2f} s of CPU time")
    return answer


def speed() -> None:
    """CPU time of the questions with a target."""
    large = Subject.of("gpt3-175b", "128xdgx-a100", "tp=8 pp=8 mbs=1 gbs=1536")
    timed(
        "sweep of 200 points, 1,024 devices",
        lambda: sweep(large, "network.inter.bandwidth=50Gb/s..1600Gb/s:200"),
    )
    timed("bottlenecks of the same plan", lambda: resources(large))
    timed("all of explain", lambda: explain(large))
    vgg = Subject.of("vgg16", "16xp100-node-10gbe", batch=32)
    timed("compare ten plans on 64 devices", lambda: compare(vgg, TEN))


def break_even() -> None:
    """The network rate of a node below which each compression pays, for VGG-16 on nodes of one V100."""
    print("\nVGG-16, batch 32, one V100 per node: compression pays below (Gb/s)")
    for nodes in (2, 4, 8, 16):
        found = compare(
            Subject.of("vgg16", f"{nodes}x1xv100-sxm-16gb@10Gb/s", batch=32), CODES, break_even=True
        )
        rates = {row.plan: row.break_even.bandwidth_Bps for row in found.rows if row.break_even is not None}
        print(
            f"{nodes:3d} nodes  "
            + "  ".join(
                f"{plan} {8e-9 * rate:.0f}" if rate else f"{plan} never" for plan, rate in rates.items()
            )
        )


def lee() -> None:
    """Overlapped averaging against all-reduce on Cori's Haswell nodes (Lee et al. 2018)."""
    print("\noverlapped averaging over all-reduce after the backward pass, Cori Haswell, one sample per node")
    for model in ("vgg16", "resnet50"):
        ratios = []
        for nodes in (16, 64, 256):
            subject = Subject.of(model, f"{nodes}xcori-haswell", "overlap", optimizer="sgd")
            plain = apply(subject, ["average=allreduce", "framework=after-backward"])
            ratios.append(subject.predict().throughput / plain.predict().throughput)
        print(
            f"{model:10s} "
            + "  ".join(
                f"{nodes} nodes {ratio:.2f} x" for nodes, ratio in zip((16, 64, 256), ratios, strict=True)
            )
        )


def terngrad() -> None:
    """TernGrad through parameter servers, as its own performance model has it, and gathered."""
    print("\nTernGrad over fp32: through servers, and gathered against all-reduce")
    for where, text in CLUSTERS.items():
        for model, batch in (("alexnet", 128), ("googlenet", 64), ("vgg11", 32)):
            line = []
            for nodes in (2, 16, 128):
                rates = {
                    plan: (
                        Subject.of(model, text.format(nodes), plan, batch=batch, optimizer="sgd")
                        .predict()
                        .throughput
                    )
                    for plan in ("ddp", "terngrad", "ps-sync", "ps-sync terngrad")
                }
                line.append(
                    f"{4 * nodes} GPUs {rates['ps-sync terngrad'] / rates['ps-sync']:.2f} /"
                    f" {rates['terngrad'] / rates['ddp']:.2f}"
                )
            print(f"{where:18s} {model:10s} " + "   ".join(line))


if __name__ == "__main__":
    speed()
    break_even()
    lee()
    terngrad()
