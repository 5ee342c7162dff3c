"""`paceline compare`: plans side by side."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from paceline.cli.options import Json, LearningFile, RequireFit, end
from paceline.cli.subject import CaptureOptions, How, Html, Plot, Where, answer, subject


def compare(
    model: str,
    /,
    *,
    cluster: Where,
    plans: Annotated[str, Parameter(help='separated by commas, such as "ddp,overlap,terngrad,fsdp tp=4"')],
    plan: How = "",
    break_even: Annotated[
        bool, Parameter(negative="", help="also find the network rates at which each relaxation is faster")
    ] = False,
    learning: LearningFile = None,
    captured: CaptureOptions | None = None,
    plot: Plot = None,
    html: Html = None,
    require_fit: RequireFit = False,
    json_: Json = False,
) -> None:
    """Plans side by side: time, exposed communication, memory, and what each may cost in accuracy. --plan
    holds words that all share.

    Parameters
    ----------
    model
        as for `predict`
    """
    from paceline.errors import SpecError
    from paceline.whatif.compare import compare as run

    listed = [text.strip() for text in plans.split(",") if text.strip()]
    if not listed:
        raise SpecError('--plans names at least one plan, such as "ddp,overlap,terngrad"')
    found = run(subject(model, cluster, plan, captured), listed, break_even=break_even, learning=learning)
    answer(found, json_, plot, html)
    end(all(row.prediction is not None and row.prediction.fit.fits for row in found.rows), require_fit)
