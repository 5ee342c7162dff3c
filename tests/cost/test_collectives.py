"""What collectives cost: closed forms, order, placement, the libraries' choices, and fair shares of links."""

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cost import collectives
from paceline.cost.collectives import (
    OPS,
    PAYLOAD,
    choice,
    collective_s,
    constants,
    lines,
    max_min,
    share_links,
    sigma,
)
from paceline.errors import SpecError, UnknownName
from paceline.spec.cluster import Cluster

FLAT = Cluster.parse("16xvista-gh200")  # one device a node, one network
DGX = Cluster.parse("16xdgx-h100")
CLUSTERS = [
    FLAT,
    DGX,
    *map(
        Cluster.parse,
        ("4xdgx-1-v100", "8xp100-node-10gbe", "2xgb200-nvl72", "4xmi300x-node", "4xp4d", "16xtpu-v4-pod"),
    ),
]


def only(op, group, cluster, library="nccl", **wanted):
    found = [
        line
        for line in lines(op, group, cluster, library)
        if all(getattr(line, k) == v for k, v in wanted.items())
    ]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("n", [2, 3, 8, 16])
@pytest.mark.parametrize("protocol", ["ll", "ll128", "simple"])
def test_ring_closed_form(n, protocol):
    known = constants("nccl")
    link = known.links["infiniband"]
    ring = only("all_reduce", FLAT.group(n), FLAT, algorithm="ring", protocol=protocol)
    assert ring.beta == pytest.approx(2 * (n - 1) / n / (50e9 * link.share * PAYLOAD[protocol]))
    assert ring.alpha_s == pytest.approx(known.base_s + 2 * (n - 1) * link.hop_s[protocol])
    gather = only("all_gather", FLAT.group(n), FLAT, algorithm="ring", protocol=protocol)
    assert gather.beta == pytest.approx(ring.beta / 2)


def test_ring_is_as_fast_as_its_narrowest_tier():
    share = constants("nccl").links["nvswitch"].share
    inside = only("all_gather", DGX.group(8), DGX, algorithm="ring", protocol="simple")
    assert inside.beta == pytest.approx(7 / 8 / (450e9 * share))
    across = only("all_gather", DGX.group(128), DGX, algorithm="ring", protocol="simple")
    assert across.beta == pytest.approx(
        127 / 128 / min(450e9 * share, 8 * 50e9 * constants("nccl").links["infiniband"].share)
    )
    rails = only("all_gather", DGX.group(16, 8), DGX, algorithm="ring", protocol="simple")
    assert rails.beta == pytest.approx(15 / 16 / (50e9 * constants("nccl").links["infiniband"].share))


def test_library_chooses_by_size():
    group = DGX.group(128)
    assert (
        choice("all_reduce", 1e3, group, DGX).protocol == "ll"
        and choice("all_reduce", 1e3, group, DGX).algorithm == "tree"
    )
    assert choice("all_reduce", 4e9, group, DGX).protocol == "simple"
    assert choice("all_reduce", 4e9, DGX.group(8), DGX).algorithm == "nvls"
    assert choice("all_reduce", 4e9, group, DGX, "rccl").algorithm != "nvls-tree"
    cori = Cluster.parse("64xcori-haswell")
    assert choice("all_reduce", 8, cori.group(64), cori, "mpi").algorithm == "doubling"
    assert choice("all_reduce", 1e5, cori.group(64), cori, "mpi").algorithm == "halving-doubling"


def test_gloo_reduce_scatter_moves_what_all_reduce_moves():
    group = FLAT.group(8)
    scatter, reduce = (only(op, group, FLAT, "gloo") for op in ("reduce_scatter", "all_reduce"))
    assert scatter.alpha_s == reduce.alpha_s and scatter.beta - constants("gloo").copy == pytest.approx(
        reduce.beta
    )
    assert collective_s("reduce_scatter", 1e8, group, FLAT, "nccl") < 0.6 * collective_s(
        "all_reduce", 1e8, group, FLAT, "nccl"
    )


