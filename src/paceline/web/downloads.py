"""Files of a scenario: answer, plan, trace, report, and configurations of other tools."""

from __future__ import annotations

import io
import json
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.errors import SpecError
from paceline.plan.emit import EMITTERS, emit
from paceline.report import plain
from paceline.spec.plan import resolve
from paceline.spec.planned import Planned, Ranked
from paceline.spec.workload import Workload
from paceline.web.scenario import Scenario, Sources
from paceline.whatif.subject import Subject

#: name of a file, its type, its content
File = tuple[str, str, bytes]


def download(what: str, scenario: Scenario, sources: Sources) -> File:
    """The file of a kind of `KINDS`, or the configuration of a tool of `paceline plan --emit`."""
    subject = sources.subject(scenario)
    if what in KINDS:
        return KINDS[what](scenario, subject)
    return emitted(_as_planned(subject), what)


def _json(scenario: Scenario, subject: Subject) -> File:
    found = plain.finite(subject.predict().to_dict())
    return "prediction.json", "application/json", json.dumps(found, indent=1).encode()


def _plan(scenario: Scenario, subject: Subject) -> File:
    """A file that `--plan` takes."""
    lines = [f"# {scenario.command()}", f'plan = "{subject.plan}"', ""]
    return "plan.toml", "application/toml", "\n".join(lines).encode()


def _trace(scenario: Scenario, subject: Subject) -> File:
    """The simulated step; opens at ui.perfetto.dev."""
    found = subject.predict(trace=True).timeline
    if found is None:
        raise SpecError("steps of this plan are predicted without a timeline")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.json.gz"
        found.save(path)
        return "step.json.gz", "application/gzip", path.read_bytes()


def _report(scenario: Scenario, subject: Subject) -> File:
    from paceline.report import documents

    page = documents.predicted(subject.predict(), scenario.command())
    return "report.html", "text/html", page.encode()


KINDS: Mapping[str, Callable[[Scenario, Subject], File]] = {
    "json": _json,
    "plan": _plan,
    "trace": _trace,
    "report": _report,
}


def emitted(planned: Planned, tool: str) -> File:
    """The files that a tool needs to run the best plan, as an archive."""
    if tool not in EMITTERS:
        raise SpecError(f"{tool!r} is none of {', '.join((*KINDS, *EMITTERS))}")
    packed = io.BytesIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for path in emit(planned, [tool], folder):
            archive.write(path, path.name)
    return f"{tool}.zip", "application/zip", packed.getvalue()


def _as_planned(subject: Subject) -> Planned:
    """A subject's plan as a search would answer it that had no other."""
    found = subject.predict()
    sized = None if isinstance(subject.model, Workload) else subject.model
    plan = subject.plan if sized is None else resolve(subject.plan, subject.cluster, sized)
    only = Ranked(plan=plan, cluster=subject.cluster, prediction=found, value=found.step_s, bound_s=0.0)
    return Planned(
        model=found.model,
        objective="time",
        gbs=found.batch,
        seq=found.seq,
        space=1,
        by_memory=0,
        by_bound=0,
        by_evaluation=1,
        undecided=0,
        gap_pct=0.0,
        elapsed_s=0.0,
        top=(only,),
        settings=subject.settings,
        sizes=sized,
    )
