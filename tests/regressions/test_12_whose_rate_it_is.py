"""The rate of a written network says whose it is: of every device, or shared by the devices of a host."""

import pytest

from paceline.cli import main
from paceline.errors import SpecError
from paceline.spec.cluster import Cluster

GBPS = 1e9 / 8


def test_of_every_device():
    cluster = Cluster.parse("4x8xh100-sxm@400Gb/s/gpu")
    network = cluster.tiers[-1]
    assert (network.bandwidth_Bps, network.node_bandwidth_Bps) == (400 * GBPS, None)
    assert cluster.uplink(cluster.group(32), 1) == pytest.approx(3200 * GBPS)
    assert cluster.uplink(cluster.group(4, stride=8), 1) == pytest.approx(400 * GBPS)
    assert cluster.facts["tier.network.bandwidth"].value == 400 * GBPS


def test_shared_by_a_host():
    cluster = Cluster.parse("4x8xh100-sxm@3200Gb/s/node")
    assert cluster.tiers[-1].node_bandwidth_Bps == 3200 * GBPS
    assert cluster.uplink(cluster.group(32), 1) == pytest.approx(3200 * GBPS)


def test_the_same_network_by_both_names_takes_the_same_time():
    from paceline.cost.collectives import collective_s

    by_device, by_node = (Cluster.parse(f"4x8xh100-sxm@{rate}") for rate in ("400Gb/s/gpu", "3200Gb/s/node"))
    times = [collective_s("all_reduce", 1e9, cluster.group(32), cluster) for cluster in (by_device, by_node)]
    assert times[0] == pytest.approx(times[1], rel=1e-6)


@pytest.mark.parametrize("rate", ["800Gb/s", "800 Gb/s", "100GB/s"])
def test_a_rate_of_nobody_is_refused_with_both_spellings(rate):
    with pytest.raises(SpecError, match="of whom is the rate") as caught:
        Cluster.parse(f"4x8xh100-sxm@{rate}")
    said = str(caught.value)
    assert f"@{rate}/gpu" in said and f"@{rate}/node" in said and "\n" not in said


def test_on_the_command_line(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["predict", "gpt2", "--cluster", "4x8xh100-sxm@800Gb/s"])
    assert ended.value.code == 2 and "@800Gb/s/gpu" in capsys.readouterr().err


def test_hosts_of_one_device_need_neither():
    plain, gpu, node = (Cluster.parse(f"4x1xp100-pcie@10Gb/s{whose}") for whose in ("", "/gpu", "/node"))
    assert plain.tiers[-1].bandwidth_Bps == gpu.tiers[-1].bandwidth_Bps == node.tiers[-1].bandwidth_Bps


@pytest.mark.parametrize(
    ("text", "message"),
    [("4x8xh100-sxm@fast/gpu", "cannot read 'fast'"), ("4x8xh100-sxm@0Gb/s/node", "above zero")],
)
def test_bad_rates(text, message):
    with pytest.raises(SpecError, match=message):
        Cluster.parse(text)
