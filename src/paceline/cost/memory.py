"""Peak memory of a step: live bytes along its segments, workspaces, and what the allocator reserves."""

from __future__ import annotations

from paceline.spec.device import Device
from paceline.spec.prediction import Fit, Memory
from paceline.spec.workload import MEMORY_KINDS, Workload

#: what cuBLAS and cuBLASLt take as workspace through torch's allocator, by architecture (32 MiB each since Hopper)
WORKSPACE_BYTES = {"hopper": 2 * 32 * 2**20, "blackwell": 2 * 32 * 2**20}
DEFAULT_WORKSPACE_BYTES = 2 * 8 * 2**20
#: context, kernels and what the driver keeps: not available to a training step
CONTEXT_BYTES = 600e6
#: blocks of the caching allocator above 1 MiB come in multiples of 2 MiB, smaller ones share 2 MiB segments;
#: fragmentation on top, as measured over the H200 steps (reserved over allocated)
FRAGMENTATION = 1.05


def memory(workload: Workload, device: Device) -> Memory:
    """Peak allocated bytes by kind, at the moment when most is live."""
    live = dict.fromkeys(MEMORY_KINDS, 0)
    for kind, size in workload.resident.items():
        live[kind] = live.get(kind, 0) + size
    best, by_kind, where = -1, dict(live), ""
    for index in workload.order:
        segment = workload.segments[index]
        total = sum(live.values()) + sum(segment.peak.values())
        if total > best:
            best, where = total, f"{segment.path or 'outside blocks'}, {segment.phase}"
            by_kind = {kind: live.get(kind, 0) + segment.peak.get(kind, 0) for kind in MEMORY_KINDS}
        for kind, size in segment.net.items():
            live[kind] = live.get(kind, 0) + size
    by_kind = {kind: max(0, size) for kind, size in by_kind.items()}
    if device.kind == "gpu":
        by_kind["workspace"] += WORKSPACE_BYTES.get(device.architecture, DEFAULT_WORKSPACE_BYTES)
    peak = sum(by_kind.values())
    reserved = int(peak * (FRAGMENTATION if device.kind == "gpu" else 1.0))
    available = int(device.memory_bytes - (CONTEXT_BYTES if device.kind == "gpu" else 0))
    return Memory(peak_bytes=peak, reserved_bytes=reserved, by_kind=by_kind, available_bytes=available, peak_at=where)


def fit(workload: Workload, found: Memory) -> Fit:
    """Whether it fits; if not, what the usual remedies would leave, from this step's own figures."""
    if found.fits:
        return Fit(fits=True, needed_bytes=found.reserved_bytes, available_bytes=found.available_bytes)
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
        blocks = [s for s in workload.segments if s.phase == "forward" and s.path]
        largest = max((sum(s.net.values()) for s in blocks), default=0)
        kept = sum(1 for i in workload.order if workload.segments[i].phase == "forward" and workload.segments[i].path)
        if largest and kept:
            saved = sum(max(0, sum(workload.segments[i].net.values())) for i in workload.order if workload.segments[i] in blocks)
            remedies.append(("--checkpointing", int((found.peak_bytes - saved * 0.85 + largest) * ratio)))
    if workload.precision in ("fp32", "tf32"):
        remedies.append(("--precision bf16", int((found.peak_bytes - (found.peak_bytes - kinds["workspace"]) / 2) * ratio)))
    remedies.append(("sharding parameters, gradients and optimizer over 8 devices",
                     int((found.peak_bytes - 0.875 * (kinds["parameters"] + kinds["gradients"] + kinds["optimizer"])) * ratio)))
    return Fit(fits=False, needed_bytes=found.reserved_bytes, available_bytes=found.available_bytes, remedies=tuple(remedies))
