"""What a plan means where it does not say: one table, which prediction, planning and training read.

`spec.plan.resolve` fills a plan in from here. A way that is registered from outside the package has no row of
its own and takes those of `PLAIN`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.spec.vocabulary import Mode

#: devices of a node, where nothing is known of the cluster
NODE_DEVICES = 8
#: bytes of the first bucket of torch's DistributedDataParallel, which starts communication early
DDP_FIRST_BYTES = 2.0**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Settings of one way of synchronising."""

    #: steps from one exchange to the next
    period: int = 1
    #: updates that a worker may be ahead of the slowest
    staleness: int = 0
    #: workers whose gradients a step does not wait for
    backup: int = 0
    #: bytes of a bucket of gradients, and of the first one
    bucket_bytes: float = 25e6
    first_bucket_bytes: float = DDP_FIRST_BYTES
    source: str = ""


PLAIN = Defaults(source="torch.nn.parallel.DistributedDataParallel")
#: gradients that our own engine sends, full or encoded
ENGINE = Defaults(
    bucket_bytes=4e6, first_bucket_bytes=1e6, source="emulated links (docs/training.md, steps per second)"
)
DEFAULTS: Mapping[str, Defaults] = {
    Mode.LOCAL_SGD: Defaults(period=8, source="Lin et al., Don't Use Large Mini-Batches, ICLR 2020"),
    Mode.DILOCO: Defaults(period=500, source="Douillard et al., DiLoCo, 2023"),
    Mode.EASGD: Defaults(period=10, source="Zhang et al., Elastic Averaging SGD, NeurIPS 2015"),
    Mode.PS_BOUNDED: Defaults(staleness=8, source="chosen: no value is usual"),
    Mode.PS_BACKUP: Defaults(backup=1, source="chosen: the fewest that have an effect"),
}


def shard(replicas: int, node_devices: int = NODE_DEVICES) -> int:
    """Ranks that share one copy of the parameters under hsdp: as many as stay within a node."""
    return math.gcd(replicas, node_devices)


def island(mode: Mode, replicas: int, node_devices: int, nodes: int) -> int:
    """Ranks that average every step, of replicas that meet once in a period: a node under DiLoCo."""
    return math.gcd(replicas, node_devices) if mode is Mode.DILOCO and nodes > 1 else 1


def servers(nodes: int) -> int:
    """Parameter servers: one beside each node's devices."""
    return max(1, nodes)
