"""Private names of torch that training needs, each in one function, with a test of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def after_backward(callback: Callable[[], None]) -> None:
    """Calls back when the backward pass that runs now is complete; only from within one."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def within_node() -> bool:
    """Whether this thread runs part of a backward pass: at the end of one, whether it is itself a part of
    another (reentrant checkpointing).
    """
    return torch._C._current_autograd_node() is not None


def default_store() -> Any:
    """The store by which the ranks of the default group found each other."""
    return dist.distributed_c10d._get_default_store()


def abandon(group: Any) -> None:
    """Takes a process group out of torch's books without waiting for its peers, some of which may be gone."""
    if dist.get_backend(group) == "nccl":
        dist.distributed_c10d._abort_process_group(group)
    else:
        dist.destroy_process_group(group)


def ordered_pipeline(
    stages: Sequence[Any],
    micro_batches: int,
    loss: Callable[..., torch.Tensor],
    orders: Sequence[Iterable[str]],
) -> Any:
    """A pipeline schedule of torch that runs each rank's passes in an order of our own: 0F0 0F1 0B0 0B1."""
    from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

    made = _PipelineScheduleRuntime(list(stages), micro_batches, loss_fn=loss)
    made._prepare_schedule_with_comms(
        {rank: [_Action.from_str(action) for action in order] for rank, order in enumerate(orders)}
    )
    return made


#: under its newer name where there is one: the older warns that it is
gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


#: where a module keeps hooks, by number
HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def forget_shards(module: torch.nn.Module) -> None:
    """Takes FSDP2 away from a module, which has its own class again; its parameters stay split."""
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FSDPModule

    if isinstance(module, FSDPModule):
        module.reshard()  # the root of a model is gathered after its last pass
        module.__class__ = type(module).__mro__[2]
        _module_state_mapping.pop(module, None)
        for key in (STATE_KEY, REGISTRY_KEY):
            module.__dict__.pop(key, None)
    for key in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
        module.__dict__.pop(key, None)


def forget_mesh(mesh: Any) -> None:
    """Has a mesh hold its process groups no longer: torch's caches may hold the mesh for as long as the
    process lives.
    """
    mesh._get_root_mesh()._pg_registry.clear()


def stand_in(kind: type[Any], like: torch.Tensor) -> Any:
    """A tensor of a subclass, with the form of another and no memory."""
    return torch.Tensor._make_wrapper_subclass(
        kind, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
    )


#: within it, subclasses of tensors are not asked what a function means for them
plain_functions: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass


def gloo_pair(store: Any, end: int, limit: timedelta, address: str) -> Any:
    """A gloo group of two that listens on one address, or on the interfaces that GLOO_SOCKET_IFNAME names."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return dist.ProcessGroupGloo(store, end, 2, limit)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = limit
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(store, end, 2, options)


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Says that an optimizer has stepped, which its servers did: its scheduler would warn that it had not."""
    optimizer._opt_called = True  # type: ignore[attr-defined]
