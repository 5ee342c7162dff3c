"""The parts of the page, each by the function that a command calls too.

A worker process makes a view of a scenario: controls, and HTML by panel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from paceline import units
from paceline.errors import PacelineError, UnknownName
from paceline.report import plain, sections
from paceline.report.markup import Html, tag
from paceline.spec.prediction import DistributedPrediction
from paceline.spec.whatif import Job
from paceline.web.controls import controls
from paceline.web.scenario import Scenario, Sources
from paceline.whatif.job import Budget, job
from paceline.whatif.subject import Subject
from paceline.whatif.sweep import sweep

#: pixels that a panel may be asked for
NARROWEST, WIDEST = 240, 2000


@dataclass(frozen=True, kw_only=True)
class View:
    """A scenario under prediction: what panels need of it, each computed once."""

    scenario: Scenario
    sources: Sources
    width: float = sections.WIDTH
    #: closed forms will do where there are some: a slider is still moving
    draft: bool = False
    #: logarithmic axes, where a panel has a choice
    log: bool = False

    @cached_property
    def subject(self) -> Subject:
        return self.sources.subject(self.scenario)

    @cached_property
    def prediction(self) -> DistributedPrediction:
        return self.subject.predict()

    @cached_property
    def job(self) -> Job | None:
        """The whole job, where the scenario has a budget."""
        text = self.scenario.budget
        if not text:
            return None
        amount = units.parse(text, "count")
        tokens = self.prediction.unit == "tokens"
        budget = Budget(tokens=amount) if tokens else Budget(epochs=amount)
        return job(self.prediction, self.subject.cluster, budget)


def _headline(view: View) -> Html:
    return sections.headline(view.prediction, view.job, view.width)


def _time(view: View) -> Html:
    return sections.time(view.prediction, view.width)


def _memory(view: View) -> Html:
    return sections.memory(view.prediction, view.width)


def _scaling(view: View) -> Html:
    cluster = view.subject.cluster
    if not any(tier.network for tier in cluster.tiers):
        return tag("p", "This cluster has no network that leaves the node: there is nothing to scale over.")
    most = max(4 * cluster.nodes, 16)
    curves = []
    for strong in (False, True):
        try:
            found = sweep(view.subject, f"nodes=1..{most}", strong=strong)
        except PacelineError:
            continue
        curves += [found.scaling] if found.scaling is not None else []
    if not curves:
        return tag(
            "p", "Under this plan no other number of nodes can run: its degrees or its batch are too large."
        )
    return sections.scaling(curves, view.width, view.log)


#: by name; those of `QUICK` come with the view itself
PANELS: Mapping[str, Callable[[View], Html]] = {
    "headline": _headline,
    "time": _time,
    "memory": _memory,
    "scaling": _scaling,
}
QUICK = ("headline", "time", "memory")


def view(
    scenario: Scenario,
    changes: Sequence[tuple[str, str]],
    width: float,
    panels: Sequence[str],
    sources: Sources,
) -> dict[str, Any]:
    """The scenario with changes made, its controls and panels; or what is wrong with it."""
    for path, value in changes:
        scenario = scenario.changed(path, value)
    found: dict[str, Any] = {
        "scenario": asdict(scenario),
        "command": scenario.command(),
        "link": scenario.link(),
    }
    try:
        shown = View(scenario=scenario, sources=sources, width=width)
        base = View(
            scenario=Scenario(model=scenario.model, cluster=scenario.cluster, plan=scenario.plan),
            sources=sources,
        )
        found["controls"] = [asdict(control) for control in controls(scenario, shown.subject, base.subject)]
        found["title"] = shown.subject.title
        found["panels"] = {name: PANELS[name](shown) for name in panels}
        found |= {"unit": shown.prediction.unit, "summary": summary(shown.prediction)}
    except PacelineError as error:
        found["problem"] = problem(error)
    return found


def summary(p: DistributedPrediction) -> str:
    """One sentence for a screen reader."""
    verdict = "fits" if p.fit.fits else "does not fit"
    rate = f"{units.show(p.throughput, 'count')} {p.unit} per second"
    return f"{sections.seconds(p.step_s)} per step, {rate}, {verdict}."


def panel(scenario: Scenario, name: str, sources: Sources, options: Mapping[str, Any]) -> dict[str, Any]:
    """One panel of a scenario; `options` are fields of a `View`."""
    try:
        return {"html": PANELS[name](View(scenario=scenario, sources=sources, **options))}
    except PacelineError as error:
        return {"problem": problem(error)}


def predict(scenario: Scenario, sources: Sources) -> dict[str, Any]:
    """The prediction as `paceline predict --json` prints it."""
    found: dict[str, Any] = plain.finite(sources.subject(scenario).predict().to_dict())
    return found


def problem(error: PacelineError) -> dict[str, Any]:
    """What is wrong, and what can be taken instead: (control, value) pairs."""
    text, _, nearest = str(error).partition("; nearest feasible plan: ")
    offers = [{"path": "plan", "value": nearest}] if nearest else []
    if isinstance(error, UnknownName):
        kinds = {"model": "model", "cluster": "cluster"}
        path = next((kinds[kind] for kind in kinds if text.startswith(f"unknown {kind}")), None)
        offers += [{"path": path, "value": name} for name in error.suggestions] if path else []
    return {"message": text, "offers": offers}
