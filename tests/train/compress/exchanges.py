"""What the ranks of `test_gloo.py` run; reached as `exchanges:NAME` with this folder on the path."""

import hashlib

import torch
import torch.distributed as dist

from paceline.spec.compression import SCHEMES
from paceline.train.compress import lockstep, make

SHAPES = {"matrix": (40, 30), "filter": (16, 8, 3, 3), "vector": (50,)}
STEPS = 3


def gradients(t, shape, world):
    draw = torch.Generator().manual_seed(t)
    return [torch.randn(shape, generator=draw) for _ in range(world)]


def carry_out(request):
    """A round by the process group itself."""
    if request.op == "gather":
        arrived = [
            [torch.empty_like(tensor) for tensor in request.payload] for _ in range(dist.get_world_size())
        ]
        for i, tensor in enumerate(request.payload):
            dist.all_gather([payload[i] for payload in arrived], tensor)
        return arrived
    for tensor in request.payload:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX if request.op == "max" else dist.ReduceOp.SUM)
    return [request.payload]


def over_the_network():
    """A digest of what each scheme decodes in a few steps, by name."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    return "\n".join(f"{name} {_digest(_steps(name, rank, world))}" for name in SCHEMES)


def _steps(name, rank, world):
    compressor = make(name, rank=rank, world=world)
    for t in range(STEPS):
        compressor.begin_step()
        for key, shape in SHAPES.items():
            out = torch.empty(shape)
            rounds = compressor.exchange(key, gradients(t, shape, world)[rank], out)
            request = next(rounds)
            while request is not None:
                try:
                    request = rounds.send(carry_out(request))
                except StopIteration:
                    request = None
            yield out
        compressor.end_step()


def in_one_process(world):
    """The same without a network."""
    return "\n".join(f"{name} {_digest(_alone(name, world))}" for name in SCHEMES)


def _alone(name, world):
    compressors = [make(name, rank=rank, world=world) for rank in range(world)]
    for t in range(STEPS):
        for key, shape in SHAPES.items():
            yield lockstep(compressors, key, gradients(t, shape, world))[0]
        for compressor in compressors:
            compressor.end_step()


def _digest(outs):
    digest = hashlib.sha256()
    for out in outs:
        digest.update(out.numpy().tobytes())
    return digest.hexdigest()[:16]
