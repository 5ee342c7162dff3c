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


@dataclass(slots=True, eq=False, kw_only=True)
class _Parcel:
    """A saved tensor in host memory; of one on meta, its shape alone. Several operators may have saved the
    same tensor: all of them get the one that came back first, as long as it is there.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    #: without gaps
    sent_stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    host: torch.Tensor | None
    back: weakref.ref[torch.Tensor] | None = None

    def arrived(self) -> torch.Tensor:
        """The tensor on its device again, with the strides that it had."""
        sent = self._like(self.sent_stride)
        if self.host is not None:
            sent.copy_(self.host, non_blocking=True)
        return sent if self.sent_stride == self.stride else self._like(self.stride).copy_(sent)

    def _like(self, stride: tuple[int, ...]) -> torch.Tensor:
        return torch.empty_strided(self.shape, stride, dtype=self.dtype, device=self.device)


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
        there = tensor.detach() if _without_gaps(tensor) else tensor.detach().contiguous()
        host = None
        if not tensor.is_meta:
            host = torch.empty_like(there, device="cpu", pin_memory=tensor.is_cuda)
            host.copy_(there)
        return _Parcel(
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            sent_stride=there.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
            host=host,
        )

    @staticmethod
    def _unpack(packed: torch.Tensor | _Parcel) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        back = packed.back() if packed.back is not None else None
        if back is None:
            back = packed.arrived()
            packed.back = weakref.ref(back)
        return back


def _without_gaps(tensor: torch.Tensor) -> bool:
    """Whether its elements lie side by side, in any order. A view with gaps, such as one of the three results
    of a fused projection, is gathered on the device first: torch would gather it with the host, at a tenth of
    the link's rate.
    """
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return span == tensor.numel()


def _movable(tensor: torch.Tensor) -> bool:
    """Whether the tensor is large, and no part of a parameter: parameters are there anyway."""
    base = tensor._base if tensor._is_view() and tensor._base is not None else tensor
    size = tensor.numel() * tensor.element_size()
    whole = size <= tensor.untyped_storage().nbytes()
    return size >= LEAST_BYTES and whole and not (base.is_leaf and base.requires_grad)
