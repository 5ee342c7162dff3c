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
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline import units
from paceline.errors import SpecError, UnitError, nearest

#: how a number is known, best first
KINDS = ("measured", "datasheet", "fitted", "derived", "declared", "guessed")
DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8")

#: TOML path -> (attribute, dimension)
FIELDS: dict[str, tuple[str, str]] = {
    "memory.size": ("memory_bytes", "bytes"),
    "memory.bandwidth": ("memory_bandwidth_Bps", "bandwidth"),
    "cache.l1": ("l1_bytes", "bytes"),
    "cache.l2": ("l2_bytes", "bytes"),
    "chip.sms": ("sm_count", "count"),
    "chip.clock": ("clock_hz", "frequency"),
    "chip.launch": ("launch_s", "time"),
    "chip.tdp": ("tdp_w", "power"),
    "link.host": ("host_bandwidth_Bps", "bandwidth"),
    "link.peer": ("peer_bandwidth_Bps", "bandwidth"),
    "price.hour": ("price_per_s", "price_rate"),
    "price.unit": ("price", "price"),
}
_TEXT_KEYS = {"name", "title", "vendor", "architecture", "kind", "year", "like", "aliases", "notes", "method_version"}
_WANTED: dict[type, str] = {dict: "a table [{}]", list: "a list of strings", int: "a whole number", str: "a string"}
_SECTIONS = {"peak", "sources", "calibration", *(path.partition(".")[0] for path in FIELDS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One number and where it comes from; `value` in SI units."""

    value: float
    kind: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator (or CPU). Bytes, seconds, FLOP/s; `None` where no source gives the number."""

    name: str
    title: str
    vendor: str = "unknown"
    architecture: str = "generic"
    kind: str = "gpu"
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
    clock_hz: float | None = None
    launch_s: float | None = None
    tdp_w: float | None = None
    host_bandwidth_Bps: float | None = None
    peer_bandwidth_Bps: float | None = None
    price_per_s: float | None = None
    price: float | None = None
    #: constants measured on this very device by `paceline calibrate`; they win over fitted ones
    calibration: Mapping[str, float] = field(default_factory=dict)
    #: provenance by TOML path, such as `memory.bandwidth` or `peak.bf16`
    facts: Mapping[str, Fact] = field(default_factory=dict)

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


def read(path: Path, lookup: Callable[[str], Device]) -> Device:
    """The device described by a TOML file; `lookup` resolves the name in its `like`."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(f"cannot read device file {str(path)!r}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"cannot read device file {str(path)!r}: not UTF-8 at byte {error.start}") from None
    return parse(text, str(path), lookup)


def parse(text: str, where: str, lookup: Callable[[str], Device]) -> Device:
    """The device described by TOML `text`; messages name `where`, the line and the key."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{where}: not valid TOML: {error}") from None
    reader = _Reader(text, where, data)
    try:
        base = lookup(reader.text("like")) if "like" in data else None
    except RecursionError:
        raise reader.error("like", f"{data['like']!r} leads back to this device") from None
    return reader.device(base)


class _Reader:
    """Turns parsed TOML into a Device and knows the line of each key for messages."""

    def __init__(self, text: str, where: str, data: dict[str, Any]) -> None:
        self.lines = text.splitlines()
        self.where = where
        self.data = data
        self.sources: dict[str, str] = data.get("sources", {})
        for key, value in data.items():
            if key not in _TEXT_KEYS | _SECTIONS:
                near = nearest(key, _TEXT_KEYS | _SECTIONS)
                hint = f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(sorted(_SECTIONS))}"
                raise self.error(key, f"unknown key {key!r}; {hint}")
            wanted: type = dict if key in _SECTIONS else {"year": int, "aliases": list, "method_version": object}.get(key, str)
            entries = value if isinstance(value, list) else []
            if not isinstance(value, wanted) or not all(isinstance(entry, str) for entry in entries):
                raise self.error(key, f"expected {_WANTED[wanted].format(key)}, got {value!r}")

    def error(self, key: str, message: str) -> SpecError:
        section, _, leaf = key.rpartition(".")
        current, found = "", 0
        for number, line in enumerate(self.lines, 1):
            stripped = line.strip()
            if stripped.startswith("["):
                current = stripped.partition("]")[0].strip("[ ")
            name = stripped.partition("=")[0].strip().strip('"')
            inline = section and name == section  # memory = { size = ... }
            if (current == section and name == leaf) or name == key or inline or current == key:
                found = number
                break
        at = f"line {found}, " if found else ""
        return SpecError(f"{self.where}: {at}{key}: {message}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.data.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"expected a string, got {value!r}")
        return value

    def fact(self, path: str, raw: Any, dimension: str) -> Fact:
        kind, source = "declared", self.where
        if isinstance(raw, dict):
            extra = set(raw) - {"value", "kind", "source"}
            if extra or "value" not in raw:
                raise self.error(path, f"expected {{ value = ..., kind = ..., source = ... }}, got keys {sorted(raw)}")
            kind, source = raw.get("kind", "datasheet"), raw.get("source", "")
            if not isinstance(source, str):
                raise self.error(path, f"source: expected a string, got {source!r}")
            source = self.sources.get(source, source)
            raw = raw["value"]
        if kind not in KINDS:
            raise self.error(path, f"kind {kind!r} is not one of {', '.join(KINDS)}")
        try:
            value = units.parse(raw, dimension)
        except UnitError as error:
            raise self.error(path, str(error)) from None
        if value <= 0:
            raise self.error(path, f"must be above zero, got {raw!r}")
        return Fact(value=value, kind=kind, source=source)

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
                    raise self.error(path, f"unknown key {leaf!r}; allowed in [{section}]: {', '.join(allowed)}")
        for path in ("memory.size", "memory.bandwidth"):
            if path not in facts:
                raise self.error(path.partition(".")[0], f"missing {path}: give it, or name a device to start from with like = \"...\"")
        if not any(path.startswith("peak.") for path in facts):
            raise self.error("peak", "missing: give at least one dtype, such as bf16 = \"400 TFLOP/s\"")
        values: dict[str, Any] = {
            attribute: facts[path].value for path, (attribute, _) in FIELDS.items() if path in facts
        }
        if "sm_count" in values:
            values["sm_count"] = round(values["sm_count"])
        values["peak_flops"] = {path[5:]: fact.value for path, fact in facts.items() if path.startswith("peak.")}
        values["calibration"] = self.calibration(base)
        text: dict[str, Any] = {key: self.data[key] for key in ("title", "vendor", "architecture", "kind", "year", "notes") if key in self.data}
        name = self.text("name", Path(self.where).stem)
        values |= {"title": name, **text}
        aliases = tuple(self.data.get("aliases", ()))
        if base:
            return replace(base, name=name, aliases=aliases, facts=facts, **values)
        return Device(name=name, aliases=aliases, facts=facts, **values)

    def calibration(self, base: Device | None) -> dict[str, float]:
        table = self.data.get("calibration", {})
        for key, value in table.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
                raise self.error(f"calibration.{key}", f"expected a number of zero or more, got {value!r}")
        return {**(base.calibration if base else {}), **table}
