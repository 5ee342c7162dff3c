"""`paceline whatif`: a field of cluster, plan or model changed, or swept through many values."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from paceline.cli.options import Json
from paceline.cli.subject import CaptureOptions, How, Html, Plot, Where, answer, subject


def whatif(
    model: str,
    /,
    *,
    cluster: Where,
    plan: How = "",
    set_: Annotated[
        list[str] | None,
        Parameter(
            "--set", negative="", help="field=value, such as network.inter.bandwidth=800Gb/s or nodes=256"
        ),
    ] = None,
    sweep: Annotated[
        str | None, Parameter(help="field=values, such as nodes=1..256, nodes=1..256:200 or tp=1,2,4,8")
    ] = None,
    strong: Annotated[
        bool,
        Parameter(
            negative="",
            help="strong scaling: keep the global batch fixed; by default it grows with the devices",
        ),
    ] = False,
    captured: CaptureOptions | None = None,
    plot: Plot = None,
    html: Html = None,
    json_: Json = False,
) -> None:
    """What would change if the cluster, the plan or the model did, and why.

    Parameters
    ----------
    model
        as for `predict`
    """
    from paceline.errors import SpecError
    from paceline.whatif.change import change
    from paceline.whatif.edits import apply
    from paceline.whatif.sweep import sweep as run

    if sweep is None and (plot is not None or strong):
        raise SpecError(f"{'--plot' if plot is not None else '--strong'} goes with --sweep")
    if sweep is None and not set_:
        raise SpecError("give --set field=value (once or more), or --sweep field=values")
    asked = subject(model, cluster, plan, captured)
    if sweep is not None:
        answer(run(apply(asked, set_ or []), sweep, strong=strong), json_, plot, html)
    else:
        answer(change(asked, set_ or []), json_, None, html)
