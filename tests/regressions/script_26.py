"""A loop as people write it, whose first rank is stopped."""

import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist

import paceline.train as pt

dist.init_process_group("gloo", timeout=timedelta(seconds=5))
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = pt.parallelize(model, optimizer, plan="allreduce", timeout_s=5.0)
for step in range(6):
    if step == 3 and dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
pt.close(model)
dist.destroy_process_group()
