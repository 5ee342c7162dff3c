"""Every step through parameter servers: gradients as they become ready, parameters back as the forward pass
needs them.

    ps-sync     servers on hosts, each with a node's network; gradients encoded if the plan says so
    hosted      the framework keeps the parameters in the memory of the devices' own host
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

from paceline.cost.compression import wire_bytes
from paceline.cost.host_link import LINK_SHARE, SUM_BPS, link_rate
from paceline.sim.program import Label
from paceline.sim.work import GATHERS, REDUCTION
from paceline.spec.cluster import Cluster
from paceline.spec.compression import Scheme
from paceline.spec.synchronisation import Relaxation
from paceline.sync.accuracy import accuracy
from paceline.sync.compressed import coded, codes_of, decoding_s, encoding_s
from paceline.sync.servers import servers
from paceline.sync.way import Gradient, Message, Side, Way, by_layer, full_bytes, in_buckets


def served(relax: Relaxation) -> Way:
    """Servers sum and update; workers send gradients layer by layer."""
    scheme = relax.scheme
    return Way(
        messages=partial(through_servers, relax),
        accuracy=accuracy(relax),
        state_bytes=scheme.state_bytes if relax.compress else 0.0,
        update_share=lambda replicas: 0.0 if replicas > 1 else 1.0,
        code=scheme.title if relax.compress else "",
    )


def through_servers(relax: Relaxation, side: Side, gradients: Sequence[Gradient]) -> Iterator[Message]:
    """A layer's gradient to the servers, and its parameters back."""
    mesh, workers = side.mesh, side.mesh.plan.ranks
    if mesh.group("dp").size == 1:
        return
    found, codes = servers(mesh.cluster, workers, relax.servers), codes_of(relax.scheme, gradients)
    for layer in by_layer(gradients):
        up = down = whole = full_bytes(layer)
        coding = 0.0, 0.0
        if relax.compress:
            tensors = coded(codes, layer)
            up = sum(count * wire_bytes(*tensor) for tensor, count in tensors.items())
            down = _back_bytes(layer, codes, workers)
            coding = encoding_s(tensors, side), decoding_s(tensors, 1, side)
        # servers add up what they decoded
        push_s = found.way_s(up, workers) + found.sum_s(whole, workers)
        yield _through(layer, push_s, found.way_s(down, workers), *coding)


def _through(
    gradients: Sequence[Gradient],
    push_s: float,
    pull_s: float,
    encode_s: float = 0.0,
    decode_s: float = 0.0,
    early: bool = True,
) -> Message:
    """Gradients to servers, and parameters back, in so many seconds."""
    return Message(
        gradients=gradients,
        reduce=(Label(REDUCTION, REDUCTION, push_s),),
        gather=(Label(GATHERS, GATHERS, pull_s),),
        encode_s=encode_s,
        decode_s=decode_s,
        early=early,
    )


def _back_bytes(layer: Sequence[Gradient], codes: dict[str, Scheme], workers: int) -> float:
    """Bytes from servers: of TernGrad a sum of as many ternary values as there are workers, of others whole
    parameters.
    """
    trits = math.log2(1 + 2 * workers) / 8
    ternary = [gradient for gradient in layer if codes[gradient.name].name == "terngrad"]
    others = [gradient for gradient in layer if codes[gradient.name].name != "terngrad"]
    return trits * sum(g.numel for g in ternary) + sum(g.parameter_bytes for g in others)


# -- by the framework, on the devices' own hosts ---------------------------------------------------


def through_hosts(side: Side, gradients: Sequence[Gradient]) -> Iterator[Message]:
    """Every gradient to its host, where all of the node's are added up, and its parameter back."""
    here = min(side.mesh.plan.dp, side.mesh.cluster.node_devices)
    if side.mesh.group("dp").size == 1:
        return
    for bucket in in_buckets(side, gradients, lambda gradient: gradient.bytes):
        size = full_bytes(bucket)
        way_s = _host_way_s(side.mesh.cluster, size, here, side.mesh.plan.dp // here)
        yield _through(bucket, way_s + here * size / SUM_BPS, way_s, early=side.timing.early)


def _host_way_s(cluster: Cluster, size: float, here: int, nodes: int) -> float:
    """Seconds in which every device of a node copies so many bytes to the host or back, and nodes exchange
    their parts.
    """
    copy_s = size / link_rate(cluster.device, here)
    if nodes == 1:
        return copy_s
    network = next(tier for tier in reversed(cluster.tiers) if tier.network)
    rate = network.node_bandwidth_Bps or network.bandwidth_Bps * cluster.node_devices
    return copy_s + size * (nodes - 1) / nodes / (LINK_SHARE * rate)


#: the framework's own server
HOSTED = Way(messages=through_hosts, update_share=lambda replicas: 0.0 if replicas > 1 else 1.0)
