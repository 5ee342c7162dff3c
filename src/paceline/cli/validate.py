"""`paceline validate`: predictions against measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from paceline.cli.options import Json, print_json, show


def validate(
    *sets: str,
    data: Annotated[
        Path | None, Parameter(env_var="PACELINE_DATA", help="folder with measurement sets")
    ] = None,
    rows: Annotated[Path | None, Parameter(help="write each row with its prediction as CSV")] = None,
    leave_out_device: Annotated[
        bool, Parameter(negative="", help="predict each device with curves fitted without it")
    ] = False,
    json_: Json = False,
) -> None:
    """Score predictions against measurements: error, bias and coverage per set, beside the naive guess."""
    from paceline.bench.validate import board, run
    from paceline.report.scoreboard import validation_table

    scores = run(sets, data, rows_file=rows, leave_out_device=leave_out_device)
    if json_:
        print_json(board(scores))
    else:
        for view in validation_table(scores):
            show(view)
