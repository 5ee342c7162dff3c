"""Strategies on a GPU, a few steps each: that replicas stay the same, and how long a step takes.

python benchmarks/engine_gpu.py                    # two ranks on one GPU over gloo, then one rank on NCCL;
with several GPUs, all on NCCL python benchmarks/engine_gpu.py --output gpu.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

#: for all strategies on one backend
_LIMIT_S = 90.0
STRATEGIES = (
    "ddp",
    "allreduce",
    "overlap",
    "priority",
    "terngrad",
    "dgc",
    "qsgd",
    "powersgd",
    "fp16",
    "auto:loss=some",
)


def train(strategy: str, steps: int, device: Any) -> dict[str, Any]:
    """Steps of a small network from one seed, each rank on samples of its own; whether all ranks end with the
    same parameters.
    """
    import torch
    import torch.distributed as dist

    import paceline.train as pt
    from paceline.bench.stepping import network

    torch.manual_seed(0)
    net, shape, rows = network("vgg-like")
    net = net.to(device)
    plain, optimizer = net, torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    net, optimizer = pt.parallelize(net, optimizer, plan=strategy)
    torch.manual_seed(1 + dist.get_rank())
    x, y = torch.randn(rows, *shape, device=device), torch.randint(0, 10, (rows,), device=device)
    losses, start = [], 0.0
    for step in range(steps):
        if step == steps // 2:
            torch.cuda.synchronize()
            start = time.perf_counter()
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    pt.of(net).synchronize()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / (steps - steps // 2)
    own = torch.cat([p.detach().reshape(-1) for p in plain.parameters()]).cpu()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    pt.close(net)
    threads = len(list(Path("/proc/self/task").iterdir()))
    return {
        "strategy": strategy,
        "step_s": seconds,
        "threads_after": threads,
        "first_loss": float(losses[0]),
        "last_loss": float(losses[-1]),
        "same": all(torch.equal(everyone[0], other) for other in everyone),
        "finite": bool(torch.isfinite(own).all()),
    }


def rank(backend: str, steps: int, output: str) -> None:
    """One rank: a line for each strategy, also where it fails."""
    import torch
    import torch.distributed as dist

    place = int(os.environ["RANK"])
    device = torch.device("cuda", place % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group(backend)
    for strategy in STRATEGIES:
        try:
            line = train(strategy, steps, device)
        except Exception as error:
            line = {
                "strategy": strategy,
                "error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            }
        line = {
            "backend": backend,
            "ranks": dist.get_world_size(),
            "gpu": torch.cuda.get_device_name(device),
            **line,
        }
        if place == 0:
            print(line, flush=True)
            with Path(output).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        if "error" in line:
            break  # others may wait for us
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", default=os.devnull, help="file for lines of JSON")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", choices=("gloo", "nccl"), help="one of the two")
    parser.add_argument("--rank", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank, options.steps, options.output)
        return
    import torch

    from paceline.train.launch import free_port

    count = torch.cuda.device_count()
    for backend, world in (("gloo", 2), ("nccl", count)):
        if options.only not in (None, backend):
            continue
        meet = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(world),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [
            sys.executable,
            __file__,
            "--rank",
            backend,
            "--steps",
            str(options.steps),
            "--output",
            options.output,
        ]
        ranks = [
            subprocess.Popen(
                command, env={**os.environ, **meet, "RANK": str(r), "LOCAL_WORLD_SIZE": str(world)}
            )
            for r in range(world)
        ]
        try:
            for process in ranks:
                process.wait(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            print(f"{backend}: not through after {_LIMIT_S:g} s", flush=True)
        finally:
            for process in ranks:
                process.kill()
                if process.wait() not in (0, -9):
                    print(f"{backend}: a rank ended with {process.returncode}", flush=True)


if __name__ == "__main__":
    main()
