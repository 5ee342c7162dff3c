"""A model that FSDP2 or tensor parallelism has split, made whole again: what `close` does with it.

Every rank gets all of the parameters and of the optimizer's state, as plain tensors, and must have room for
them. Hooks and process groups that came with the split go; what a plan changed otherwise (recomputation,
precision, a projection split in three) stays.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from paceline.train._torch import HOOKS, forget_mesh, forget_shards
from paceline.train.transport import give_back


class Split:
    """Made before a model is split: knows its hooks of then, so that those which come later can be told from
    the user's.
    """

    def __init__(self, model: nn.Module) -> None:
        self._hooks = WeakKeyDictionary(
            {module: {kind: set(getattr(module, kind)) for kind in HOOKS} for module in model.modules()}
        )

    def undo(self, model: nn.Module, optimizer: Optimizer) -> None:
        """All ranks take part: parameters and state are gathered, and torch's hold on the modules ends."""
        for module in model.modules():
            forget_shards(module)
            before = self._hooks.get(module, {})
            for kind in HOOKS:
                hooks: dict[int, Any] = getattr(module, kind)
                for key in set(hooks) - before.get(kind, set()):
                    del hooks[key]
        new: dict[int, nn.Parameter] = {}
        for module in model.modules():
            held: dict[str, Any] = module._parameters
            for name, parameter in held.items():
                if isinstance(parameter, DTensor):
                    if id(parameter) not in new:  # or a weight that two layers have in common
                        new[id(parameter)] = nn.Parameter(
                            _whole(parameter), requires_grad=parameter.requires_grad
                        )
                    held[name] = new[id(parameter)]
        for group in optimizer.param_groups:
            for i, parameter in enumerate(group["params"]):
                if id(parameter) in new:
                    state = optimizer.state.pop(parameter, None)
                    group["params"][i] = new[id(parameter)]
                    if state is not None:
                        optimizer.state[new[id(parameter)]] = {
                            key: _whole(value) for key, value in state.items()
                        }


def leave(mesh: DeviceMesh, others: tuple[Any, ...] = ()) -> None:
    """Gives the process groups of a mesh back, and `others`; all ranks do together, with nothing on its
    way.
    """
    groups = [
        group
        for group in (*mesh.get_all_groups(), *others)
        if group not in (dist.group.WORLD, dist.GroupMember.NON_GROUP_MEMBER)
    ]
    forget_mesh(mesh)
    dist.barrier()
    give_back(list(dict.fromkeys(groups)), well=True)


def _whole(value: Any) -> Any:
    """All of a tensor of which this rank has a part; anything else as it is."""
    return value.full_tensor().detach() if isinstance(value, DTensor) else value
