"""How frameworks bring the gradients of data-parallel ranks together, as far as it changes a step.

A plan says what is shared (`ddp`, `zero1`, `fsdp`...); this says in what pieces, when, and through what.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from paceline.errors import UnknownName
from paceline.spec.framework import Framework


@dataclass(frozen=True, kw_only=True)
class Synchronisation:
    """Pieces, timing and path of the reduction of gradients."""

    name: str
    title: str
    #: gradients go to a parameter server in the host's memory, which sums and updates, and parameters come back
    server: bool = False
    #: bytes from which on a bucket is sent; None: what the plan says, 0: every gradient by itself
    bucket_bytes: float | None = None
    #: of the first bucket, kept small so that communication starts early
    first_bucket_bytes: float = math.inf
    #: seconds after which a bucket is sent even if it is not full
    cycle_s: float = math.inf
    #: buckets are reduced while the backward pass goes on, not after it
    overlap: bool = True
    #: and also where micro-batches are accumulated, or then once, after the last of them
    overlap_accumulated: bool = True
    #: bytes of one element on the wire; 0: as the parameter is kept
    wire_bytes: int = 0
    #: times that gradients are copied on the device besides: into buckets, and back
    copies: float = 0.0
    #: share by which operators slow down while a collective runs beside them
    contention: float = Framework.contention


#: torch.nn.parallel.DistributedDataParallel: buckets in the order in which gradients become ready, a first one of 1 MiB
DDP = Synchronisation(name="ddp", title="PyTorch DistributedDataParallel", first_bucket_bytes=2.0**20, copies=2.0)
#: Horovod: a background thread fuses what has become ready in a cycle, up to 64 MiB, and reduces it beside the backward pass
HOROVOD = Synchronisation(name="horovod", title="Horovod", bucket_bytes=64 * 2.0**20, cycle_s=5e-3, copies=2.0, overlap_accumulated=False)
SYNCHRONISATIONS: dict[str, Synchronisation] = {s.name: s for s in (
    DDP,
    HOROVOD,
    replace(DDP, name="after-backward", title="one all-reduce after the backward pass", bucket_bytes=math.inf, overlap=False),
    Synchronisation(name="replicated", title="TensorFlow replicated variables: every gradient is reduced by itself", bucket_bytes=0.0),
    Synchronisation(name="parameter-server", title="TensorFlow parameter server on the host", bucket_bytes=0.0, server=True, contention=0.0),
    Synchronisation(name="kvstore", title="MXNet kvstore on devices: every gradient is reduced by itself", bucket_bytes=0.0),
)}


def get(name: str) -> Synchronisation:
    """The synchronisation called `name`."""
    if name not in SYNCHRONISATIONS:
        raise UnknownName("synchronisation", name, SYNCHRONISATIONS, f"known: {', '.join(SYNCHRONISATIONS)}")
    return SYNCHRONISATIONS[name]
