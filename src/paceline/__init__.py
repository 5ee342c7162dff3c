"""Paceline: how fast will this network train there, and what is in the way?"""

from __future__ import annotations

__version__ = "0.1.0"
