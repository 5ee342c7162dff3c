"""Peak memory of a step: live bytes along its segments, workspaces, and what the allocator reserves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paceline.catalog import architectures
from paceline.spec.device import Device
from paceline.spec.prediction import Fit, Memory
from paceline.spec.vocabulary import DeviceKind, Phase, Precision
from paceline.spec.workload import MEMORY_KINDS, Workload

#: what cuBLAS and cuBLASLt take as workspace through torch's allocator, where an architecture's is not known
DEFAULT_WORKSPACE_BYTES = 2 * 8 * 2**20
#: context, kernels and what the driver keeps: not available to a training step
CONTEXT_BYTES = 600e6
#: buffers of one communicator of NCCL on one device, for all its channels and protocols: BLOOM's steps show
#: about half a gigabyte for each group of ranks
COMMUNICATOR_BYTES = 0.5e9
#: of a node's host, for what is offloaded to it; nodes for training have 1 to 2 TB (DGX A100 and H100: 2 TB),
#: which data loading shares
HOST_BYTES = 1e12
#: blocks of the caching allocator above 1 MiB come in multiples of 2 MiB, smaller ones share 2 MiB segments;
#: fragmentation on top, as measured over the H200 steps (reserved over allocated)
FRAGMENTATION = 1.05


def memory(
    workload: Workload,
    device: Device,
    *,
    held: Mapping[str, float] | None = None,
    more: Mapping[str, float] | None = None,
    inside: Mapping[str, float] | None = None,
    accumulated: bool = False,
) -> Memory:
    """Peak allocated bytes by kind, at the moment when most is live.

    Where ranks share the work, `held` is the share of a kind that this one holds, `more` what it holds
    besides at any time, and `inside` what it holds besides while a block runs (gradients: in its backward
    pass); `accumulated` gradients are there before the step's last backward pass begins. An update's
    temporaries are those of this rank's share.
    """
    order = list(workload.order)
    net, peaks = (
        _by_kind(getattr(segment, which) for segment in workload.segments)[order] for which in ("net", "peak")
    )
    before = _by_kind([workload.resident]) + np.cumsum(net, axis=0) - net
    live = (before + peaks).astype(float)
    if accumulated:
        live[:, MEMORY_KINDS.index("gradients")] = live[:, MEMORY_KINDS.index("gradients")].max()
    visits = [workload.segments[i] for i in order]
    phases, blocks = (
        np.array([visit.phase for visit in visits]),
        np.array([bool(visit.path) for visit in visits]),
    )
    for column, kind in enumerate(MEMORY_KINDS):
        live[:, column] = live[:, column] * (held or {}).get(kind, 1.0) + (more or {}).get(kind, 0.0)
        within = blocks & (phases == Phase.BACKWARD if kind == "gradients" else phases != Phase.OPTIMIZER)
        live[within, column] += (inside or {}).get(kind, 0.0)
    live[phases == Phase.OPTIMIZER, MEMORY_KINDS.index("temporary")] *= (held or {}).get("optimizer", 1.0)
    at = int(live.sum(axis=1).argmax())
    by_kind = {kind: max(0, int(size)) for kind, size in zip(MEMORY_KINDS, live[at], strict=True)}
    segment = workload.segments[order[at]]
    where = f"{segment.path or 'outside blocks'}, {segment.phase}"
    if device.kind == DeviceKind.GPU:
        by_kind["workspace"] += workspace_bytes(device)
    peak = sum(by_kind.values())
    reserved = int(peak * (FRAGMENTATION if device.kind == DeviceKind.GPU else 1.0))
    available = int(device.memory_bytes - (CONTEXT_BYTES if device.kind == DeviceKind.GPU else 0))
    return Memory(
        peak_bytes=peak, reserved_bytes=reserved, by_kind=by_kind, available_bytes=available, peak_at=where
    )


def with_more(found: Memory, more: float) -> Memory:
    """The same with more bytes of state for the whole step."""
    if not more:
        return found
    scale = found.reserved_bytes / max(1, found.peak_bytes)
    peak = found.peak_bytes + int(more)
    kinds = {**found.by_kind, "optimizer": found.by_kind["optimizer"] + int(more)}
    return replace(found, peak_bytes=peak, reserved_bytes=int(peak * scale), by_kind=kinds)


def workspace_bytes(device: Device) -> int:
    """What matrix products take as workspace."""
    return int(architectures.get(device.architecture).workspace_bytes or DEFAULT_WORKSPACE_BYTES)


def _by_kind(sizes: Iterable[Mapping[str, int]]) -> NDArray[np.int64]:
    """One row of bytes per mapping, one column per kind."""
    return np.array([[size.get(kind, 0) for kind in MEMORY_KINDS] for size in sizes], dtype=np.int64)


def plain_fit(found: Memory) -> Fit:
    """Whether a step fits."""
    return Fit(fits=found.fits, needed_bytes=found.reserved_bytes, available_bytes=found.available_bytes)


def fit(workload: Workload, found: Memory) -> Fit:
    """Whether it fits; if not, what the usual remedies would leave, from this step's own figures."""
    if found.fits:
        return plain_fit(found)
    kinds = found.by_kind
    ratio = found.reserved_bytes / max(1, found.peak_bytes)
    per_sample = kinds["activations"] + kinds["temporary"]
    fixed = found.peak_bytes - per_sample
    remedies: list[tuple[str, int]] = []
    if workload.batch > 1:
        room = found.available_bytes / ratio - fixed
        batch = int(workload.batch * room / per_sample) if per_sample and room > 0 else 0
        if batch >= 1:
            remedies.append((f"batch {batch}", int((fixed + per_sample * batch / workload.batch) * ratio)))
    if not workload.options.get("checkpointing"):
        blocks = [s for s in workload.segments if s.phase == Phase.FORWARD and s.path]
        largest = max((sum(s.net.values()) for s in blocks), default=0)
        kept = sum(
            1
            for i in workload.order
            if workload.segments[i].phase == Phase.FORWARD and workload.segments[i].path
        )
        if largest and kept:
            saved = sum(
                max(0, sum(s.net.values()))
                for s in (workload.segments[i] for i in workload.order)
                if s.phase == Phase.FORWARD and s.path
            )
            remedies.append(("--checkpointing", int((found.peak_bytes - saved * 0.85 + largest) * ratio)))
    if workload.precision in (Precision.FP32, Precision.TF32):
        remedies.append(
            (
                "--precision bf16",
                int((found.peak_bytes - (found.peak_bytes - kinds["workspace"]) / 2) * ratio),
            )
        )
    remedies.append(
        (
            "sharding parameters, gradients and optimizer over 8 devices",
            int(
                (found.peak_bytes - 0.875 * (kinds["parameters"] + kinds["gradients"] + kinds["optimizer"]))
                * ratio
            ),
        )
    )
    return replace(plain_fit(found), remedies=tuple(remedies))
