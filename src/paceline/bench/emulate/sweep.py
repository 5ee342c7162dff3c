"""Takes away emulated clusters whose owner is gone.

Each cluster has a janitor, a process of its own session that waits for its owner to end, however it ends.
Should the janitor be killed too, the next cluster that is made sweeps up first.

    python -m paceline.bench.emulate          sweep once
    python -m paceline.bench.emulate NAME     the janitor of a cluster: waits until its input is closed
"""

from __future__ import annotations

from paceline.bench.emulate import system


def sweep() -> list[str]:
    """Removes every emulated cluster whose owner no longer runs; their names."""
    gone = sorted(name for name, owner in system.remains().items() if not system.alive(owner))
    for name in gone:
        system.remove(name)
    return gone