@given(
    st.sampled_from(OPS),
    st.sampled_from(range(len(CLUSTERS))),
    st.integers(2, 16),
    st.sampled_from((1, 2, 4)),
    st.sampled_from(collectives.LIBRARIES),
)
def test_order(op, which, size, stride, library):
    """Time rises with size; more bandwidth and less latency never make it slower."""
    cluster = CLUSTERS[which]
    size = 2 if op == "send_recv" else min(size, cluster.device_count // stride)
    if size < 2:
        return
    group = cluster.group(size, stride)
    sizes = np.logspace(0, 10, 40)
    seconds = collective_s(op, sizes, group, cluster, library)
    assert (np.diff(seconds) > 0).all() and (seconds > 0).all() and np.isfinite(seconds).all()
    wide = replace(
        cluster,
        tiers=tuple(
            replace(
                t,
                bandwidth_Bps=2 * t.bandwidth_Bps,
                node_bandwidth_Bps=t.node_bandwidth_Bps and 2 * t.node_bandwidth_Bps,
            )
            for t in cluster.tiers
        ),
    )
    far = replace(
        cluster, tiers=tuple(replace(t, latency_s=(t.latency_s or 0) + 1e-4) for t in cluster.tiers)
    )
    assert (collective_s(op, sizes, group, wide, library) <= seconds * (1 + 1e-12)).all()
    assert (collective_s(op, sizes, group, far, library) >= seconds).all()


def test_farther_is_slower():
    near, apart = DGX.group(8), DGX.group(8, 8)
    for op in OPS:
        assert collective_s(op, 1e8, near, DGX) < collective_s(op, 1e8, apart, DGX), op


def test_edges():
    one = DGX.group(1)
    assert collective_s("all_reduce", 1e9, one, DGX) == 0
    assert collective_s("all_reduce", 0, DGX.group(8), DGX) > 0
    assert collective_s("all_reduce", [1e3, 1e6], DGX.group(8), DGX).shape == (2,)
    with pytest.raises(UnknownName, match="did you mean 'all_reduce'"):
        collective_s("allreduce", 1, one, DGX)
    with pytest.raises(UnknownName, match="libraries: nccl"):
        collective_s("all_reduce", 1, one, DGX, "ncl")
    with pytest.raises(SpecError, match="zero bytes or more, got -1"):
        collective_s("all_reduce", -1, one, DGX)
    assert 0 < sigma(1e9, DGX.group(8), DGX) < 0.5


def test_thousands_of_sizes_take_milliseconds():
    group = DGX.group(64)
    sizes = np.logspace(2, 10, 5000)
    collective_s("all_reduce", 1.0, group, DGX)
    start = time.process_time()
    collective_s("all_reduce", sizes, group, DGX)
    assert time.process_time() - start < 0.05


# -- contention


def test_fair_shares_by_hand():
    # two flows on a link of 10, one of them also on a link of 3: 3 and 7
    assert max_min(
        np.array([[1.0, 1.0], [1.0, 0.0]]), np.array([10.0, 3.0]), np.array([np.inf, np.inf])
    ).tolist() == [3, 7]
    # three on one link, one that wants only 1: it gets 1, the others share the rest
    assert max_min(np.ones((1, 3)), np.array([10.0]), np.array([1.0, np.inf, np.inf])).tolist() == [
        1,
        4.5,
        4.5,
    ]
    assert max_min(np.zeros((0, 1)), np.zeros(0), np.array([5.0])).tolist() == [5]


def test_flows_on_a_cluster():
    alone = share_links([DGX.group(16, 8)], DGX)
    assert alone == pytest.approx([50e9])
    # eight rails at once have a NIC each; the same rail twice shares it
    assert share_links([DGX.group(16, 8, i) for i in range(8)], DGX) == pytest.approx([50e9] * 8)
    assert share_links([DGX.group(16, 8)] * 2, DGX) == pytest.approx([25e9] * 2)
    p4d = Cluster.parse("2xp4d")  # four NICs for eight devices
    assert share_links([p4d.group(2, 8, i) for i in range(8)], p4d) == pytest.approx([6.25e9] * 8)
    assert share_links([p4d.group(2, 8), p4d.group(4, 1, 2)], p4d) == pytest.approx([12.5e9, 300e9])
    assert share_links([DGX.group(1)], DGX).tolist() == [np.inf]


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_max_min_properties(links, flows, data):
    load = np.array(
        data.draw(
            st.lists(
                st.lists(st.sampled_from((0.0, 0.5, 1.0)), min_size=flows, max_size=flows),
                min_size=links,
                max_size=links,
            )
        )
    )
    capacity = np.array(data.draw(st.lists(st.floats(0.5, 10), min_size=links, max_size=links)))
    most = np.array(data.draw(st.lists(st.floats(0.5, 10), min_size=flows, max_size=flows)))
    rates = max_min(load, capacity, most)
    used = load @ rates
    assert (used <= capacity * (1 + 1e-6)).all() and (rates <= most * (1 + 1e-9)).all()
    # each flow is held back by its own limit or by a full link on which nobody who could yield is faster
    for f in range(flows):
        full = (load[:, f] > 0) & (used >= capacity * (1 - 1e-6))
        bottleneck = any(
            rates[f] >= rates[load[link] > 0].max() * (1 - 1e-6) for link in np.flatnonzero(full)
        )
        assert rates[f] >= most[f] * (1 - 1e-6) or bottleneck
