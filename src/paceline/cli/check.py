"""`paceline check`: what was predicted for a run and what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from paceline.cli.options import Json, print_json, show


def check(
    run: Annotated[
        Path,
        Parameter(
            help=(
                "folder written by `paceline train --record`, of one run or several, or a file like its"
                " record"
            )
        ),
    ],
    plan: Annotated[
        Path | None,
        Parameter(help="plan.json of `paceline plan --emit`, if the run has no prediction of its own"),
    ] = None,
    /,
    *,
    json_: Json = False,
) -> None:
    """Compare a recorded run with its prediction, phase by phase, or with that of a plan; several runs one by
    one.
    """
    from paceline.train.check import check as compare
    from paceline.train.check import runs

    found = [compare(one, plan) for one in runs(run)]
    if json_:
        every = [one.to_dict() for one in found]
        print_json(every[0] if len(every) == 1 else every)
        return
    for one in found:
        show(one)
