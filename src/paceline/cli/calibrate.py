"""`paceline calibrate`: this machine as a device file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def calibrate(
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"], help="device file to write")] = Path(
        "this-machine.toml"
    ),
    seconds: Annotated[float, Parameter(help="approximate duration of the measurement")] = 30.0,
) -> None:
    """Measure this machine (its GPU, or the CPU if it has none) and write a device file."""
    from paceline.bench.calibrate import calibrate as run

    print(run(output, seconds))
