"""`paceline throughput`: samples per second against workers, from a profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from paceline.cli.options import Json, print_json, show, whole
from paceline.units import counts


def throughput(
    profile: Path,
    /,
    *,
    workers: Annotated[str, Parameter(help="numbers of workers: 1..32 or 1,2,4")] = "1..16",
    link: Annotated[
        str | None, Parameter(help="rate of each host's link, such as 1Gbit/s; default as profiled")
    ] = None,
    servers: Annotated[
        str | None, Parameter(help="number of parameter servers; several with commas; default as profiled")
    ] = None,
    slow: Annotated[
        int | None, Parameter(converter=whole, help="number of slow workers; default as profiled")
    ] = None,
    trace: Annotated[
        Path | None,
        Parameter(help="also write the simulated run with the most workers, as a trace for Perfetto"),
    ] = None,
    json_: Json = False,
) -> None:
    """Predict throughput against workers from a profile of one or two: curve with interval, saturation point,
    bottleneck.

    Parameters
    ----------
    profile
        a file written by `paceline profile`
    """
    from paceline.queueing.estimate import changed
    from paceline.queueing.estimate import throughput as run
    from paceline.queueing.profile import JobProfile
    from paceline.queueing.simulate import simulate
    from paceline.report.throughput import curve as drawn
    from paceline.units import parse

    job, numbers = JobProfile.load(profile), counts(workers)
    if slow is not None:
        job = replace(job, slow_workers=slow)
    rate = parse(link, "bandwidth") if link is not None else None
    curves = [
        run(job, numbers, servers=count, link_Bps=rate) for count in (counts(servers) if servers else [None])
    ]
    if trace is not None:
        timeline = simulate(
            changed(job, curves[0].servers, rate), max(numbers), steps=10, trace=True
        ).timeline
        assert timeline is not None
        timeline.save(trace)
    if json_:
        print_json([curve.to_dict() for curve in curves])
    else:
        for curve in curves:
            show(drawn(curve))


def score(
    *,
    hosts: Annotated[
        int | None, Parameter(converter=whole, help="measure now, on an emulated cluster of this many hosts")
    ] = None,
    model: Annotated[
        str, Parameter(help="with --hosts: mlp, cnn, resnet, transformer, lstm, one or several")
    ] = "mlp",
    link: Annotated[str, Parameter(help="with --hosts: rate of each host's link")] = "300Mbit/s",
    mode: Annotated[str, Parameter(help="with --hosts: async, sync or both")] = "async,sync",
    seconds: Annotated[float, Parameter(help="with --hosts: time for all runs")] = 120.0,
    staleness: Annotated[
        bool, Parameter(negative="", help="score the staleness of four asynchronous workers instead")
    ] = False,
    pollux: Annotated[
        bool,
        Parameter(
            negative="", help="score the synchronous model on the Pollux measurements instead (PACELINE_DATA)"
        ),
    ] = False,
    data: Annotated[
        Path | None, Parameter(help="folder of measurements by others; default PACELINE_DATA")
    ] = None,
    json_: Json = False,
) -> None:
    """Score the throughput models on measured runs, from a profile of two workers; line and Optimus form
    beside them.

    Runs are those of the data set that comes with the package, or with --hosts real ones, taken now: hosts
    are network namespaces with shaped links, one of them conducts and one serves, so that 6 hosts are up to 4
    workers.
    """
    from paceline.bench.throughput import score as scores
    from paceline.units import parse

    if hosts is not None:
        from paceline.bench.throughput.here import compare

        table: Any = compare(
            hosts,
            models=model.split(","),
            link_Bps=parse(link, "bandwidth"),
            modes=mode.split(","),
            seconds=seconds,
        )
    elif pollux:
        table = scores.pollux(data)
    elif staleness:
        table = scores.staleness()
    else:
        table = scores.measured()
    if json_:
        print_json(table.to_dict())
    else:
        show(table)
