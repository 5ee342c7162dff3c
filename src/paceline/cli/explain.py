"""`paceline explain`: what bounds a step, what would relieve it, and where a measured one differs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from paceline.cli.options import Json
from paceline.cli.subject import CaptureOptions, How, Html, Plot, Where, answer, subject


def explain(
    model: str,
    /,
    *,
    cluster: Where | None = None,
    plan: How = "",
    measured: Annotated[
        Path | None, Parameter(help="a torch.profiler trace of the same step, to compare with the prediction")
    ] = None,
    device: Annotated[
        str | None,
        Parameter(name=["--device", "-d"], help="with --measured: by default the device of the trace"),
    ] = None,
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
    from paceline.errors import SpecError

    if measured is not None:
        if cluster is not None or plan or plot is not None or html is not None:
            raise SpecError(
                "--measured compares a step of one device: it takes --device, no --cluster or --plan"
            )
        _compare(model, measured, device, captured or CaptureOptions(), json_)
        return
    if cluster is None:
        raise SpecError("give --cluster (one device is 1xh200, for example), or --measured TRACE.json.gz")
    if device is not None:
        raise SpecError("--device goes with --measured; otherwise give --cluster, such as 1xh200")
    from paceline.whatif.explain import explain as run

    answer(run(subject(model, cluster, plan, captured)), json_, plot, html)


def _compare(model: str, measured: Path, device: str | None, captured: CaptureOptions, json_: bool) -> None:
    """The step of a trace beside its prediction."""
    from paceline.catalog import devices
    from paceline.cli.options import workload
    from paceline.diagnose.comparison import compare
    from paceline.diagnose.roofline import device_of
    from paceline.errors import SpecError
    from paceline.readers import kineto

    trace = kineto.read(measured)
    target = devices.get(device) if device is not None else device_of(trace.device)
    if target is None:
        raise SpecError(f"{trace.device or 'the host'} of {measured} is not in the catalog; give --device")
    answer(compare(trace, workload(model, **captured.given), target), json_)
