"""Sweeps up, or waits for the owner of one cluster to end and then removes it: see `sweep`."""

from __future__ import annotations

import signal
import sys

from paceline.bench.emulate import sweep, system


def main(names: list[str]) -> None:
    """The janitor of the clusters named; without a name, one sweep."""
    if not names:
        print(*(sweep() or ["nothing to remove"]), sep="\n")
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()  # ends when the owner closes the pipe or dies
    for name in names:
        system.remove(name)


main(sys.argv[1:])
