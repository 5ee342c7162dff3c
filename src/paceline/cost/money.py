"""Money: device-hours at a price, and energy at another."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.spec.device import Device

#: USD per joule of industrial electricity: 0.08 USD/kWh (U.S. Energy Information Administration, 2023, average)
ENERGY_USD_PER_J = 0.08 / 3.6e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """USD per second of one device, and where that comes from."""

    per_s: float
    kind: str
    source: str


def price(device: Device, per_s: float | None = None) -> Price | None:
    """What a second of a device costs: as given, else as the catalog says."""
    if per_s is not None:
        return Price(per_s=per_s, kind="declared", source="--price")
    fact = device.facts.get("price.hour")
    if device.price_per_s is None:
        return None
    return Price(per_s=device.price_per_s, kind=fact.kind if fact else "declared", source=fact.source if fact else device.name)
