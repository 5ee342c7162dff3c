"""Fitted constants as data: one TOML file per architecture or device, each falling back on another.

A file says what it was fitted to (`source`), with what command, and from which file it inherits
(`inherits`) the groups it does not hold. A device takes the file of its own name, else that of its
architecture, else the one nearest in kind.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any

from paceline.catalog import architectures
from paceline.cost.attention import AttentionCurve
from paceline.cost.matrix import MatrixCurve
from paceline.cost.stream import StreamCurve
from paceline.errors import SpecError
from paceline.spec.device import Device
from paceline.spec.vocabulary import DeviceKind

#: what stands in where neither a device nor its architecture has curves, and the catalog names no other
LAST = "hopper"
#: groups tried in turn when a file has none of the exact name: the last part is dropped, then these
_SIBLINGS = {
    "fp16": ("bf16", "tf32"),
    "bf16": ("fp16", "tf32"),
    "fp8": ("bf16", "fp16"),
    "fp4": ("bf16", "fp16"),
    "tf32": ("bf16",),
    "fp64": ("fp32",),
    "fp32": ("tf32",),
}
#: part of a group's name -> what is most like it (one way only, so that a search ends)
_STANDS_IN = {
    "nchw": "nhwc",
    "cudnn": "native",
    "winograd": "conv",
    "stem": "conv",
    "conv1": "conv",
    "conv-nchw": "conv",
    "conv1-nchw": "conv1",
    "stem-nchw": "stem",
    "inference": "forward",
    "single": "foreach",
    "sliced": "direct",
    "rnn": "gemm",
    "full": "causal",
    "block": "warp",
}


@dataclass(frozen=True, slots=True)
class Curves:
    """The constants for one device: groups of three shapes, the host's, and how far to trust them."""

    name: str
    source: str
    matrix: Mapping[str, MatrixCurve]
    stream: Mapping[str, StreamCurve]
    attention: Mapping[str, AttentionCurve]
    #: kernels one entry of a group launches
    kernels: Mapping[str, float]
    #: per file inherited from, its own last: factors on the time of every group that begins with a pattern
    scales: tuple[Mapping[str, float], ...] = ()
    #: groups that had no curve and what stood in for them
    inherited: tuple[str, ...] = ()
    #: devices whose own operators and whole steps these were fitted to
    devices: tuple[str, ...] = ()

    def matrix_curve(self, group: str) -> MatrixCurve:
        found: MatrixCurve | None = _find(self.matrix, group)
        if found is None:
            raise SpecError(f"no curve for {group!r} in {self.name}; run the fit again")
        return found

    def stream_curve(self, group: str) -> StreamCurve:
        return _find(self.stream, group) or self.stream["elementwise"]

    def attention_curve(self, group: str) -> AttentionCurve:
        # a mask is a matter of scale
        found: AttentionCurve | None = _find(self.attention, group.replace(".mask", ""))
        if found is None:
            raise SpecError(f"no curve for {group!r} in {self.name}; run the fit again")
        return found

    def kernels_of(self, group: str) -> float:
        return _find(self.kernels, group) or 1.0

    def scale_of(self, group: str) -> float:
        factor = 1.0
        for scale in self.scales:
            best = closest(group, tuple(scale))
            factor *= scale[best] if best is not None else 1.0
        return factor


@cache
def closest(group: str, patterns: tuple[str, ...]) -> str | None:
    """The longest of the patterns that a group begins with."""
    return max((p for p in patterns if fnmatchcase(group, p + "*")), key=len, default=None)


def _find(table: Mapping[str, Any], group: str) -> Any:
    if group in table:
        return table[group]
    parts = group.split(".")
    for i, part in enumerate(parts):
        for sibling in _SIBLINGS.get(part, ()):
            candidate = ".".join([*parts[:i], sibling, *parts[i + 1 :]])
            if candidate in table:
                return table[candidate]
    for i, part in enumerate(parts):
        if part in _STANDS_IN:
            found = _find(table, ".".join([*parts[:i], _STANDS_IN[part], *parts[i + 1 :]]))
            if found is not None:
                return found
    if len(parts) > 1:
        return _find(table, ".".join(parts[:-1]))
    return None


_FOLDER = files("paceline.cost") / "fitted"


class _Files(dict[str, dict[str, Any]]):
    """Curve files by name, each read when first asked for."""

    def __missing__(self, name: str) -> dict[str, Any]:
        self[name] = tomllib.loads((_FOLDER / f"{name}.toml").read_text())
        return self[name]


_FILES = _Files()


@cache
def _available() -> frozenset[str]:
    return frozenset(entry.name.removesuffix(".toml") for entry in _FOLDER.iterdir())


def _typed(cls: type[Any], table: Mapping[str, Any]) -> Any:
    known = {f.name for f in fields(cls)}
    return cls(**{key: value for key, value in table.items() if key in known})


def from_tables(name: str, tables: Mapping[str, Mapping[str, Any]]) -> Curves:
    """Curves of file `name` among `tables`, with everything it inherits."""
    data = tables[name]
    base = from_tables(data["inherits"], tables) if "inherits" in data else None
    own: dict[str, dict[str, Any]] = {
        shape: {group: _typed(cls, table) for group, table in data.get(shape, {}).items()}
        for shape, cls in (("matrix", MatrixCurve), ("stream", StreamCurve), ("attention", AttentionCurve))
    }
    kernels = {group: float(value) for group, value in data.get("kernels", {}).items()}
    scale = {prefix: float(value) for prefix, value in data.get("scale", {}).items()}
    if base is None:
        return Curves(
            name,
            data["source"],
            own["matrix"],
            own["stream"],
            own["attention"],
            kernels,
            (scale,),
            devices=tuple(data.get("devices", ())),
        )
    return Curves(
        name,
        data["source"],
        {**base.matrix, **own["matrix"]},
        {**base.stream, **own["stream"]},
        {**base.attention, **own["attention"]},
        {**base.kernels, **kernels},
        (*base.scales, scale),
        (*base.inherited, data["inherits"]),
    )


@cache
def _named(name: str) -> Curves:
    return from_tables(name, _FILES)


def named(name: str) -> Curves | None:
    """The curves of one file, where there is one of that name."""
    return _named(name) if name in _available() else None


def curves_for(device: Device) -> Curves:
    """The constants for a device, with what `paceline calibrate` measured on it put on top."""
    available = _available()
    last = "cpu" if device.kind is DeviceKind.CPU else LAST
    own = (device.name, device.architecture)
    names = (*own, architectures.get(device.architecture).curves)
    name = next((one for one in names if one in available), last)
    curves = _named(name)
    if name not in (*own, "cpu"):
        instead = f"{name} stands in for {device.architecture}, which has no curves of its own"
        curves = replace(curves, source=f"{instead}; {curves.source}")
    scale = {
        key.removeprefix("scale."): value
        for key, value in device.calibration.items()
        if key.startswith("scale.")
    }
    return replace(curves, scales=(*curves.scales, scale)) if scale else curves
