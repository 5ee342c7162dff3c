"""`paceline profile`: one and two workers for a few tens of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from paceline.cli.options import whole


def profile(
    script: Path,
    /,
    *arguments: str,
    output: Annotated[Path, Parameter(name=["--output", "-o"], help="profile to write")] = Path(
        "job.profile.json"
    ),
    workers: Annotated[int, Parameter(converter=whole, help="largest number of workers to profile")] = 2,
    servers: Annotated[int, Parameter(converter=whole, help="parameter servers")] = 1,
    steps: Annotated[int, Parameter(converter=whole, help="steps of each worker, after the warm-up")] = 30,
    batch: Annotated[
        int,
        Parameter(
            name=["--batch", "-b"], converter=whole, help="samples per worker and step, to count samples"
        ),
    ] = 1,
    slow: Annotated[
        float,
        Parameter(help=("slow down the last worker's compute by this factor, to profile a slow worker")),
    ] = 1.0,
    link: Annotated[
        str | None, Parameter(help="rate of the links; by default estimated from the transfers")
    ] = None,
) -> None:
    """Profile a script that trains with a parameter server (paceline.train.parallelize), for `paceline
    throughput`.

    Parameters
    ----------
    script
        a Python file; what follows it are its own arguments
    """
    from paceline.train.asynchronous.profiling import profile as run
    from paceline.units import parse, show

    found = run(
        script,
        arguments,
        workers=workers,
        servers=servers,
        steps=steps,
        batch=batch,
        slow=slow,
        link_Bps=parse(link, "bandwidth") if link is not None else None,
    )
    found.save(output)
    rates = ", ".join(f"{one.workers}: {one.throughput * batch:.4g}" for one in found.runs)
    sizes = f"{show(found.up_bytes, 'bytes')} up and {show(found.down_bytes, 'bytes')} down per step"
    print(
        f"{output}: {found.mode}, {found.servers} server(s), {sizes}, links of"
        f" {show(found.link.rate_Bps, 'bandwidth')}; samples/s by workers: {rates}"
    )
