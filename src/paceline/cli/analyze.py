"""`paceline analyze`: what a network is made of."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from paceline.cli.memory_analysis import Apply, Within, analyze_memory
from paceline.cli.options import Json, print_json, show
from paceline.cli.subject import CaptureOptions


def analyze(
    model: str,
    /,
    *,
    memory: Annotated[
        bool,
        Parameter(
            negative="", help="what lives when in a step on --device, and what less memory costs in time"
        ),
    ] = False,
    device: Annotated[
        str | None, Parameter(help="with --memory: the device, as for predict, such as h200")
    ] = None,
    within: Within = None,
    apply: Apply = None,
    captured: CaptureOptions | None = None,
    html: Annotated[Path | None, Parameter(help="also write a page with charts")] = None,
    json_: Json = False,
) -> None:
    """What a network is made of. Say what to look at: --memory.

    paceline analyze resnet50 --batch 32 --memory --device h200

    paceline analyze gpt2 --batch 8 --memory --device h200 --within 8GB --apply policy.json

    Parameters
    ----------
    model
        as for `predict`
    """
    from paceline.errors import SpecError

    if not memory:
        raise SpecError("say what to look at: --memory")
    options = captured or CaptureOptions()
    found, said = analyze_memory(model, device, options.given, within, apply)
    if html is not None:
        from paceline.report import page
        from paceline.report.memory_frontier import memory_page

        page.write(html, memory_page(found, shlex.join(["paceline", *sys.argv[1:]])))
    if json_:
        print_json(found.to_dict())
        return
    show(found)
    for line in (*said, *([f"written: {html}"] if html is not None else [])):
        print(line)
