"""Cluster facts: one TOML file per kind of node or pod, read on first use; `get` also reads what users
write.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from pathlib import Path

from paceline import units
from paceline.catalog import architectures, devices
from paceline.errors import SpecError, UnitError, UnknownName
from paceline.spec import checks
from paceline.spec import cluster as spec
from paceline.spec.cluster import Cluster, Tier
from paceline.spec.device import Device
from paceline.spec.facts import Fact
from paceline.spec.vocabulary import DeviceKind

_WRITTEN = re.compile(r"^(?:(\d+)\s*x\s*)?(?:(\d+)\s*x\s*)?([^@]*?)\s*(?:@\s*(.+))?$", re.IGNORECASE)


@cache
def _files() -> dict[str, str]:
    """Cluster name -> TOML text, for every file of the catalog."""
    folder = files(__package__)
    return {entry.name[:-5]: entry.read_text() for entry in folder.iterdir() if entry.name.endswith(".toml")}


@cache
def _load(name: str) -> Cluster:
    return spec.parse(_files()[name], f"{name}.toml", get, devices.get)


@cache
def _aliases() -> dict[str, str]:
    """Folded name or alias -> catalog name."""
    return {devices.fold(alias): name for name in _files() for alias in (name, *_load(name).aliases)}


def names() -> list[str]:
    """Names of the catalog's clusters, sorted."""
    return sorted(_files())


def get(text: str) -> Cluster:
    """The cluster that `text` means:

    dgx-h100, 32xdgx-h100       one, or 32, of a kind of node (or pod) of the catalog, in its own network
    pod.toml, 4xpod.toml        of a file
    8xh100-sxm                  one node of eight such devices
    4x8xh100-sxm@400Gb/s/gpu    four hosts of eight such devices, each with 400 Gb/s of its own
    4x8xh100-sxm@400Gb/s/node   the same, but the devices of a host share 400 Gb/s
    4xp100-pcie@10Gb/s          four hosts of one device
    """
    match = _WRITTEN.match(checks.name("cluster", text).strip())
    assert match is not None  # it matches any text
    first, second, name, rate = match[1], match[2], match[3], match[4]
    count = int(first) if first else 1
    if rate is None and second is None and (found := _known(name)) is not None:
        return found.scaled(count)
    try:
        device = devices.get(name)
    except UnknownName:
        known = [*names(), *_aliases(), *devices.names()]
        raise UnknownName(
            "cluster", name, known, "`paceline clusters` lists all; a .toml file describes your own"
        ) from None
    if rate is None:
        if second is not None and count > 1:
            raise SpecError(
                f"{text!r}: {count} hosts need a network; write its rate, as in '{text}@400Gb/s/gpu'"
            )
        return _hosts(text, device, 1, int(second) if second else count, None)
    return _hosts(text, device, count, int(second) if second else 1, rate)


def _known(name: str) -> Cluster | None:
    if name.endswith(".toml"):
        return spec.read(Path(name), get, devices.get)
    found = name if name in _files() else _aliases().get(devices.fold(name))
    return _load(found) if found else None


def _hosts(text: str, device: Device, nodes: int, each: int, rate: str | None) -> Cluster:
    """Hosts of which only the device and the network's rate are known: links of the device inside, one
    network outside.
    """
    if nodes < 1 or each < 1:
        raise SpecError(f"{text!r}: a cluster has at least one node and one device")
    tiers, facts = [], {"node.devices": Fact(value=each, kind="declared", source=text)}
    if each > 1:
        inside = link(device, each)
        path = "link.peer" if device.peer_bandwidth_Bps else "link.host"
        assumed = Fact(
            value=inside.bandwidth_Bps, kind="guessed", source="no source gives this device's links"
        )
        facts[f"tier.{inside.name}.bandwidth"] = device.facts.get(path, assumed)
        tiers.append(inside)
    if rate is not None:
        outside = _network(text, rate, each)
        key, value = (
            ("node_bandwidth", outside.node_bandwidth_Bps)
            if outside.node_bandwidth_Bps
            else ("bandwidth", outside.bandwidth_Bps)
        )
        tiers.append(outside)
        facts[f"tier.network.{key}"] = Fact(value=value, kind="declared", source=text)
    title = f"{nodes} x {each} {device.title}"
    return Cluster(
        name=text, title=title, device=device, node_devices=each, nodes=nodes, tiers=tuple(tiers), facts=facts
    )


#: a network of hosts that is this fast is taken to bypass the kernel
RDMA_Bps = 5e9
#: of whom a rate is, as it is written after it -> whether the devices of a host share it
_SHARED = {"gpu": False, "device": False, "node": True}


def _network(text: str, rate: str, each: int) -> Tier:
    """The network of hosts of `each` devices, of a rate such as 400Gb/s/gpu or 3200Gb/s/node."""
    written, _, whose = rate.strip().rpartition("/")
    if whose not in _SHARED:
        written, whose = rate.strip(), ""
    try:
        value = units.parse(written, "bandwidth")
    except UnitError as error:
        raise SpecError(f"{text!r}: {error}") from None
    if value <= 0:
        raise SpecError(f"{text!r}: the network's rate must be above zero")
    if not whose and each > 1:
        raise SpecError(
            f"{text!r}: of whom is the rate? write @{written}/gpu (each of the {each} devices of a host has a"
            f" link of its own) or @{written}/node (they share it)"
        )
    shared = _SHARED[whose or "node"]
    node = value if shared else value * each
    kind = "infiniband" if node >= RDMA_Bps else "ethernet"
    return Tier(name="network", kind=kind, bandwidth_Bps=value, node_bandwidth_Bps=value if shared else None)


def link(device: Device, each: int) -> Tier:
    """What joins the devices of a node of which nothing else is known: their own links, else PCI Express."""
    if device.peer_bandwidth_Bps is None:
        if device.kind == DeviceKind.CPU:
            return Tier(
                name="host", kind="loopback", domain=each, bandwidth_Bps=device.memory_bandwidth_Bps / 4
            )
        return Tier(name="pcie", kind="pcie", domain=each, bandwidth_Bps=device.host_bandwidth_Bps or 15.75e9)
    kind, topology = {"amd": ("xgmi", "mesh"), "google": ("ici", "torus-3d")}.get(
        device.vendor, ("nvswitch", "switch")
    )
    multicasts = architectures.get(device.architecture).nvls_share is not None
    nvls = multicasts and kind == "nvswitch"
    return Tier(
        name=kind,
        kind=kind,
        domain=each,
        bandwidth_Bps=device.peer_bandwidth_Bps,
        topology=topology,
        features=("nvls",) if nvls else (),
    )
