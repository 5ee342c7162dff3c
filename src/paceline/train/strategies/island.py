"""Neighbouring ranks that average gradients in every backward pass, where islands of them meet now and
then.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from paceline.errors import PlanError
from paceline.spec.defaults import PLAIN
from paceline.train.strategies.ddp import ThroughDDP
from paceline.train.transport import give_back


class Island:
    """Sends the passes of a model through torch's DDP, over `size` neighbouring ranks; all ranks make one."""

    def __init__(self, model: nn.Module, size: int) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        if world % size:
            raise PlanError(f"islands of {size} do not divide the {world} ranks that were started")
        # every rank takes part in making every group
        self._groups = [dist.new_group(list(range(at, at + size))) for at in range(0, world, size)]
        own = self._groups[rank // size]
        self.passes = ThroughDDP(model, process_group=own, bucket_cap_mb=PLAIN.bucket_bytes / 2**20)

    def close(self) -> None:
        """The model's own passes again; all ranks do together."""
        self.passes.close()
        give_back(self._groups, well=True)
