"""`paceline calibrate`: this machine as a device file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def calibrate(
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"], help="the device file to write")] = Path(
        "this-machine.toml"
    ),
    seconds: Annotated[float, Parameter(help="how long to measure, about")] = 30.0,
) -> None:
    """Measure this machine (its GPU, or the CPU where there is none) into a device file."""
    from paceline.bench.calibrate import calibrate as run

    print(run(output, seconds))
