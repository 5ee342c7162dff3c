"""`paceline check`: what was predicted for a run and what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from paceline.cli.options import Json, show


def check(run: Annotated[Path, Parameter(help="the folder that `paceline train --record` wrote")], /, *, json_: Json = False) -> None:
    """Compare a recorded run with its prediction, phase by phase."""
    from paceline.train.check import check as compare

    found = compare(run)
    if json_:
        print(json.dumps(found.to_dict()))
    else:
        show(found)
