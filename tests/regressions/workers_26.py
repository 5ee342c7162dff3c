"""What the ranks of test_26 run; reached as `workers_26:NAME` with this folder on the path."""

import os
import signal

import torch
import torch.distributed as dist

import paceline.train as pt


def frozen(strategy, folder=None, timeout_s=4.0, at=3):
    """Rank 0, which keeps the store of the group, is stopped in the middle of a run."""
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    more = {} if strategy == "ddp" else {"timeout_s": timeout_s}
    model, optimizer = pt.parallelize(model, optimizer, plan=strategy, **more)
    job = pt.Job(model, optimizer, folder=folder, timeout_s=timeout_s)
    for step in job.steps(8):
        if step == at and dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    pt.close(model)
    job.close()
