"""State of a model that FSDP2 or tensor parallelism has split: whole for a file, and back in its parts.

What `state_dict()` of such a model or optimizer gives are DTensors, of which each rank holds a part. A file
that one rank writes has that rank's part only, and torch loads it on every rank without a word.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import RunError


def is_split(value: Any) -> bool:
    """Whether a tensor is a DTensor; importing the type takes seconds."""
    return isinstance(value, Tensor) and hasattr(value, "full_tensor")


def gathered(state: Any, *, keep: bool = True) -> Any:
    """The same with all of every tensor; all ranks take part. Where they are not kept, parts are None."""
    if is_split(state):
        whole = state.detach().full_tensor().cpu()
        return whole if keep else None
    if isinstance(state, dict):
        return {key: gathered(value, keep=keep) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(gathered(value, keep=keep) for value in state)
    return state


def load_model(model: nn.Module, state: Mapping[str, Any]) -> None:
    """`load_state_dict` of whole tensors: each rank takes its parts."""
    own = model.state_dict()
    model.load_state_dict({name: _part(value, own.get(name)) for name, value in state.items()})


def optimizer_parts(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's whole state as its `load_state_dict` takes it on this rank."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(map(is_split, parameters)):
        return state
    parts = {
        index: {name: _part(value, parameters[index]) for name, value in entries.items()}
        for index, entries in state["state"].items()
    }
    return {**state, "state": parts}


def _part(value: Any, like: Any) -> Any:
    """This rank's part of a whole tensor that belongs to a split one; anything else as it is."""
    if not is_split(like) or not isinstance(value, Tensor) or is_split(value) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    # every rank has all of it: nothing is sent
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _parts(tensor: Any) -> int:
    """Into how many parts a tensor is split."""
    axes = enumerate(tensor.placements)
    return math.prod(tensor.device_mesh.size(axis) for axis, place in axes if place.is_shard())


def refuse_parts_of_one_rank(state: Mapping[str, Any]) -> None:
    """Raises where all ranks are about to load the same parts: one rank has saved its own. All ranks call
    it.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        value = state[name]
        if is_split(value) and _parts(value) > 1:
            digest.update(value.to_local().detach().float().cpu().contiguous().numpy().tobytes())
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, digest.hexdigest())
    nothing = hashlib.sha256().hexdigest()
    if dist.get_world_size() > 1 and len(set(found)) == 1 and found[0] != nothing:
        raise RunError(
            "this state holds the same part of the model for every rank: one rank of a split model has saved"
            " its own, and the rest is not there; save with paceline.train.Checkpoints on all ranks, or after"
            " paceline.train.close(model), which makes it whole"
        )
