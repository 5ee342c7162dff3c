"""`paceline simulate`: many jobs on one cluster, under several policies."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from paceline.cli.options import Json, print_json, show, whole

if TYPE_CHECKING:
    from paceline.sched.metrics import ScheduleResult
    from paceline.sched.study import StudySetup


def simulate(
    *,
    trace: Annotated[
        str,
        Parameter(
            help=(
                "philly-like, philly, gavel, alibaba, pollux:FILE.csv, slurm:FILE, or your own .csv or .toml"
            )
        ),
    ] = "philly-like",
    jobs: Annotated[
        int | None,
        Parameter(converter=whole, help="number of jobs; by default all, or 1000 if they are generated"),
    ] = None,
    cluster: Annotated[
        str | None,
        Parameter(
            help="nodes x devices x kind, such as 64x4xv100, or a .toml; by default the cluster of the trace"
        ),
    ] = None,
    policy: Annotated[
        str,
        Parameter(
            name=["--policy", "-p"], help="names, NAME(option=value) or FILE.py:CLASS, separated by commas"
        ),
    ] = "srtf,las,marginal",
    load: Annotated[
        float | None, Parameter(help="offered load: the share of devices that arrivals keep busy")
    ] = None,
    early_termination: Annotated[
        str | None,
        Parameter(help="let jobs end early with the published shares of philly, helios, seren or kalos"),
    ] = None,
    seed: int = 0,
    seeds: Annotated[int, Parameter(help="number of runs; prints means and 95 % intervals")] = 1,
    restart: Annotated[float | None, Parameter(help="seconds from getting devices to the first step")] = None,
    interval: Annotated[
        float | None, Parameter(help="seconds between rounds of every policy; 0: decide at each event")
    ] = None,
    placement: Annotated[str | None, Parameter(help="consolidate, spread, widest, quiet or topology")] = None,
    interference: Annotated[
        float, Parameter(help="share of speed lost by jobs on several nodes that share one")
    ] = 0.0,
    node_mtbf: Annotated[float, Parameter(help="mean seconds between failures of a node; 0: none")] = 0.0,
    processes: Annotated[int, Parameter(help="parallel simulations; 0: one per core")] = 1,
    engine: Annotated[str, Parameter(help="local, or ray: fan out over a Ray cluster")] = "local",
    data: Annotated[Path | None, Parameter(env_var="PACELINE_DATA", help="folder that holds traces/")] = None,
    html: Annotated[
        Path | None, Parameter(help="write a page with table, distributions and Gantt charts")
    ] = None,
    log: Annotated[
        Path | None, Parameter(help="write events and decisions, one JSON object per line")
    ] = None,
    json_: Json = False,
) -> None:
    """Simulate a job list on a cluster: response times, utilisation and waste under each policy."""
    from paceline.sched import policies
    from paceline.sched.study import StudySetup, compare

    names = policies.split(policy)
    setup = StudySetup(
        trace=trace,
        policy=names[0] if names else "",
        cluster=cluster,
        jobs=jobs,
        load=load,
        early_termination=early_termination,
        seed=seed,
        restart_s=restart,
        interval_s=interval,
        placement=placement,
        interference=interference,
        node_mtbf_s=node_mtbf,
        data=str(data) if data else None,
    )
    here = seeds == 1 and processes == 1 and engine == "local"
    outcomes = (
        _each(setup, names, html is not None, log, json_)
        if html is not None or log is not None or here
        else []
    )
    rows = [o.to_dict() for o in outcomes]
    if not here:
        rows = [
            summary.to_dict()
            for summary in compare(setup, names, seeds=seeds, processes=processes, engine=engine)
        ]
    title = f"{trace}: {rows[0]['jobs']:,} jobs on {rows[0]['cluster']} ({rows[0]['devices']:,} devices)"
    if html is not None:
        _write_page(html, title, rows, outcomes, setup)
    if json_:
        print_json({"policies": rows})
    else:
        from paceline.report.sched import table

        show(table(title, rows))
        for path in filter(None, (html, log)):
            print(f"written: {path}")


def _each(
    setup: StudySetup, names: list[str], gantt: bool, log: Path | None, quiet: bool
) -> list[ScheduleResult]:
    """One run of each policy, with a progress bar on a terminal."""
    from dataclasses import replace

    from rich.console import Console
    from rich.progress import Progress

    from paceline.sched import policies

    for name in names:
        policies.get(name)
    outcomes = []
    with Progress(
        console=Console(stderr=True), transient=True, disable=quiet or not sys.stderr.isatty()
    ) as bar:
        for name in names:
            task = bar.add_task(name, total=None)
            outcomes.append(
                replace(setup, policy=name).run(
                    log=log is not None,
                    gantt=gantt,
                    progress=lambda done, total, task=task: bar.update(task, completed=done, total=total),  # type: ignore[misc]
                )
            )
    if log is not None:
        from paceline.report import plain

        with log.open("w") as file:
            for outcome in outcomes:
                for entry in outcome.log or ():
                    file.write(plain.text({"policy": outcome.policy, **entry.to_dict()}) + "\n")
    return outcomes


def _write_page(
    path: Path, title: str, rows: list[dict[str, Any]], outcomes: list[ScheduleResult], setup: StudySetup
) -> None:
    from paceline.report.sched import page
    from paceline.sched.nodes import ClusterShape

    shape = ClusterShape.parse(outcomes[0].cluster or setup.cluster or "")
    charts = [
        (o.policy, [(s.name, s.start_s, s.end_s, s.allocation) for s in o.segments or ()], shape.devices)
        for o in outcomes
    ]
    path.write_text(
        page(title, rows, [(o.policy, o.responses_s) for o in outcomes], charts), encoding="utf-8"
    )
