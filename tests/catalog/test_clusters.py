"""The cluster catalog: every number has a source, and adds up."""

import tomllib
from importlib.resources import files

import pytest

from paceline.catalog import clusters, devices
from paceline.spec.facts import KINDS

NAMES = clusters.names()
REQUIRED = """
dgx-1-p100 dgx-1-v100 dgx-2 dgx-a100 dgx-h100 dgx-b200 gb200-nvl72 selene perlmutter-a100 vista-gh200
cori-haswell p100-node-10gbe k80-node-10gbe p4d p4de p5 torchtitan-h100 tpu-v4-pod tpu-v5p-pod tpu-v7x-pod
mi250x-node mi300x-node
"""


def raw(name):
    return tomllib.loads((files(clusters) / f"{name}.toml").read_text(encoding="utf-8"))


def test_required_clusters_are_there():
    assert set(REQUIRED.split()) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_facts_are_sourced(name):
    cluster, data = clusters.get(name), raw(name)
    sources = data.get("sources", {})
    assert cluster.name == name and cluster.title
    for path, fact in cluster.facts.items():
        assert fact.kind in KINDS and len(fact.source) > 10 and not fact.source.endswith(".toml"), path
    tables = (data.get("node", {}), *data.get("tier", {}).values())
    used = {entry["source"] for table in tables for entry in table.values() if isinstance(entry, dict)}
    assert used == set(sources), "a source that no fact uses, or a fact without one"


@pytest.mark.parametrize("name", NAMES)
def test_sane(name):
    cluster = clusters.get(name).scaled(4)
    assert cluster.group(cluster.device_count).members[-1] == cluster.device_count
    inner = cluster.tiers[0]
    peer = cluster.device.peer_bandwidth_Bps
    if (peer and inner.kind in ("nvlink", "nvswitch", "ici")) or inner.topology == "mesh":
        assert inner.bandwidth_Bps == pytest.approx(peer, rel=0.01)
    for tier in cluster.tiers[1:]:
        assert tier.bandwidth_Bps <= inner.bandwidth_Bps
        if tier.node_bandwidth_Bps:
            assert tier.bandwidth_Bps <= tier.node_bandwidth_Bps <= tier.bandwidth_Bps * cluster.node_devices


def test_names_do_not_hide_devices():
    owner = {}
    for name in NAMES:
        for alias in {devices.fold(alias) for alias in (name, *clusters.get(name).aliases)}:
            assert owner.setdefault(alias, name) == name, alias
            assert alias not in devices.names(), alias
