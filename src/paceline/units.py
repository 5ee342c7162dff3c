"""Quantities: strings with units at the edge, SI floats inside.

>>> parse("400 Gb/s", "bandwidth")
50000000000.0
>>> parse("80 GB", "bytes"), parse("80 GiB", "bytes")
(80000000000.0, 85899345920.0)
>>> show(4.8e12, "bandwidth"), show(0.0123, "time")
('4.8 TB/s', '12.3 ms')

GB is 1e9 bytes and GiB 2**30; `B` is a byte and `b` a bit, so `Gb/s` divides by eight.
"""

from __future__ import annotations

import math
import re

from paceline.errors import UnitError, nearest

_SI = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_SMALL = {"": 1.0, "m": 1e-3, "u": 1e-6, "µ": 1e-6, "n": 1e-9, "p": 1e-12}
_LONG = {"min": 60.0, "h": 3600.0, "d": 86400.0}


def _table(base: str, prefixes: dict[str, float], scale: float = 1.0) -> dict[str, float]:
    return {prefix + base: factor * scale for prefix, factor in prefixes.items()}


_BYTES = {**_table("B", _SI | _BINARY), **_table("b", _SI, 1 / 8), **_table("bit", _SI, 1 / 8)}

#: dimension -> unit -> factor to SI
UNITS: dict[str, dict[str, float]] = {
    "bytes": _BYTES,
    "bandwidth": {f"{unit}{per}": factor for unit, factor in _BYTES.items() for per in ("/s", "ps")},
    "flops": {**_table("FLOP/s", _SI), **_table("FLOPS", _SI), **_table("OP/s", _SI)},
    "time": {**_table("s", _SMALL), **_LONG},
    "frequency": _table("Hz", _SI),
    "power": _table("W", {**_SI, "m": 1e-3}),
    "energy": _table("J", {**_SI, "m": 1e-3, "u": 1e-6, "n": 1e-9, "p": 1e-12}),
    "price": {"USD": 1.0, "$": 1.0},
    "price_rate": {"USD/h": 1 / 3600, "$/h": 1 / 3600, "USD/s": 1.0},
    "count": {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "P": 1e15, "E": 1e18},
    "fraction": {"": 1.0, "%": 0.01},
}
#: what a bare number means where nobody writes SI: prices are quoted per hour
_BARE = {"price_rate": 1 / 3600}

_NUMBER = re.compile(r"^\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S*)\s*$")


def parse(text: str | float | int, dimension: str) -> float:
    """The SI value of `text` in `dimension` (a key of `UNITS`); a bare number is SI already, of a price it is
    USD per hour.
    """
    units = UNITS[dimension]
    if isinstance(text, bool) or not isinstance(text, (str, int, float)):
        raise UnitError(f"expected a {dimension} such as {example(dimension)!r}, got {text!r}")
    if isinstance(text, (int, float)):
        try:
            value, unit = float(text), ""
        except OverflowError:
            raise UnitError(f"a {dimension} beyond 1e308 is out of range") from None
    else:
        match = _NUMBER.match(text)
        if not match:
            raise UnitError(
                f"cannot read {text!r} as a {dimension}; write a number and a unit such as"
                f" {example(dimension)!r}"
            )
        value, unit = float(match[1].replace("_", "")), match[2]
        if unit and unit not in units:
            close = nearest(unit, (u for u in units if u), 2)
            allowed = ", ".join([*dict.fromkeys([*close, *filter(None, units)])][:12])
            raise UnitError(f"unknown unit {unit!r} in {text!r} for a {dimension}; allowed: {allowed}, ...")
    if not math.isfinite(value):
        raise UnitError(f"{text!r} is not a finite {dimension}")
    return value * (units[unit] if unit else _BARE.get(dimension, 1.0))


def example(dimension: str) -> str:
    """A well-formed string of that dimension, for messages."""
    return {
        "bytes": "80 GB",
        "bandwidth": "400 Gb/s",
        "flops": "312 TFLOP/s",
        "time": "5 us",
        "frequency": "1.4 GHz",
        "power": "700 W",
        "energy": "1.2 pJ",
        "price": "30000 USD",
        "price_rate": "2.5 USD/h",
        "count": "132",
        "fraction": "0.9",
    }[dimension]


_SHOWN = {"bytes": "B", "bandwidth": "B/s", "flops": "FLOP/s", "frequency": "Hz", "power": "W", "energy": "J"}


def show(value: float, dimension: str, digits: int = 3) -> str:
    """`value` (SI) for people, `digits` significant: '141 GB', '12.3 ms'."""
    if dimension == "time":
        if value == 0:
            return "0 s"
        for unit, factor in (
            ("d", 86400.0),
            ("h", 3600.0),
            ("s", 1.0),
            ("ms", 1e-3),
            ("us", 1e-6),
            ("ns", 1e-9),
        ):
            if abs(value) >= factor * (2 if factor > 1 else 1) or unit == "ns":
                return f"{_significant(value / factor, digits)} {unit}"
    if dimension == "price_rate":
        return f"{_significant(value * 3600, digits)} USD/h"
    if dimension == "price":
        return f"{_significant(value, digits)} USD"
    if dimension == "fraction":
        return f"{_significant(value * 100, digits)} %"
    suffix = _SHOWN.get(dimension, "")
    for prefix in ("E", "P", "T", "G", "M", "k"):
        if abs(value) >= _SI[prefix] * 0.9995:
            return f"{_significant(value / _SI[prefix], digits)} {prefix}{suffix}".rstrip()
    return f"{_significant(value, digits)} {suffix}".rstrip()


def _significant(value: float, digits: int) -> str:
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def counts(text: str) -> list[int]:
    """Numbers as people write them: 1..32, or 1,2,4."""
    try:
        low, dots, high = text.partition("..")
        out = list(range(int(low), int(high) + 1)) if dots else [int(word) for word in text.split(",")]
    except ValueError:
        raise UnitError(
            f"cannot read {text!r}; write a range such as 1..32 or a list such as 1,2,4"
        ) from None
    if not out or min(out) < 1 or max(out) > 1000:
        raise UnitError(f"counts go from 1 to 1000, got {text!r}")
    return out
