"""What the ranks of test_21 run; reached as `workers_21:NAME` with this folder on the path."""

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist

import paceline.train as pt


def shared_files():
    """Files in memory that this process has mapped for its parameters, and their access rights."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split()[-1] for line in lines if "/dev/shm/paceline-" in line}
    return {path: oct(Path(path).stat().st_mode & 0o777) for path in paths}


def one(name, seed, steps=3):
    """Trains a layer whose parameters all equal the seed; what they were at first, and shared files."""
    model = torch.nn.Linear(8, 1)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float(seed))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = pt.parallelize(model, optimizer, plan=name)
    start = sorted({value for p in model.parameters() for value in p.detach().reshape(-1).tolist()})
    files = shared_files()
    dist.barrier()
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    dist.barrier()
    pt.close(model)
    return {"name": name, "seed": seed, "start": start, "files": files}


def several(runs):
    """One run after another in the same processes."""
    return [one(name, seed) for name, seed in runs]


def killed():
    """All ranks of a Hogwild run are killed in the middle of it."""
    model = torch.nn.Linear(8, 1)
    pt.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan="hogwild")
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
