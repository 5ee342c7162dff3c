"""`paceline check`: what was predicted for a run and what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from paceline.cli.options import Json, show


def check(
    run: Annotated[Path, Parameter(help="the folder that `paceline train --record` wrote, or a file of JSON lines like its record")],
    plan: Annotated[Path | None, Parameter(help="a plan.json of `paceline plan --emit`, where the run does not carry its prediction")] = None,
    /, *, json_: Json = False,
) -> None:
    """Compare a recorded run with its prediction, phase by phase, or with that of a plan."""
    from paceline.train.check import check as compare

    found = compare(run, plan)
    if json_:
        print(json.dumps(found.to_dict()))
    else:
        show(found)
