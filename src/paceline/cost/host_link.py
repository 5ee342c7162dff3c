"""Copies between devices and their host's memory, and sums there."""

from __future__ import annotations

from paceline.spec.device import Device

#: B/s of PCI Express 3.0 x16, where a device's file does not say, and the share of a link that copies reach
LINK_BPS, LINK_SHARE = 15.75e9, 0.75
#: devices that share one such link: two behind a switch, as in every server of eight
SHARED_BY = 2
#: B/s at which the cores of a host add gradients up
SUM_BPS = 20e9


def link_rate(device: Device, copying: int) -> float:
    """B/s of each of so many devices of a node while they copy to the host, or back, at once."""
    return (device.host_bandwidth_Bps or LINK_BPS) * LINK_SHARE / min(copying, SHARED_BY)
