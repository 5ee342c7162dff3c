"""`paceline explain`: what bounds a step, and what would relieve it."""

from __future__ import annotations

from paceline.cli.options import Json
from paceline.cli.subject import CaptureOptions, How, Html, Plot, Where, answer, subject


def explain(
    model: str,
    /,
    *,
    cluster: Where,
    plan: How = "",
    captured: CaptureOptions | None = None,
    plot: Plot = None,
    html: Html = None,
    json_: Json = False,
) -> None:
    """Bottlenecks by the time they cost, elasticities, roofline, collectives, concurrency and power of a
    step.

    Parameters
    ----------
    model
        as for `predict`
    """
    from paceline.whatif.explain import explain as run

    answer(run(subject(model, cluster, plan, captured)), json_, plot, html)
