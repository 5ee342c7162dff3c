"""Money: device-hours at a price, and energy at another."""

from __future__ import annotations

import datetime
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
        return f"{self.per_s * 3600:.4g} USD/h a device{as_of(self.date)}"


def as_of(date: str) -> str:
    """The date of a figure, given as year, month and day as far as they are known, and how old it is."""
    if not date:
        return ""
    year, month = (int(part) for part in (*date.split("-"), "1")[:2])
    today = datetime.date.today()
    months = 12 * (today.year - year) + today.month - month
    if months < 1:
        return f" as of {date}"
    age = (months // 12, "year") if months >= 24 else (months, "month")
    return f" as of {date}, {age[0]} {age[1]}{'s' * (age[0] > 1)} old"


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


def per_unit(device: Device, device_s: float, units: float) -> float | None:
    """USD for each of so many units that take so many seconds of a device, where it has a price."""
    return device.price_per_s * device_s / units if device.price_per_s else None


def energy_j(device: Device, device_s: float) -> float | None:
    """Joules of so many seconds of a device, where its power is known."""
    return device.tdp_w * device_s if device.tdp_w else None


def unknown(device: Device) -> str:
    """That a device has no price."""
    return f"no price is known of {device.name}"


def evidence(device: Device, found: Price | None, how: str) -> Evidence:
    """The price that an amount of money rests on; or that there is none, and `how` to give one."""
    if found is None:
        return Evidence(what=f"{unknown(device)}; {how}", kind="warning", source="catalog")
    return Evidence(what=f"price {found}", kind=found.kind, source=found.source)
