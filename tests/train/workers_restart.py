"""What the ranks of `test_restart` run."""

import hashlib

import torch
import torch.distributed as dist
from networks import batch, model, optimizer_of


def interrupted(
    folder, strategy, options=None, kind="mlp", optimizer="sgd", steps=9, at=4, options_then=None, size_then=8
):
    """Trains, and once more from the checkpoint of step `at` on: bits of parameters and optimizer state at
    both ends, and what layers exchange.
    """
    import paceline.train as pt

    rank, out = dist.get_rank(), []
    saved = pt.Checkpoints(folder, keep=1, asynchronous=False)
    for again in (False, True):
        net = model(kind=kind)
        opt = optimizer_of(optimizer, net.parameters())
        pt.parallelize(
            net,
            opt,
            plan=strategy,
            **((options_then if again and options_then is not None else options) or {}),
        )
        start = saved.load(net, opt) if again else 0
        found = any(getattr(pt.of(net), name, None) for name in ("parts", "_agreed", "steps"))
        if kind == "tied":
            net.calls = start
        for step in range(start, steps):
            x, y = batch(step, rank, size_then if again else 8)
            opt.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            opt.step()
            if step + 1 == at and not again:
                saved.save(at, net, opt)
                saved.wait()
                dist.barrier()
        arranged = getattr(pt.of(net), "_arrangement", None)
        state = pt.of(net).optimizer_state()["state"]
        pt.close(net)
        kept = [
            *net.state_dict().values(),
            *(value for one in state.values() for value in one.values() if isinstance(value, torch.Tensor)),
        ]
        bits = hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in kept)).hexdigest()
        out.append(
            {
                "start": start,
                "found": found,
                "bits": bits,
                "arranged": arranged and [*arranged.factors.values()],
                "finite": all(bool(torch.isfinite(tensor).all()) for tensor in kept),
            }
        )
    return out


def interrupted_all(folder, runs):
    return [interrupted(f"{folder}/{i}", **one) for i, one in enumerate(runs)]
