"""A device: what one accelerator can do, each number with its source.

Facts come from TOML (`catalog/devices/*.toml`, or a user's own file for a chip that does not exist):

    name = "my-chip"
    like = "h100-sxm"                  # optional: take what is not given here from another device
    [peak]                             # dense, without sparsity
    bf16 = "2 PFLOP/s"
    fp8 = { value = "4 PFLOP/s", kind = "datasheet", source = "slide 12" }
    [memory]
    size = "192 GB"
    bandwidth = "8 TB/s"
    [sparsity]                         # optional: what its arithmetic makes of zeros
    two_four = 2                       # peak of 2:4 weights over the dense one
    weights = 0.9                      # share of the multiply-adds with a zero weight that take no time
    activations = "90 %"               # the same of zeros in activations and their gradients
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.errors import SpecError
from paceline.spec import checks
from paceline.spec.facts import KINDS, Fact, FactReader, read_text
from paceline.spec.vocabulary import DeviceKind, member

__all__ = ["DTYPES", "FIELDS", "KINDS", "Device", "Fact", "parse", "read"]

DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8")

#: TOML path -> (attribute, dimension)
FIELDS: dict[str, tuple[str, str]] = {
    "memory.size": ("memory_bytes", "bytes"),
    "memory.bandwidth": ("memory_bandwidth_Bps", "bandwidth"),
    "cache.l1": ("l1_bytes", "bytes"),
    "cache.l2": ("l2_bytes", "bytes"),
    "chip.sms": ("sm_count", "count"),
    "chip.lanes": ("sm_lanes", "count"),
    "chip.clock": ("clock_hz", "frequency"),
    "chip.launch": ("launch_s", "time"),
    "chip.exponentials": ("exponentials", "fraction"),
    "chip.tdp": ("tdp_w", "power"),
    "link.host": ("host_bandwidth_Bps", "bandwidth"),
    "link.peer": ("peer_bandwidth_Bps", "bandwidth"),
    "sparsity.two_four": ("two_four_rate", "count"),
    "sparsity.weights": ("weight_skips", "fraction"),
    "sparsity.activations": ("activation_skips", "fraction"),
    "price.hour": ("price_per_s", "price_rate"),
    "price.unit": ("price", "price"),
}
_TEXT_KEYS = {
    "name",
    "title",
    "vendor",
    "architecture",
    "kind",
    "year",
    "like",
    "aliases",
    "notes",
    "method_version",
}
_TYPES: dict[str, type] = {"year": int, "aliases": list, "method_version": object}
_SECTIONS = {"peak", "sources", "calibration", *(path.partition(".")[0] for path in FIELDS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator (or CPU). Bytes, seconds, FLOP/s; `None` where no source gives the number."""

    name: str
    title: str
    vendor: str = "unknown"
    architecture: str = "generic"
    kind: DeviceKind = DeviceKind.GPU
    year: int | None = None
    aliases: tuple[str, ...] = ()
    notes: str = ""
    #: dense FLOP/s by dtype: of the matrix units where a dtype has them, else of the vector units
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: float
    memory_bandwidth_Bps: float
    l1_bytes: float | None = None
    l2_bytes: float | None = None
    sm_count: int | None = None
    #: vector operations of one multiprocessor (of a TPU: one TensorCore) per cycle, where they are not a
    #: GPU's 128
    sm_lanes: float | None = None
    clock_hz: float | None = None
    launch_s: float | None = None
    #: exponentials per cycle, over those of the first chips of its architecture
    exponentials: float = 1.0
    tdp_w: float | None = None
    host_bandwidth_Bps: float | None = None
    peer_bandwidth_Bps: float | None = None
    #: peak of products with 2:4 weights over the dense one; None where only the architecture says it
    two_four_rate: float | None = None
    #: shares of the multiply-adds with a zero weight, and with a zero activation or gradient of one, that
    #: take no time
    weight_skips: float = 0.0
    activation_skips: float = 0.0
    price_per_s: float | None = None
    price: float | None = None
    #: constants measured on this very device by `paceline calibrate`; they win over fitted ones
    calibration: Mapping[str, float] = field(default_factory=dict)
    #: provenance by TOML path, such as `memory.bandwidth` or `peak.bf16`
    facts: Mapping[str, Fact] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.names("device", self)
        if type(self.kind) is not DeviceKind:
            kind = member(DeviceKind, f"device {self.name}: kind", self.kind, SpecError)
            object.__setattr__(self, "kind", kind)

    def peak(self, dtype: str) -> float:
        """Dense FLOP/s for `dtype`; a type the device lacks runs as the next wider one it has."""
        for candidate in _WIDER.get(dtype, (dtype,)):
            if candidate in self.peak_flops:
                return self.peak_flops[candidate]
        return max(self.peak_flops.values())


