"""How far off an answer may be: the spreads that a 90 % interval is made of, of time and of memory.

Operators of one group err together and those of different groups apart; on top come the device, the
framework, the family of the model, and the host, which varies from run to run:

    time of the device   sigma^2 = sum over groups of (share * group)^2 + framework^2 + device^2 + family^2
    step of one device   sigma^2 = (device share * sigma)^2 + (host share * host)^2
    step of many         sigma^2 = (computing share * groups)^2 + (exposed share * network)^2
                                   + (0.3 * bubble share)^2 + framework^2 + device^2 + family^2

All are standard deviations of the logarithm. `spreads.toml` has them, each with what it was estimated on;
what was never measured has a spread of its own and is named in the answer.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

from paceline.cost.collectives import sigma
from paceline.cost.curves import Curves
from paceline.sim.mesh import Mesh
from paceline.spec.device import Device
from paceline.spec.framework import Framework
from paceline.spec.prediction import Evidence, Memory
from paceline.spec.vocabulary import DeviceKind

#: half-width of a 90 % interval in standard deviations
Z90 = 1.645
#: of seconds in which stages wait for one another
BUBBLE_SHARE = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A standard deviation of the logarithm, and what it was estimated on."""

    sigma: float
    source: str
    #: architectures with precisions of which it was estimated ("hopper fp8"); empty: it does not depend on
    #: them
    on: Sequence[str] = ()
    #: what was never measured, where this is the spread of something that was not
    unmeasured: str = ""


def _read() -> dict[str, dict[str, Spread]]:
    tables = tomllib.loads((files(__package__) / "spreads.toml").read_text())
    return {of: {name: Spread(**row) for name, row in rows.items()} for of, rows in tables.items()}


#: spreads by what they are of
SPREADS = _read()
OPERATORS, FRAMEWORKS, MODELS = SPREADS["operators"], SPREADS["frameworks"], SPREADS["models"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """The spreads that concern one prediction."""

    group: Spread
    #: those that all groups have in common, with what each is of
    common: tuple[tuple[str, Spread], ...]

    def sigma(
        self,
        spent: Mapping[str, float],
        limit: float = 0.0,
        *,
        exposed: float = 0.0,
        network: float = 0.0,
        bubble: float = 0.0,
    ) -> float:
        """Of a step, given the seconds of each group of operators, and the shares of the step that are
        exposed communication, with the network's spread, and bubble; without these, of device time.

        `limit` is what is not known of the power limit (`cost.operators.power_sigma`).
        """
        apart = self.group.sigma * math.hypot(*spent.values()) / (sum(spent.values()) or 1.0)
        computing = (1 - exposed) * math.hypot(apart, limit)
        common = (spread.sigma for _, spread in self.common)
        return math.hypot(computing, exposed * network, BUBBLE_SHARE * bubble, *common)

    def evidence(self) -> Iterator[Evidence]:
        """What the interval is as wide as it is for, widest first; what was never measured says so."""
        for name, spread in sorted(self.common, key=lambda pair: -pair[1].sigma):
            what, kind = f"interval, {name}: {100 * spread.sigma:.0f} %", "measured"
            if spread.unmeasured:
                what, kind = f"never measured: {spread.unmeasured.format(name)}", "guessed"
            if spread.sigma:
                yield Evidence(what=what, kind=kind, source=spread.source, sigma=spread.sigma)


def module_errors(device: Device, curves: Curves, framework: Framework) -> Errors:
    """Of a captured module on a device; frameworks that only exchange gradients differently are as PyTorch is
    on one device.
    """
    known, strange = SPREADS["modules"], framework.name == "torch-1"
    usual = known["torch"] if framework.host_scale == 1.0 else FRAMEWORKS["new"]
    return Errors(
        group=OPERATORS["strange_group" if strange else "group"],
        common=(of_device(device, curves), (framework.name, known.get(framework.name, usual))),
    )


def transformer_errors(
    device: Device, curves: Curves, framework: Framework, *, named: bool, precision: str, experts: bool
) -> Errors:
    """Of a transformer by its sizes; `named` says whether the user named the framework, or took what is
    usual.
    """
    name, where = framework.name, device.architecture
    known = SPREADS["transformers"].get(name)
    found = known or FRAMEWORKS["new"]
    if not named:
        found = FRAMEWORKS["unnamed"]
    common, measured = [(name, found)], known.on if known else ()
    if not any(pair.startswith(f"{where} ") for pair in measured):
        common.append(of_device(device, curves))
    elif f"{where} {precision}" not in measured and precision in ("fp8", "fp4"):
        common.append((f"{precision} on {where} with {name}", MODELS["new_precision"]))
    if experts:
        common.append(("experts", MODELS["experts"]))
    group = min(OPERATORS["large_group"], found, key=lambda spread: spread.sigma)
    return Errors(group=group, common=tuple(common))


def of_device(device: Device, curves: Curves) -> tuple[str, Spread]:
    """What the operators of a device are named in an answer, and their spread: least with curves of its own,
    most where another architecture's stand in.
    """
    kind, new = str(device.kind), curves.name not in (device.name, device.architecture)
    if device.kind is DeviceKind.GPU:
        kind = "new" if new else "alike"
        if device.calibration or curves.name == device.name or device.name in curves.devices:
            kind = "own"
    strange = new and device.kind is not DeviceKind.CPU
    return device.architecture if strange else device.name, SPREADS["devices"][kind]


def network_sigma(mesh: Mesh, size: float, axes: Iterable[str]) -> float:
    """Of collectives of so many bytes over some axes of a mesh: the widest."""
    groups = [group for group in map(mesh.group, axes) if group.size > 1]
    return max((float(sigma(size, group, mesh.cluster, mesh.library)) for group in groups), default=0.0)


def bounded(memory: Memory, spread: Spread) -> Memory:
    """Memory with the 90 % interval of what is allocated and of what is reserved."""
    peak_low, peak_high = around(memory.peak_bytes, spread.sigma)
    reserved_low, reserved_high = around(memory.reserved_bytes, spread.sigma)
    return replace(
        memory,
        peak_low_bytes=int(peak_low),
        peak_high_bytes=int(peak_high),
        reserved_low_bytes=int(reserved_low),
        reserved_high_bytes=int(reserved_high),
    )


def around(value: float, sigma: float) -> tuple[float, float]:
    """The 90 % interval of a value whose logarithm has this standard deviation."""
    return value * math.exp(-Z90 * sigma), value * math.exp(Z90 * sigma)
