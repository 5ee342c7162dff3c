"""Saved activations in host memory between the passes."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from paceline.capture import _torch

#: smaller tensors stay: their copies would cost more than they are worth
LEAST_BYTES = 1 << 20


@dataclass(slots=True, eq=False)
class _Parcel:
    """A saved tensor in host memory; of one on meta, its shape alone. Several operators may have saved the
    same tensor: all of them get the one that came back first, as long as it is there.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    host: torch.Tensor | None
    back: weakref.ref[torch.Tensor] | None = None


class HostStore:
    """Sends saved activations to host memory (pinned, where a GPU copies to it) and gets them back."""

    def __init__(self) -> None:
        #: bytes that went to the host since the store was made
        self.sent_bytes = 0
        #: storages that are still on the device, with the view that was saved -> what went to the host
        self._known: dict[tuple[Any, ...], tuple[weakref.ref[Any], _Parcel]] = {}

    def saving(self) -> AbstractContextManager[Any]:
        """Within it, what operators save for the backward pass goes to the host."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        if not _movable(tensor):
            return tensor
        where = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor._version)
        key = (_torch.storage_key(tensor), *where)
        known = self._known.get(key)
        if known is not None and known[0]() is not None:
            return known[1]
        parcel = self._parcel(tensor)
        gone = weakref.ref(tensor.untyped_storage(), lambda _: self._known.pop(key, None))
        self._known[key] = (gone, parcel)
        return parcel

    def _parcel(self, tensor: torch.Tensor) -> _Parcel:
        self.sent_bytes += tensor.numel() * tensor.element_size()
        shape, stride, host = tuple(tensor.shape), tensor.stride(), None
        if not tensor.is_meta:
            host = torch.empty_strided(shape, stride, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            host.copy_(tensor.detach())
        return _Parcel(shape, stride, tensor.dtype, tensor.device, host)

    @staticmethod
    def _unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        back = packed.back() if packed.back is not None else None
        if back is None:
            back = torch.empty_strided(packed.shape, packed.stride, dtype=packed.dtype, device=packed.device)
            if packed.host is not None:
                back.copy_(packed.host, non_blocking=True)
            packed.back = weakref.ref(back)
        return back


def _movable(tensor: torch.Tensor) -> bool:
    """Whether the tensor is large, and no part of a parameter: parameters are there anyway."""
    base = tensor._base if tensor._is_view() and tensor._base is not None else tensor
    size = tensor.numel() * tensor.element_size()
    whole = size <= tensor.untyped_storage().nbytes()
    return size >= LEAST_BYTES and whole and not (base.is_leaf and base.requires_grad)
