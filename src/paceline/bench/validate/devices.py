"""Curves for a device as if nobody had measured it."""

from __future__ import annotations

from paceline.cost.curves import Curves, curves_for, named
from paceline.spec.device import Device


def curves_without(device: Device) -> Curves:
    """Curves fitted to every device but this one, where it was among the fitted ones; else those it has
    anyway.
    """
    return named(f"without-{device.name}") or curves_for(device)
