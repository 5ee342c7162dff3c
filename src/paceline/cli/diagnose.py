"""`paceline diagnose`: what a measured step spends its time on, and what to change."""

from __future__ import annotations

from pathlib import Path

from paceline.cli.options import Json, print_json, show


def diagnose(*traces: Path, json_: Json = False) -> None:
    """Where the time of a measured step goes, and the five things to change, with evidence; needs no model.

    Parameters
    ----------
    traces
        traces of torch.profiler (.json, .json.gz), one for each rank that was recorded, or folders of them
    """
    from paceline.diagnose.diagnosis import diagnose as run
    from paceline.errors import SpecError

    if not traces:
        raise SpecError("give a trace of torch.profiler: paceline diagnose TRACE.json.gz")
    found = run(*traces)
    if json_:
        print_json(found.to_dict())
    else:
        show(found)
