"""A job that trains: `digits.py DATA.pt STEPS`, softmax regression with one hidden layer on handwritten
digits, synchronous over its nodes.

The global batch is the same at every size, so the loss curve does not depend on where it ran. Checkpoints on
TERM.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

torch.set_num_threads(1)
data, steps = torch.load(sys.argv[1]), int(sys.argv[2])
rank, world = int(os.environ["PACELINE_NODE_RANK"]), int(os.environ["PACELINE_NODES"])
folder = Path(os.environ["PACELINE_CHECKPOINT"])
stop = torch.zeros(1)
limit = Path(os.environ.get("PACELINE_LIMIT", "/none"))
signal.signal(signal.SIGTERM, lambda *_: stop.fill_(1))
if world > 1:
    dist.init_process_group(
        "gloo", init_method=os.environ["PACELINE_RENDEZVOUS"], rank=rank, world_size=world
    )

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
# by hand: importing torch.optim's way takes as long as torch itself
momentum = [torch.zeros_like(p) for p in model.parameters()]
done = 0
if (folder / "state.pt").exists():
    saved = torch.load(folder / "state.pt")
    model.load_state_dict(saved["model"])
    momentum = saved["momentum"]
    done = saved["step"]

with Path(os.environ["PACELINE_PROGRESS"]).open("a") as progress, (folder / "loss.jsonl").open("a") as curve:
    while done < steps:
        # only the first rank looks: the others wait for it in the sum below
        while rank == 0 and limit.exists() and done >= int(limit.read_text()) and not stop:
            time.sleep(0.01)
        batch = torch.randint(len(data["y"]), (60,), generator=torch.Generator().manual_seed(done))[
            rank::world
        ]
        loss = (
            torch.nn.functional.cross_entropy(model(data["x"][batch]), data["y"][batch], reduction="sum") / 60
        )
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        # what all ranks must agree on travels together: gradients, the loss, whether somebody was told to
        # stop
        together = torch.cat([gradient.flatten() for gradient in gradients] + [loss.detach()[None], stop])
        if world > 1:
            dist.all_reduce(together)
        at = 0
        with torch.no_grad():
            for parameter, moved in zip(model.parameters(), momentum, strict=True):
                moved.mul_(0.9).add_(together[at : at + parameter.numel()].view_as(parameter))
                parameter.sub_(0.1 * moved)
                at += parameter.numel()
        done += 1
        if rank == 0:
            curve.write(json.dumps({"step": done, "loss": float(together[-2]), "world": world}) + "\n")
            curve.flush()
            progress.write(f"{done}\n")
            progress.flush()
        if together[-1] > 0:
            break
if rank == 0:
    torch.save({"model": model.state_dict(), "momentum": momentum, "step": done}, folder / "state.tmp")
    (folder / "state.tmp").replace(folder / "state.pt")
if world > 1:
    dist.destroy_process_group()