_WIDER = {
    "fp4": ("fp4", "fp8", "bf16", "fp16", "fp32"),
    "fp8": ("fp8", "bf16", "fp16", "fp32"),
    "int8": ("int8", "fp8", "bf16", "fp16", "fp32"),
    "bf16": ("bf16", "fp16", "fp32"),
    "fp16": ("fp16", "bf16", "fp32"),
    "tf32": ("tf32", "fp32"),
    "fp32": ("fp32", "tf32", "bf16"),
    "fp64": ("fp64", "fp32"),
}


def read(path: Path | str, lookup: Callable[[str], Device]) -> Device:
    """The device described by a TOML file; `lookup` resolves the name in its `like`."""
    return parse(read_text(path, "device"), str(path), lookup)


def parse(text: str, where: str, lookup: Callable[[str], Device]) -> Device:
    """The device described by TOML `text`; messages name `where`, the line and the key."""
    reader = _Reader(text, where, _TEXT_KEYS, _SECTIONS, _TYPES)
    try:
        base = lookup(reader.text("like")) if "like" in reader.data else None
    except RecursionError:
        raise reader.error("like", f"{reader.data['like']!r} leads back to this device") from None
    return reader.device(base)


class _Reader(FactReader):
    """Turns parsed TOML into a Device."""

    def device(self, base: Device | None) -> Device:
        facts: dict[str, Fact] = dict(base.facts) if base else {}
        for section in self.data:
            if section not in _SECTIONS - {"sources", "calibration"}:
                continue
            for leaf, raw in self.data[section].items():
                path = f"{section}.{leaf}"
                if section == "peak":
                    if leaf not in DTYPES:
                        raise self.error(path, f"unknown dtype {leaf!r}; allowed: {', '.join(DTYPES)}")
                    facts[path] = self.fact(path, raw, "flops")
                elif path in FIELDS:
                    facts[path] = self.fact(path, raw, FIELDS[path][1])
                else:
                    allowed = [p.partition(".")[2] for p in FIELDS if p.startswith(section + ".")]
                    raise self.error(
                        path, f"unknown key {leaf!r}; allowed in [{section}]: {', '.join(allowed)}"
                    )
        for path in ("memory.size", "memory.bandwidth"):
            if path not in facts:
                raise self.error(
                    path.partition(".")[0],
                    f'missing {path}: give it, or name a device to start from with like = "..."',
                )
        if not any(path.startswith("peak.") for path in facts):
            raise self.error("peak", 'missing: give at least one dtype, such as bf16 = "400 TFLOP/s"')
        values: dict[str, Any] = {
            attribute: facts[path].value for path, (attribute, _) in FIELDS.items() if path in facts
        }
        self.shares(facts)
        if "sm_count" in values:
            values["sm_count"] = round(values["sm_count"])
        values["peak_flops"] = {
            path[5:]: fact.value for path, fact in facts.items() if path.startswith("peak.")
        }
        values["calibration"] = self.calibration(base)
        text: dict[str, Any] = {
            key: self.data[key]
            for key in ("title", "vendor", "architecture", "kind", "year", "notes")
            if key in self.data
        }
        name = self.text("name", Path(self.where).stem)
        values |= {"title": name, **text}
        aliases = tuple(self.data.get("aliases", ()))
        if base:
            return replace(base, name=name, aliases=aliases, facts=facts, **values)
        return Device(name=name, aliases=aliases, facts=facts, **values)

    def shares(self, facts: Mapping[str, Fact]) -> None:
        """What is said about zeros: shares of the work, and a rate that is no slower than the dense one."""
        for path in ("sparsity.weights", "sparsity.activations"):
            if path in facts and facts[path].value > 1:
                raise self.error(path, f"expected a share of at most 1, got {facts[path].value:g}")
        rate = facts.get("sparsity.two_four")
        if rate is not None and rate.value < 1:
            raise self.error(
                "sparsity.two_four", f"expected a peak over the dense one, 1 or more, got {rate.value:g}"
            )

    def calibration(self, base: Device | None) -> dict[str, float]:
        table = self.data.get("calibration", {})
        for key, value in table.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
                raise self.error(f"calibration.{key}", f"expected a number of zero or more, got {value!r}")
        return {**(base.calibration if base else {}), **table}
