"""Plan any other module: captured, then every way to share its work by data, each simulated.

The space is small enough to try all of it, so that the certificate is exact. What changes the result of
training (compressed or late gradients, another batch) is tried only where it is allowed, and marked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from paceline.capture import capture, usual_precision
from paceline.errors import DoesNotFit, PacelineError, PlanError
from paceline.plan import evidence
from paceline.plan.request import Goal, Request, goal
from paceline.plan.space import BUCKETS, Limits, StateOptions, spell, states
from paceline.plan.trials import Outcome, Trials
from paceline.plan.workers import reached
from paceline.predict.degrees import resolve
from paceline.predict.simulated import predict
from paceline.spec.cluster import Cluster
from paceline.spec.plan import SHARED, SPREAD, Plan, divisors
from paceline.spec.planned import Planned, Ranked
from paceline.spec.prediction import DistributedPrediction
from paceline.spec.synchronisation import PLAIN, RELAXED_SIZES, Relaxation, compressions
from paceline.spec.vocabulary import Recompute, Sharding
from paceline.spec.workload import Workload

#: words of a plan that no measured step of a captured module had
unmeasured = partial(evidence.unmeasured, evidence=evidence.MODULES)
#: samples per device where no batch is given
SAMPLES = 32
#: fields that the search does not know -> what to do instead
REFUSED = dict.fromkeys(
    {*SPREAD, *SHARED, "sp", "context", "offload", "adapters"} - {"pp"},
    "captured modules are split by data and, between modules, into a pipeline; plan a transformer of the"
    " catalog or hf:PATH for it",
)
#: words that stand for ways to bring gradients together; the first ones leave the result of training as it is
EXACT = ("", "overlap", "priority")
LOSSY: dict[str, tuple[str, ...]] = {
    "compress": (),  # every scheme there is, registered ones among them: see `_ways`
    "staleness": ("local-sgd", "diloco", "ps-async", "ps-bounded", "easgd", "gossip"),
    "batch": (),
}
#: factors of the batch that are tried where another batch is allowed
BATCHES = (1, 2, 4, 8)
#: micro-batches that the batch of a device is split into
SPLITS = (1, 2, 4)
#: what is filled in of a field that is fixed: one device shares nothing, a way has its usual period
_FILLED = ("sharding", "relax")


def plan_module(model: Any, asked: Request, options: Mapping[str, Any] | None = None) -> Planned:
    """The best plan of a captured module on one of some clusters; all plans of its space are simulated, or
    as many as were asked for. `options` say how to capture it.
    """
    said = limits(asked)
    captured = model if isinstance(model, Captured) else captured_for(model, said, asked, options or {})
    gbs = said.settled("gbs", asked.gbs, "--gbs") or SAMPLES * asked.where[0].device_count
    space = ModuleSpace(captured, gbs, said, goal(asked.objective, asked.where))
    found = space.trials(asked)
    with reached(f"none of {found.plans} plans was simulated yet"):
        found.run()
    if not found.tried:
        raise _nothing(captured.name, gbs, found.refused)
    return found.planned(
        asked,
        found.tried,
        model=captured.name,
        gbs=gbs,
        seq=found.tried[0].prediction.seq,
        settings=captured.settings,
        notes=tuple(_notes(asked.allow, found)),
    )


def limits(asked: Request) -> Limits:
    """What the user fixes and forbids; PlanError for words that plans of captured modules do not have."""
    for word in asked.forbid:
        if word in asked.allow:
            raise PlanError(f"{word} is both allowed and forbidden")
    kept = [word for word in asked.forbid if word not in LOSSY]
    said = Limits.of(asked.fix, kept, asked.allow, refused=REFUSED, lossy=LOSSY)
    relax = said.fixed.get("relax", PLAIN)
    sizes = {name: getattr(relax, name) for name in ("ratio", *RELAXED_SIZES)}
    if not relax.plain and relax == replace(PLAIN, **sizes):
        raise PlanError(
            f"--fix {relax} does not say of what; write the way as well, such as dgc ratio=0.01 or local-sgd"
            " period=8"
        )
    return said


def captured_for(model: Any, said: Limits, asked: Request, options: Mapping[str, Any]) -> Captured:
    """A module that is captured as options and fixed words say; PlanError where these contradict each other,
    or what was captured already.
    """
    seq, precision = said.settled("seq", asked.seq, "--seq") or None, said.fixed.get("precision")
    if isinstance(model, Workload):
        for name in options:
            raise PlanError(
                f"{model.name} is captured already, so that {name} is fixed; capture it again to set it"
            )
        _check(model, "precision", precision, model.precision.removeprefix("amp_"))
        _check(model, "seq", seq, model.seq)
        return Captured(model, model.options)
    given = options.get("precision", precision)
    if precision is not None and precision != str(given).removeprefix("amp_"):
        raise PlanError(
            f"precision is given twice: --precision {given} and --fix {precision}; leave one of them out"
        )
    found = {**options, "seq": seq, "precision": given}
    return Captured(model, {name: value for name, value in found.items() if value is not None})


def _check(model: Workload, name: str, wanted: Any, has: Any) -> None:
    """PlanError where a workload was captured otherwise."""
    if wanted not in (None, has):
        raise PlanError(
            f"--fix {spell(name, wanted)}: {model.name} is captured with {name} {has}; capture it with"
            f" {wanted}"
        )


class Captured:
    """A module captured once per micro-batch and way to recompute; a saved workload has one of each."""

    def __init__(self, model: Any, settings: Mapping[str, Any]) -> None:
        #: how it was, or will be, captured
        self.settings = settings
        self._model = model
        self._kept: dict[tuple[int, bool], Workload] = {}
        self.fixed = model if isinstance(model, Workload) else None
        self.name = self.fixed.name if self.fixed else str(model)
        usual = settings.get("precision") or usual_precision(model)
        self.precision = self.fixed.precision if self.fixed else usual

    def get(self, plan: Plan) -> Workload:
        if self.fixed:
            return self.fixed
        key = plan.mbs, plan.recompute is Recompute.FULL
        if key not in self._kept:
            self._kept[key] = capture(self._model, batch=plan.mbs, checkpointing=key[1], **self.settings)
            self.name = self._kept[key].name
        return self._kept[key]

    def predict(self, plan: Plan, cluster: Cluster, said: Limits) -> DistributedPrediction:
        """The prediction; PlanError where a fixed word is not in the plan that it is of."""
        workload = self.get(plan)
        resolved = resolve(plan, workload, cluster)
        for name, value in said.fixed.items():
            if name not in _FILLED and getattr(plan, name) == value != getattr(resolved, name):
                raise PlanError(
                    f"--fix {spell(name, value)} has no effect on {resolved}; a schedule needs a pipeline,"
                    " such as pp=2"
                )
        return predict(workload, cluster, plan)


def _nothing(name: str, batch: int, refused: Sequence[PacelineError]) -> PlanError:
    """Why no plan was simulated: the first reason, or that none fits."""
    for error in refused:
        return PlanError(str(error))
    return DoesNotFit(f"no plan for {name} fits: the smallest micro-batch of a batch of {batch} is too large")


def _notes(allow: Sequence[str], found: Trials) -> Iterator[str]:
    if allow:
        yield f"values are per sample; {', '.join(allow)} may change the result of training"
    if found.interrupted:
        yield "interrupted: the best so far; nothing is known of the plans that were not simulated"
    elif found.undecided:
        yield f"{found.undecided:,} plans were not simulated; --most simulates more of them"


# -- the space -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModuleSpace:
    """Every plan of a captured module for a batch."""

    captured: Captured
    gbs: int
    limits: Limits
    goal: Goal
    #: seconds and bytes of plans that fit, without recomputation
    _plain: dict[tuple[str, Plan], tuple[float, float]] = field(default_factory=dict)

    def trials(self, asked: Request) -> Trials:
        """All plans, or as many as were asked for, in no order: nothing bounds them."""
        plans = [(cluster, plan) for cluster in asked.where for plan in self.plans(cluster.device_count)]
        if not plans:
            raise PlanError(
                f"no plan for {self.captured.name} with a batch of {self.gbs} on"
                f" {asked.where[0].device_count} devices is left: the batch has to be a multiple of the"
                f" devices, and something has to be left by what is fixed{self.limits.words} and forbidden"
            )
        return Trials(
            plans=len(plans),
            lows=np.zeros(len(plans)),
            task=plans.__getitem__,
            simulate=partial(map, self.simulated),
            measured=lambda: np.array([not unmeasured(vars(plan)) for _, plan in plans]),
            most=asked.most or len(plans),
            tell=asked.progress,
        )

    def plans(self, devices: int) -> Iterator[Plan]:
        """Those of so many devices."""
        said = self.limits
        recomputes = [Recompute.NONE] if self.captured.fixed else [Recompute.NONE, Recompute.FULL]
        precision = said.fixed.get("precision", self.captured.precision)
        for factor in BATCHES if "batch" in said.allowed else BATCHES[:1]:
            samples, rest = divmod(self.gbs * factor, devices)
            sizes = [] if rest else self._sizes(samples)
            for mbs, recompute, relax in product(sizes, recomputes, self._ways()):
                chosen = {"mbs": mbs, "precision": precision, "recompute": recompute, "relax": relax}
                if said.keep(chosen):
                    fixed = {**said.fixed, **chosen, "gbs": self.gbs * factor}
                    yield from (Plan(**{**fixed, **vars(state)}) for state in self._states(devices, relax))

    def _sizes(self, samples: int) -> list[int]:
        """Micro-batches to try for so many samples of a device."""
        fixed = self.captured.fixed
        splits = [samples // split for split in SPLITS if samples % split == 0]
        return [fixed.batch] if fixed else self.limits.tried("mbs", splits)

    def _ways(self) -> list[Relaxation]:
        """How gradients may be brought together."""
        lossy = {**LOSSY, "compress": [f"compress={name}" for name in compressions()]}
        words = [*EXACT, *(word for kind in LOSSY if kind in self.limits.allowed for word in lossy[kind])]
        return self.limits.tried("relax", [Plan.parse(word).relax for word in words])

    def _states(self, devices: int, relax: Relaxation) -> Iterator[StateOptions]:
        """What data-parallel ranks share; whole replicas alone where gradients are not averaged in full."""
        said = self.limits
        buckets = said.tried("bucket_bytes", BUCKETS if relax.plain else BUCKETS[:1])
        yield from states(said, [Sharding.DDP], bucket_bytes=buckets)
        if relax.plain and devices > 1:
            powers = [shard for shard in divisors(devices) if 1 < shard < devices and shard.bit_count() == 1]
            sharded = [Sharding.ZERO1, Sharding.ZERO2, Sharding.FSDP, Sharding.HSDP]
            yield from states(said, sharded, shard=said.tried("shard", powers))

    def simulated(self, place: tuple[Cluster, Plan]) -> Outcome:
        """A plan simulated; None where it does not fit, and an error where it cannot run or where
        recomputation changes nothing of it.
        """
        cluster, plan = place
        try:
            found = self.captured.predict(plan, cluster, self.limits)
        except PacelineError as error:
            return error
        figures = found.step_s, found.peak_bytes
        plain = cluster.name, replace(plan, recompute=Recompute.NONE)
        repeated = self._plain.get(plain) == figures
        if repeated and plan.recompute is Recompute.FULL:
            return PlanError(f"{plan}: recomputation repeats nothing")
        if not found.fit.fits:
            return None
        self._plain.setdefault(plain, figures)
        return Ranked(
            plan=plan,
            cluster=cluster,
            prediction=found,
            value=found.step_s / plan.gbs * self.goal.factor(cluster),
            bound_s=found.step_s,
            lossy=", ".join(self._changes(plan)),
            unmeasured=unmeasured(vars(plan)),
        )

    def _changes(self, plan: Plan) -> Iterator[str]:
        """What of a plan changes the result of training, as the words that allow it."""
        if plan.relax.compress:
            yield "compress"
        elif not plan.relax.mode.every_step:
            yield "staleness"
        if plan.gbs != self.gbs:
            yield "batch"
