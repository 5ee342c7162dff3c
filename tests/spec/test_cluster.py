"""Clusters: where groups sit, what they can use, and what the reader says about bad files."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.catalog import clusters, devices
from paceline.errors import SpecError, UnknownName
from paceline.spec import cluster as spec
from paceline.spec.cluster import Cluster

GOOD = """\
name = "pod"
device = "h100-sxm"
nodes = 4
[node]
devices = 8
[tier.nvswitch]
kind = "nvswitch"
domain = 8
bandwidth = "450 GB/s"
features = ["nvls"]
[tier.network]
kind = "roce"
bandwidth = "25 GB/s"
node_bandwidth = "50 GB/s"
"""


def parse(text):
    return spec.parse(text, "pod.toml", clusters.get, devices.get)


POD = parse(GOOD)


def test_file():
    assert (POD.device_count, POD.node_devices, POD.device.name) == (32, 8, "h100-sxm")
    assert [tier.kind for tier in POD.tiers] == ["nvswitch", "roce"] and [POD.domain(i) for i in (0, 1)] == [
        8,
        32,
    ]
    assert POD.tiers[0].features == ("nvls",) and POD.tiers[1].network and not POD.tiers[0].network
    assert POD.facts["tier.network.bandwidth"].kind == "declared"


@pytest.mark.parametrize(
    ("size", "stride", "base", "members"),
    [
        (8, 1, 0, (8, 8)),
        (4, 1, 4, (4, 4)),
        (16, 1, 0, (8, 16)),
        (4, 8, 0, (1, 4)),
        (4, 8, 3, (1, 4)),
        (8, 4, 0, (2, 8)),
        (4, 2, 1, (4, 4)),
        (10, 3, 0, (3, 10)),
        (6, 1, 5, (3, 6)),
        (32, 1, 0, (8, 32)),
        (1, 1, 0, (1, 1)),
    ],
)
def test_group_placement(size, stride, base, members):
    group = POD.group(size, stride, base)
    assert group.members == members
    assert list(group.ranks) == [base + i * stride for i in range(size)]


@given(st.integers(1, 32), st.integers(1, 32), st.integers(0, 31))
def test_members_are_those_counted(size, stride, base):
    if base + (size - 1) * stride >= 32:
        with pytest.raises(SpecError, match="needs .* devices; pod has 32"):
            POD.group(size, stride, base)
        return
    group = POD.group(size, stride, base)
    for i, members in enumerate(group.members):
        domains = [rank // POD.domain(i) for rank in group.ranks]
        assert members == max(map(domains.count, domains))


def test_uplinks_and_shared_nics():
    everyone = POD.group(32)
    assert POD.uplink(everyone, 0) == 450e9 and POD.uplink(everyone, 1) == 50e9
    # one rank a node: alone it can use 25 GB/s; beside its seven siblings it has an eighth of the node's
    assert POD.uplink(POD.group(4, 8, concurrent=False), 1) == 25e9
    assert POD.uplink(POD.group(4, 8), 1) == 50e9 / 8
    narrow = parse(GOOD + "oversubscription = 2\n")
    assert narrow.uplink(everyone, 1) == 25e9


def test_links_without_a_switch():
    amd = Cluster.parse("8xmi300x")
    assert amd.uplink(amd.group(8), 0) == 448e9 and amd.uplink(amd.group(2), 0) == 64e9
    dgx1 = Cluster.parse("dgx-1-p100")
    assert [dgx1.uplink(dgx1.group(n), 0) / 20e9 for n in (2, 4, 8)] == [1, 3, 4]
    torus = Cluster.parse("16xtpu-v4-pod")
    assert [torus.uplink(torus.group(n), 0) / 100e9 for n in (4, 16, 64)] == [1, 2, 3]


def test_written_clusters():
    assert Cluster.parse("32xdgx-h100").device_count == 256
    assert Cluster.parse("2xnvl72").device_count == 144
    mine = Cluster.parse("4x8xh100-sxm@400Gb/s/node")
    assert (mine.nodes, mine.node_devices, mine.tiers[1].node_bandwidth_Bps, mine.tiers[1].kind) == (
        4,
        8,
        50e9,
        "infiniband",
    )
    assert (
        Cluster.parse("8xp100@10Gb/s").tiers[0].kind == "ethernet"
        and Cluster.parse("8xp100@10Gb/s").nodes == 8
    )
    assert Cluster.parse("8xp100-node-10gbe").nodes == 8
    assert (one := Cluster.parse("h200")).device_count == 1 and one.group(1).size == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("32xdgx-h10", "did you mean 'dgx-h100'"),
        ("4x8xh100-sxm", "4 hosts need a network"),
        ("4xh100@fast", "cannot read 'fast'"),
        ("0xdgx-h100", "at least one node"),
        ("4xh100@0Gb/s", "above zero"),
        ("2000xtpu-v4-pod", "joins 4096"),
        ("absent.toml", "No such file"),
        ("4xh100@400 GHz", "unknown unit"),
        ("", "unknown cluster"),
        ("@10Gb/s", "unknown cluster"),
    ],
)
def test_bad_text_is_one_line(text, message):
    with pytest.raises((SpecError, UnknownName), match=message) as caught:
        Cluster.parse(text)
    assert "\n" not in str(caught.value)


def test_like_and_mix(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'like = "dgx-h100"\nnodes = 4\n[tier.rails]\nbandwidth = "100 Gb/s"\n[stragglers]\ncv = "5'
        ' %"\n[mix]\na100 = 1\n'
    )
    mine = Cluster.parse(str(path))
    assert (
        mine.name == "mine" and mine.tiers[1].bandwidth_Bps == 12.5e9 and mine.tiers[1].kind == "infiniband"
    )
    assert mine.straggler_cv == pytest.approx(0.05)
    assert [(device.name, nodes) for device, nodes in mine.devices] == [("h100-sxm", 3), ("a100-sxm-80gb", 1)]
    assert [nodes for _, nodes in mine.scaled(2).devices] == [6, 2]
    path.write_text(f'like = "{path.as_posix()}"\n')
    with pytest.raises(SpecError, match="line 1, like: .*leads back"):
        Cluster.parse(str(path))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nodes = 4", "nods = 4", r"line 3, nods: .*did you mean 'nodes'"),
        ("nodes = 4", 'nodes = "4"', r"line 3, nodes: expected a whole number"),
        ("nodes = 4", "nodes = 0", r"line 3, nodes: must be at least 1"),
        ("devices = 8", "devices = 7.5", r"line 5, node.devices: expected a whole"),
        ("devices = 8", "gpus = 8", r"line 5, node.gpus: unknown key"),
        ('kind = "roce"', 'kind = "rocee"', r"line 12, tier.network.kind: .*did you mean 'roce'"),
        ('"25 GB/s"', '"25 GB"', r"line 13, tier.network.bandwidth: unknown unit"),
        ('["nvls"]', '["nvl"]', r"line 10, tier.nvswitch.features: .*'nvls'"),
        ('["nvls"]', '"nvls"', r"line 10, tier.nvswitch.features: expected a list"),
        ("domain = 8\n", "", r"tier.nvswitch: missing domain"),
        ('bandwidth = "25', 'bandwith = "25', r"line 13, tier.network.bandwith: .*did you mean 'bandwidth'"),
        ('kind = "roce"\n', "", r"line 11, tier.network: missing kind"),
        ('device = "h100-sxm"\n', "", "device: missing"),
        ("[node]\ndevices = 8\n", "", "node: missing node.devices"),
        ('node_bandwidth = "50 GB/s"', "domain = 12", "line 14, tier.network.domain: 12 devices are not"),
        (
            'node_bandwidth = "50 GB/s"',
            "domain = 16",
            "line 14, tier.network.domain: 16 devices are joined, but the cluster has 32",
        ),
        ("[node]", "[mix]\na100 = 9\n[node]", "line 4, mix: names more nodes"),
        ("[node]", "[mix]\na100 = 0.5\n[node]", "line 5, mix.a100: expected a number"),
        ("[node]", "[stragglers]\nsd = 1\n[node]", "line 5, stragglers.sd: unknown key"),
    ],
)
def test_bad_file_names_line_and_key(old, new, message):
    assert old in GOOD
    with pytest.raises(SpecError, match="pod.toml: .*" + message):
        parse(GOOD.replace(old, new))


def test_unknown_device_suggests():
    with pytest.raises(UnknownName, match="did you mean.*'h100-sxm'"):
        parse(GOOD.replace("h100-sxm", "h100-smx"))
