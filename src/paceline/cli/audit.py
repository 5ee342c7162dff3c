"""`paceline audit`: whether a benchmark is fair."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from paceline.cli.options import Json, print_json, show


def audit(
    file: Annotated[
        Path,
        Parameter(
            help="a JSON report, a table of results (CSV, Markdown, a JSON object a line), or a folder that"
            " `paceline train --record` wrote"
        ),
    ],
    /,
    *,
    strict: Annotated[bool, Parameter(negative="", help="exit with code 1 if there is a finding")] = False,
    html: Annotated[Path | None, Parameter(help="also write a page")] = None,
    json_: Json = False,
) -> None:
    """Whether a benchmark is fair: each finding with the lines that show it and what an honest report would
    show.

    paceline audit results.csv

    paceline audit report.json --strict

    paceline train --task digits-cnn --strategy ddp,terngrad --seeds 3 --record RUN && paceline audit RUN

    The columns and keys it reads are in docs/benchmarks.md. What the file does not hold is not judged, and
    listed as not checked.
    """
    from paceline.bench.audit import audit as run

    found = run(file)
    if html is not None:
        from paceline.report import page

        page.write(html, page.page(f"audit of {found.source}", found))
    if json_:
        print_json(found.to_dict())
    else:
        show(found)
        if html is not None:
            print(f"written: {html}")
    if strict and found.findings:
        sys.exit(1)
