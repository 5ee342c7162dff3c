"""A worker whose parameters count its updates: worker w's gradient is one at index w, the learning rate is
one. Arguments: strategy, steps, sleep.
"""

import json
import sys
import time

import torch

from paceline.train.asynchronous import strategies

strategy, steps, sleep, options = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), json.loads(sys.argv[4])
torch.set_num_threads(1)
model = torch.nn.Linear(16, 1, bias=False)
with torch.no_grad():
    model.weight.zero_()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
model, optimizer = strategies()[strategy](model, optimizer, **options)
mine = torch.zeros(16)
mine[optimizer.recorder.worker] = 1.0
for _ in range(steps):
    optimizer.zero_grad()
    (model.weight[0] * mine).sum().backward()
    time.sleep(sleep)
    optimizer.step()
print("DONE", optimizer.recorder.worker, flush=True)
optimizer.close()
