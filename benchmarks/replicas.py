"""Replicas after 100 steps, over and over: part replicas of benchmarks/training.py.

Every strategy with 1, 3 and 20 buckets, in worlds of 2, 3 and 4 ranks, many times in a row in the same
processes, whose communication engines are made and closed for each run. A hang ends the engine's wait with an
error, and the table says so. Strategies can be shared out to several such groups of processes (`--shares`)
where there are cores for them.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import Namespace

#: layers of the network, of as many parameters as are compressed at least
LAYERS, WIDTH = 20, 32
TOTAL_BYTES = LAYERS * WIDTH * WIDTH * 4
BUCKETS, STEPS = (1, 3, 20), 100
AVERAGING = (
    "allreduce",
    "terngrad",
    "dgc:ratio=0.01",
    "powersgd",
    "qsgd",
    "signsgd",
    "onebit",
    "topk",
    "randomk",
    "fp16",
    "bf16",
)
DEFERRED: dict[str, dict[str, Any]] = {"overlap": {"fc": "gradient"}, "priority": {}, "lazy": {}}
#: these send whole models now and then, or choose by themselves, and have no buckets to be told of
OTHERS: dict[str, dict[str, Any]] = {
    "local": {"period": 4},
    "post-local": {"period": 4, "after": 20},
    "diloco": {"period": 4},
    "auto": {"loss": "some"},
}


def cases() -> list[tuple[str, int, dict[str, Any]]]:
    """Strategy, buckets, options."""
    found: list[tuple[str, int, dict[str, Any]]] = []
    for buckets in BUCKETS:
        size = -(-TOTAL_BYTES // buckets)
        found += [(name, buckets, {"bucket_bytes": size, "first_bytes": size}) for name in AVERAGING]
        found += [
            (name, buckets, {"least_bytes": size, "most_bytes": size, **more})
            for name, more in DEFERRED.items()
        ]
    return found + [(name, 1, options) for name, options in OTHERS.items()]


def follow(times: int, budget_s: float, share: int = 0, shares: int = 1) -> dict[str, Any]:
    """On each rank: its share of the cases `times` times, or as often as the budget allows; how many rounds
    were whole, and which did not stay one model."""
    import torch
    import torch.distributed as dist

    began, rounds, apart = time.perf_counter(), 0, []
    for number in range(times):
        for name, buckets, options in cases()[share::shares]:
            if not _same(name, options, number):
                apart.append(f"{name} with {buckets}")
        rounds += 1
        late = torch.tensor([float(time.perf_counter() - began > budget_s)])
        dist.broadcast(late, src=0)
        if late > 0:
            break
    return {"rounds": rounds, "apart": apart, "seconds": time.perf_counter() - began}


def _same(name: str, options: dict[str, Any], seed: int) -> bool:
    """Trains; whether all ranks have issued the same collectives and have the same bits in the end."""
    import torch
    import torch.distributed as dist

    import paceline.train as pt

    torch.manual_seed(seed)
    net = torch.nn.Sequential(
        *(m for _ in range(LAYERS) for m in (torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.Tanh()))
    )
    net, opt = pt.parallelize(
        net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), plan=name, timeout_s=60, **options
    )
    data = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    for _ in range(STEPS):
        x = torch.randn(4, WIDTH, generator=data)
        opt.zero_grad()
        (net(x) - x.flip(1)).square().mean().backward()
        opt.step()
    mine = torch.cat([value.reshape(-1) for value in net.state_dict().values()])
    order = pt.of(net).engine.order()
    pt.close(net)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (order, mine.numpy().tobytes()))
    return all(one == every[0] for one in every)


def replicas(options: Namespace) -> str:
    """The table."""
    from paceline.train.launch import run

    times = 1 if options.quick else options.times
    worlds = [int(size) for size in options.worlds.split(",")]

    def group(size: int, share: int) -> dict[str, Any]:
        here = {"PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))}
        arguments = {"times": times, "budget_s": options.budget_s, "share": share, "shares": options.shares}
        found: dict[str, Any] = run(
            "replicas:follow",
            world=size,
            arguments=arguments,
            environment=here,
            timeout_s=options.budget_s + 600,
        )[0]
        print(size, share, found, flush=True)
        return found

    def world(size: int) -> dict[str, Any]:
        with ThreadPoolExecutor(options.shares) as pool:
            every = list(pool.map(lambda share: group(size, share), range(options.shares)))
        return {
            "rounds": min(one["rounds"] for one in every),
            "apart": [case for one in every for case in one["apart"]],
            "seconds": max(one["seconds"] for one in every),
        }

    with ThreadPoolExecutor(len(worlds)) as pool:
        found = list(pool.map(world, worlds))
    lines = [
        "| ranks | strategies x buckets | times in a row | runs of 100 steps | replicas differ | seconds |",
        f"|{'---|' * 6}",
    ]
    count = len(cases())
    lines += [
        f"| {size} | {count} | {one['rounds']} | {one['rounds'] * count} |"
        f" {', '.join(one['apart']) or 'in none'} | {one['seconds']:.0f} |"
        for size, one in zip(worlds, found, strict=True)
    ]
    return "\n".join(lines)
