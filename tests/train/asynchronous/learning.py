"""A worker that fits a noiseless teacher, and writes down its loss, until `stop` is in the folder.

Arguments: strategy, sleep, options, folder.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

from paceline.train.asynchronous import strategies

strategy, sleep, options, folder = sys.argv[1], float(sys.argv[2]), json.loads(sys.argv[3]), Path(sys.argv[4])
torch.set_num_threads(1)
torch.manual_seed(0)
teacher, model = torch.nn.Linear(20, 1), torch.nn.Linear(20, 1)
model, optimizer = strategies()[strategy](model, torch.optim.SGD(model.parameters(), lr=0.003), **options)
torch.manual_seed(optimizer.recorder.worker + 1)
with (folder / f"loss{optimizer.recorder.worker}-{os.getpid()}.jsonl").open("w", buffering=1) as log:
    while not (folder / "stop").exists():
        x = torch.randn(32, 20)
        optimizer.zero_grad()
        loss = (model(x) - teacher(x).detach()).square().mean()
        loss.backward()
        time.sleep(sleep)
        optimizer.step()
        log.write(
            json.dumps({"at_s": time.time(), "loss": loss.item(), "worker": optimizer.recorder.worker}) + "\n"
        )
optimizer.close()
