"""`paceline schedule`, `submit`, `queue`, `eta`, `cancel`: jobs on a live engine."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from paceline.cli.options import Json, print_json, show

State = Annotated[
    Path | None,
    Parameter(
        env_var="PACELINE_STATE", help="folder of the scheduler's state; by default ~/.local/state/paceline"
    ),
]


def schedule(
    jobs: Annotated[
        Path | None,
        Parameter(
            help="TOML file of [[job]] entries; ends when they are over. Without a file, serves until stopped"
        ),
    ] = None,
    *,
    engine: Annotated[str, Parameter(help="local (processes of this machine), slurm or ray")] = "",
    policy: Annotated[
        str,
        Parameter(
            name=["--policy", "-p"], help="a name, NAME(option=value) or FILE.py:CLASS; by default marginal"
        ),
    ] = "",
    nodes: Annotated[
        str, Parameter(help="local: nodes x devices such as 4x2; slurm: a partition; ray: an address")
    ] = "",
    clock: Annotated[
        str, Parameter(help="wall, or model: the same decisions as a simulation of the same jobs")
    ] = "",
    interval: Annotated[
        float | None, Parameter(help="seconds between rounds of the policy; 0: decide at each event")
    ] = None,
    grace: Annotated[float, Parameter(help="seconds that a job has to checkpoint after TERM")] = 60.0,
    quota: Annotated[
        list[str] | None,
        Parameter(negative="", help="most devices of a tenant at once, as TENANT=DEVICES; may be repeated"),
    ] = None,
    example: Annotated[bool, Parameter(negative="", help="print an example job file and exit")] = False,
    state: State = None,
    json_: Json = False,
) -> None:
    """Schedule jobs on a live engine: start, resize, stop with checkpoint, start again. Killed at any moment,
    it goes on where it was.

    To begin: `paceline schedule --example > jobs.toml`, then `paceline schedule --nodes 2x1 jobs.toml`;
    `paceline queue` shows what happens.
    """
    if example:
        from importlib.resources import files

        print(files("paceline.sched.live").joinpath("example.toml").read_text(encoding="utf-8"), end="")
        return
    from paceline.sched.live import Daemon, DaemonSettings, read

    orders = read(jobs) if jobs is not None else []
    setup = DaemonSettings(
        state=_state(state),
        engine=engine,
        policy=policy,
        nodes=nodes,
        clock=clock,
        interval_s=interval,
        grace_s=grace,
        quotas=_quotas(quota or ()),
    )
    daemon = Daemon(setup, say=lambda text: print(text, file=sys.stderr if json_ else sys.stdout, flush=True))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: daemon.stop())
    try:
        new = daemon.submit(orders)
    except BaseException:
        daemon.close()
        raise
    if not json_:
        left = sum(row["end_s"] is None for row in daemon.queue()) - len(new)
        print(
            f"engine {daemon.driver.name}, {daemon.ledger.shape.total} devices, policy"
            f" {daemon.ledger.era['policy']}: {len(new)} new jobs"
            + (f", {left} from before" if left else "")
            + f"; state in {setup.state}"
            + ("" if orders else "; hand in jobs with: paceline submit FILE.toml"),
            flush=True,
        )
        if orders and not new and not left:
            print(
                "these jobs are over already; to run them again, give them other names or another folder with"
                " --state",
                flush=True,
            )
    daemon.run(until_idle=jobs is not None)
    running = [row["job"] for row in daemon.queue() if row["state"] == "running"]
    if json_:
        print_json(daemon.summary())
    elif running:
        print(f"stopped; {', '.join(running)} goes on, and is found when you start `paceline schedule` again")


def submit(
    job: Annotated[Path, Parameter(help="TOML file of one job, or several as [[job]]")],
    *,
    state: State = None,
    json_: Json = False,
) -> None:
    """Submit jobs to the running scheduler."""
    from paceline.sched.live import read

    orders = read(job)
    new = _client(state).submit(orders)
    _print(
        {"submitted": new, "known": [order.name for order in orders if order.name not in new]},
        json_,
        "\n".join(
            f"{order.name}: {'submitted' if order.name in new else 'was submitted before'}"
            for order in orders
        ),
    )


def queue(
    *,
    all_: Annotated[
        bool, Parameter(name="--all", negative="", help="also show jobs that ended long ago")
    ] = False,
    state: State = None,
    json_: Json = False,
) -> None:
    """Show the jobs of the running scheduler."""
    rows = _client(state).ask("queue")
    if json_:
        print_json({"jobs": rows})
        return
    from paceline.report.live import table

    show(table(rows, all_))


def eta(job: str, *, state: State = None, json_: Json = False) -> None:
    """Estimate when a job will end, with an interval."""
    from paceline.sched.live.forecast import Eta

    found = Eta.from_dict(_client(state).ask("eta", job=job))
    _print(found.to_dict(), json_, str(found))


def cancel(job: str, *, state: State = None, json_: Json = False) -> None:
    """Cancel a job: TERM, then KILL."""
    outcome = _client(state).ask("cancel", job=job)
    _print({"job": job, "outcome": outcome}, json_, f"{job}: {outcome}")


def _quotas(words: Sequence[str]) -> dict[str, int]:
    from paceline.errors import SpecError

    out = {}
    for word in words:
        tenant, equals, devices = word.partition("=")
        if not equals or not tenant or not devices.isdigit():
            raise SpecError(f"a quota is written TENANT=DEVICES, such as --quota vision=4, got {word!r}")
        out[tenant] = int(devices)
    return out


def _state(given: Path | None) -> Path:
    from paceline.sched.live.client import default_state

    return (given or default_state()).absolute()


def _client(given: Path | None) -> Any:
    from paceline.sched.live.client import DaemonClient

    return DaemonClient(_state(given))


def _print(answer: dict[str, Any], json_: bool, text: str) -> None:
    if json_:
        print_json(answer)
    else:
        print(text)
