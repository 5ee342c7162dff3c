"""A captured module's memory when its parameters are sharded, against what torch's own tracker sees FSDP2
hold.
"""

import warnings

import pytest

from paceline.capture import capture
from paceline.catalog import clusters
from paceline.predict.simulated import predict
from paceline.spec.plan import Plan

RANKS = 8


def built(device):
    """Module, inputs and loss of a small GPT whose activations outweigh its weights."""
    import torch

    from paceline.catalog.models.gpt import gpt

    with torch.device(device):
        return gpt(batch=16, seq=64, width=64, depth=4, heads=4, vocab=500, context=64)


@pytest.fixture
def tracked():
    """Bytes by kind at the peak of a second step under FSDP2, a unit per block."""
    import torch
    import torch.distributed as dist
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module, inputs, loss = built("cpu")[:3]
            mesh = init_device_mesh("cpu", (RANKS,))
            for part in (*module.blocks, module):
                fully_shard(part, mesh=mesh)
            optimizer = torch.optim.AdamW(module.parameters(), foreach=True)
            tracker = FSDPMemTracker(module, optimizer)
            with tracker:
                for _ in range(2):
                    loss(module(*inputs)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    tracker.reset_mod_stats()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    finally:
        dist.destroy_process_group()
    return {str(kind).rsplit(".", 1)[-1]: size for kind, size in peak.items()}


def test_fsdp_holds_what_torch_says(tracked):
    workload = capture(built("meta"), precision="fp32", optimizer="adamw-foreach")
    found = predict(workload, clusters.get("1xdgx-a100"), Plan(sharding="fsdp")).memory.by_kind
    assert found["parameters"] == pytest.approx(
        tracked["SHARDED_PARAM"] + tracked["UNSHARDED_PARAM"], rel=0.01
    )
    assert found["optimizer"] == pytest.approx(tracked["OPT"], rel=0.01)
    # both are fullest at the loss, where gradients are still to come; what CPUs save of attention differs
    assert found["gradients"] == tracked.get("SHARDED_GRAD", 0) + tracked.get("UNSHARDED_GRAD", 0)
    assert found["temporary"] == pytest.approx(tracked["TEMP"], rel=0.01)
