"""Gradients that are elsewhere: tensors in `p.grad` that fetch them when somebody looks.

Strategies whose updates hide under the next forward pass keep gradients in memory of their own, and each rank
may have a share only. What stands in `p.grad` after `backward()` is a tensor of the same form. The first
operation on one of them brings the mean gradients here, and works on those. So `clip_grad_norm_`, and all
that reads or changes `p.grad` between `backward()` and `step()`, does what it does under DDP, and what nobody
reads never travels. torch does so with the results of its functional collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from paceline.train._torch import plain_functions, stand_in

_FORM = (
    "device",
    "dtype",
    "grad_fn",
    "is_cpu",
    "is_cuda",
    "is_leaf",
    "is_meta",
    "is_nested",
    "is_quantized",
    "is_sparse",
    "is_sparse_csr",
    "layout",
    "ndim",
    "requires_grad",
    "shape",
)
#: what is known of a tensor without looking at its values
KNOWN: frozenset[Any] = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in _FORM),
        Tensor.dim,
        Tensor.element_size,
        Tensor.get_device,
        Tensor.is_complex,
        Tensor.is_contiguous,
        Tensor.is_floating_point,
        Tensor.nelement,
        Tensor.numel,
        Tensor.size,
        Tensor.stride,
    }
)


class Awaited(Tensor):
    """In place of the gradient of `parameter`, which `fetch` returns."""

    fetch: Callable[[], Tensor]
    #: what backward passes have added since it was put there
    added: Tensor | None

    @staticmethod
    def __new__(cls, parameter: nn.Parameter, fetch: Callable[[], Tensor]) -> Awaited:
        return stand_in(cls, parameter)  # type: ignore[no-any-return]

    def __init__(self, parameter: nn.Parameter, fetch: Callable[[], Tensor]) -> None:
        self.__dict__.update(fetch=fetch, added=None)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What Python calls: on the gradients themselves, unless it asks for their form only."""
        with plain_functions():
            if func in KNOWN:
                return func(*args, **(kwargs or {}))
            if func == Tensor.data.__set__:  # type: ignore[attr-defined]
                with torch.no_grad():  # into the memory from which the step reads
                    return _fetched(Tensor.copy_, args, {})
            return _fetched(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What torch calls by itself: a backward pass adds a gradient to what it finds in `p.grad`."""
        into = args[0] if args else None
        if func in _ADDS and isinstance(into, cls):
            into.added = args[1] if into.added is None else into.added + args[1]
            return into
        return _fetched(func, args, kwargs or {})


#: by which a backward pass adds to a gradient that is there
_ADDS = (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)


def _fetched(func: Any, args: Any, kwargs: Any) -> Any:
    """A function on what the gradients are; where it returns one of them, what stands for it."""
    places: dict[int, Awaited] = {}

    def real(place: Awaited) -> Tensor:
        found = place.fetch()
        places[id(found)] = place
        return found

    args, kwargs = tree_map_only(Awaited, real, (args, kwargs))
    result = func(*args, **kwargs)
    return places.get(id(result), result) if isinstance(result, Tensor) else result
