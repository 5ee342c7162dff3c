"""What the ranks of `test_faults` run."""

import time

import torch
import torch.distributed as dist


def saves_badly(folder):
    """Three checkpoints; rank 1 finds no room for its part of the second."""
    import paceline.train as pt
    from paceline.train import checkpoint

    net = torch.nn.Linear(4, 4)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    saved, real, out = pt.Checkpoints(folder), torch.save, {}

    def full(content, path):
        raise OSError(28, "No space left on device")

    for step in (1, 2, 3):
        if dist.get_rank() == 1 and step == 2:
            checkpoint.torch.save = full
        start = time.perf_counter()
        saved.save(step, net, opt)
        saved.wait()
        checkpoint.torch.save = real
        if step == 2:
            out = {"seconds": time.perf_counter() - start, "problem": saved.problem}
        dist.barrier()
    return {**out, "steps": saved.steps()}
