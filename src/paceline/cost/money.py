"""Money: device-hours at a price, and energy at another."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.spec.device import Device
from paceline.spec.prediction import Evidence

#: USD per joule of industrial electricity: 0.08 USD/kWh (U.S. Energy Information Administration, 2023,
#: average)
ENERGY_USD_PER_J = 0.08 / 3.6e6

#: how a command that takes --price is told of one
FLAG = "give it as --price, such as --price 2.5USD/h"


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """USD per second of one device, where that comes from, and of what date it is where that is known."""

    per_s: float
    kind: str
    source: str
    date: str = ""

    def __str__(self) -> str:
        return f"{self.per_s * 3600:.4g} USD/h a device" + (f" as of {self.date}" if self.date else "")


def price(device: Device, per_s: float | None = None) -> Price | None:
    """What a second of a device costs: as given, else as the catalog says."""
    if per_s is not None:
        return Price(per_s=per_s, kind="declared", source="--price")
    fact = device.facts.get("price.hour")
    if device.price_per_s is None:
        return None
    if fact is None:
        return Price(per_s=device.price_per_s, kind="declared", source=device.name)
    return Price(per_s=device.price_per_s, kind=fact.kind, source=fact.source, date=fact.date)


def basis(device: Device) -> str:
    """What an amount of money rests on, in words, or how to give a price."""
    found = price(device)
    if found is None:
        return f"{unknown(device)}; give it as price.hour in a device file"
    return f"{found} [{found.source}]"


def unknown(device: Device) -> str:
    """That a device has no price."""
    return f"no price is known of {device.name}"


def evidence(device: Device, found: Price | None, how: str) -> Evidence:
    """The price that an amount of money rests on; or that there is none, and `how` to give one."""
    if found is None:
        return Evidence(what=f"{unknown(device)}; {how}", kind="warning", source="catalog")
    return Evidence(what=f"price {found}", kind=found.kind, source=found.source)
