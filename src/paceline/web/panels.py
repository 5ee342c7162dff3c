"""The parts of the page, each by the function that a command calls too.

A worker process makes a view of a scenario: controls, and HTML by panel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from paceline import units
from paceline.catalog import validated
from paceline.errors import PacelineError, UnknownName
from paceline.report import plain, sections, timeline_section, trust_section, whatif_sections
from paceline.report.markup import Html, details, join, tag
from paceline.report.whatif_sections import ComparedAnswer
from paceline.spec.prediction import DistributedPrediction
from paceline.spec.synchronisation import PLAIN
from paceline.spec.vocabulary import Sharding
from paceline.spec.whatif import Comparison, Row, TrainingCost
from paceline.web.controls import controls
from paceline.web.scenario import Scenario, Sources
from paceline.whatif.anatomy import anatomy
from paceline.whatif.compare import compare
from paceline.whatif.job import Budget, job
from paceline.whatif.resources import knobs, resources
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
    #: a slider is still moving: what takes long is left out
    draft: bool = False
    #: logarithmic axes, where a panel has a choice
    log: bool = False
    #: of a timeline: the window, as shares of the step
    start: float = 0.0
    end: float = 1.0

    @cached_property
    def subject(self) -> Subject:
        return self.sources.subject(self.scenario)

    @cached_property
    def prediction(self) -> DistributedPrediction:
        return self.subject.predict()

    @cached_property
    def job(self) -> TrainingCost | None:
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
    steps = 2 if view.draft else 1
    sizes = ",".join(str(2**i) for i in range(0, most.bit_length(), steps))
    curves = []
    for strong in (False, True):
        try:
            found = sweep(view.subject, f"nodes={sizes}", strong=strong)
        except PacelineError:
            continue
        curves += [found.scaling] if found.scaling is not None else []
    if not curves:
        return tag(
            "p", "Under this plan no other number of nodes can run: its degrees or its batch are too large."
        )
    return sections.scaling(curves, view.width, view.log)


def _timeline(view: View) -> Html:
    found = _traced(view.scenario, view.sources).timeline
    if found is None:
        return tag("p", "Steps of this plan are predicted without a timeline.")
    return timeline_section.timeline(found, view.start, view.end, view.width)


@lru_cache(maxsize=2)
def _traced(scenario: Scenario, sources: Sources) -> DistributedPrediction:
    """With its timeline, which is large: kept while a user zooms."""
    return sources.subject(scenario).predict(trace=True)


def _bottlenecks(view: View) -> Html:
    subject = view.subject
    after = {
        name: knob.turned(subject, 2.0).predict().step_s
        for name, knob in knobs(subject).items()
        if not knob.less
    }
    drawn = whatif_sections.doubled(view.prediction.step_s, list(after.items()), view.width)
    return drawn if view.draft else join([drawn, whatif_sections.bottlenecks(resources(subject))])


def _roofline(view: View) -> Html:
    return whatif_sections.roofline(anatomy(view.subject, view.prediction), view.width)


#: ways to exchange gradients that are set side by side
WAYS = tuple("overlap terngrad dgc powersgd local-sgd diloco easgd ps-sync ps-async".split())


def _ways(view: View) -> Html:
    """The plan as it is, and whole replicas that exchange in full, less, later, or without waiting."""
    plan = view.subject.plan
    whole = replace(view.subject, plan=replace(plan, relax=PLAIN, sharding=Sharding.DDP))
    as_is = Row(plan="this plan", prediction=view.prediction)
    found = compare(whole, ["ddp", *WAYS])
    rows = [as_is, *(row for row in found.rows if row.prediction is not None)]
    refused = [row for row in found.rows if row.prediction is None]
    drawn = whatif_sections.comparison(Comparison(subject=found.subject, rows=tuple(rows)), view.width)
    why = [tag("li", tag("b", row.plan), f": {row.why_not}") for row in refused]
    return join([drawn, details("ways that cannot run here", tag("ul", *why)) if why else None])


def _trust(view: View) -> Html:
    return trust_section.trust(view.prediction, validated.near(view.prediction), view.width)


#: by name; the page says which come with the view itself
PANELS: Mapping[str, Callable[[View], Html]] = {
    "headline": _headline,
    "time": _time,
    "memory": _memory,
    "timeline": _timeline,
    "scaling": _scaling,
    "bottlenecks": _bottlenecks,
    "roofline": _roofline,
    "ways": _ways,
    "trust": _trust,
}


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


def side_by_side(kept: Sequence[tuple[str, Scenario]], width: float, sources: Sources) -> dict[str, Any]:
    """Scenarios that were kept, by name, in columns."""
    entries = [_entry(name, scenario, sources) for name, scenario in kept]
    return {"html": whatif_sections.side_by_side(entries, width)}


def _entry(name: str, scenario: Scenario, sources: Sources) -> ComparedAnswer:
    edits = dict(edit.partition("=")[::2] for edit in scenario.edits)
    words = {"model": scenario.model, "cluster": scenario.cluster, "plan": scenario.plan, **edits}
    try:
        return ComparedAnswer(name=name, words=words, prediction=sources.subject(scenario).predict())
    except PacelineError as error:
        return ComparedAnswer(name=name, words=words, why_not=str(error))


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
