"""Records three training steps of a small net on the CPU with torch.profiler: python record_trace.py FILE."""

import sys

import torch
from torch.profiler import ProfilerActivity, profile, schedule

net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
steps = schedule(wait=0, warmup=1, active=3, repeat=1)
with profile(activities=[ProfilerActivity.CPU], schedule=steps, record_shapes=True) as profiler:
    for _ in range(4):
        net(torch.randn(128, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        profiler.step()
profiler.export_chrome_trace(sys.argv[1])
