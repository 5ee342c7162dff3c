"""Private names of torch that training needs, each in one function, with a test of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def after_backward(callback: Callable[[], None]) -> None:
    """Calls back when the backward pass that runs now is complete; only from within one."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def default_store() -> Any:
    """The store by which the ranks of the default group found each other."""
    return dist.distributed_c10d._get_default_store()


def abandon(group: Any) -> None:
    """Takes a process group out of torch's books without waiting for its peers, some of which may be gone."""
    if dist.get_backend(group) == "nccl":
        dist.distributed_c10d._abort_process_group(group)
    else:
        dist.destroy_process_group(group)


#: under its newer name where there is one: the older warns that it is
gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
