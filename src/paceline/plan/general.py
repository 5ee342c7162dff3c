"""Plan any other module: captured, then every way to share its work by data, each simulated.

The space is small enough to try all of it, so that the certificate is exact. What changes the result of
training (compressed or late gradients, another batch) is tried only where it is allowed, and marked.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from paceline.capture import capture, usual_precision
from paceline.errors import DoesNotFit, PacelineError, PlanError, nearest
from paceline.plan import evidence
from paceline.plan.answer import best_measured, front, why
from paceline.plan.run import goal
from paceline.plan.search import Progress
from paceline.plan.space import BUCKETS, Limits, StateOptions, ineffective, spell
from paceline.plan.workers import Interrupted
from paceline.predict.degrees import resolve
from paceline.predict.simulated import predict
from paceline.spec.cluster import Cluster
from paceline.spec.plan import Plan, divisors
from paceline.spec.planned import Planned, Ranked
from paceline.spec.prediction import DistributedPrediction
from paceline.spec.synchronisation import PLAIN, RELAXED_SIZES, Relaxation, compressions
from paceline.spec.vocabulary import Recompute, Sharding
from paceline.spec.workload import Workload

#: samples per device where no batch is given
SAMPLES = 32
#: fields of a plan whose values the search chooses, or takes as fixed
SEARCHED = frozenset(
    {
        "dp",
        "pp",
        "mbs",
        "gbs",
        "seq",
        "precision",
        "framework",
        "recompute",
        "schedule",
        "vpp",
        "sharding",
        "shard",
        "reshard",
        "prefetch",
        "bucket_bytes",
        "relax",
    }
)
#: fields that the search does not know -> what to do instead
REFUSED = dict.fromkeys(
    ("tp", "cp", "ep", "sp", "context", "offload", "adapters"),
    "captured modules are split by data and, between modules, into a pipeline; plan a transformer of the"
    " catalog or hf:PATH for it",
)
#: words that stand for ways to bring gradients together; the first ones leave the result of training as it is
EXACT = ("", "overlap", "priority")
LOSSY: dict[str, tuple[str, ...]] = {
    "compress": (),  # every scheme there is, registered ones among them: see `_lossy`
    "staleness": ("local-sgd", "diloco", "ps-async", "ps-bounded", "easgd", "gossip"),
    "batch": (),
}
#: factors of the batch that are tried where another batch is allowed
BATCHES = (1, 2, 4, 8)
#: micro-batches that the batch of a device is split into
SPLITS = (1, 2, 4)


def plan_module(
    model: Any,
    where: Sequence[Cluster],
    *,
    gbs: int | None = None,
    objective: str = "time",
    fix: Sequence[str] = (),
    forbid: Sequence[str] = (),
    allow: Sequence[str] = (),
    top: int = 10,
    pareto: Sequence[str] = (),
    most: int | None = None,
    options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Planned:
    """The best plan of a captured module on one of some clusters; all plans of its space are simulated, or
    `most` of them.
    """
    begun = time.monotonic()
    said = limits(fix, forbid, allow)
    captured = model if isinstance(model, Captured) else Captured(model, settings(said, options or {}))
    captured.check(said)
    batch = said.settled("gbs", gbs, "--gbs") or SAMPLES * where[0].device_count
    value = goal(objective, where)
    tried: list[Ranked] = []
    over = failed = 0
    plans = [
        (cluster, plan, lossy)
        for cluster in where
        for plan, lossy in _plans(cluster.device_count, batch, said, allow, captured)
    ]
    if not plans:
        raise PlanError(_nothing_left(captured.name, batch, where[0].device_count, said))
    reason = ""
    interrupted = False
    try:
        for i, (cluster, plan, lossy) in enumerate(plans, 1):
            if most is not None and len(tried) >= most:
                break
            try:
                workload = captured.get(plan)
                _check_effect(said, plan, resolve(plan, workload, cluster))
                found = predict(workload, cluster, plan)
            except PacelineError as error:
                failed, reason = failed + 1, reason or str(error)
                continue
            # nothing of it repeats
            if plan.recompute is Recompute.FULL and any(_same(t, plan, found) for t in tried):
                failed += 1
                continue
            if not found.fit.fits:
                over += 1
                continue
            worth = found.step_s / plan.gbs * value.factor(cluster)
            tried.append(
                Ranked(
                    plan=plan,
                    cluster=cluster,
                    prediction=found,
                    value=worth,
                    bound_s=found.step_s,
                    lossy=lossy,
                    unmeasured=evidence.of_plan(plan, evidence.MODULES),
                )
            )
            if progress:
                progress("simulating", i, len(plans), min(t.value for t in tried))
    except KeyboardInterrupt:
        if not tried:
            raise Interrupted(f"none of {len(plans)} plans was simulated yet") from None
        interrupted = True
    if not tried and reason:
        raise PlanError(reason)
    if not tried:
        raise DoesNotFit(
            f"no plan for {captured.name} fits: the smallest micro-batch of a batch of {batch} is too large"
        )
    tried.sort(key=lambda ranked: ranked.value)
    best = tried[0].prediction
    shown = [tried[0], *(replace(ranked, lost=why(ranked.prediction, best)) for ranked in tried[1:])]
    space = len(plans) - failed
    undecided = space - over - len(tried)
    return Planned(
        model=captured.name,
        objective=objective,
        gbs=batch,
        seq=best.seq,
        space=space,
        by_memory=over,
        by_bound=0,
        by_evaluation=len(tried),
        undecided=undecided,
        gap_pct=100.0 if undecided else 0.0,
        elapsed_s=time.monotonic() - begun,
        top=tuple(shown[:top]),
        measured=best_measured(shown),
        pareto=front(shown, pareto) if pareto else (),
        settings=captured.settings,
        interrupted=interrupted,
        notes=tuple(_notes(allow, interrupted, undecided)),
    )


def limits(fix: Sequence[str], forbid: Sequence[str], allow: Sequence[str]) -> Limits:
    """What the user fixes and forbids; PlanError for words that plans of captured modules do not have."""
    _check(allow)
    both = next((word for word in forbid if word in allow), None)
    if both:
        raise PlanError(f"{both} is both allowed and forbidden")
    said = Limits.of(fix, [word for word in forbid if word not in LOSSY], searched=SEARCHED, refused=REFUSED)
    relax = said.fixed.get("relax", PLAIN)
    if not relax.plain and relax == replace(
        PLAIN, **{name: getattr(relax, name) for name in ("ratio", *RELAXED_SIZES)}
    ):
        raise PlanError(
            f"--fix {relax} does not say of what; write the way as well, such as dgc ratio=0.01 or local-sgd"
            " period=8"
        )
    return said


def settings(said: Limits, options: Mapping[str, Any]) -> dict[str, Any]:
    """How to capture: as the options say, and as the fixed words do; PlanError where they contradict each
    other.
    """
    found = dict(options)
    found["seq"] = said.settled("seq", found.get("seq"), "--seq") or None
    precision = said.fixed.get("precision")
    given = found.setdefault("precision", precision)
    if precision is not None and precision != str(given).removeprefix("amp_"):
        raise PlanError(
            f"precision is given twice: --precision {given} and --fix {precision}; leave one of them out"
        )
    return {name: value for name, value in found.items() if value is not None}


def _check_effect(said: Limits, plan: Plan, resolved: Plan) -> None:
    """PlanError where a fixed word is not in the plan that would be predicted."""
    for name, value in said.fixed.items():
        if getattr(plan, name) == value != getattr(resolved, name) and name != "sharding":
            raise PlanError(
                f"--fix {spell(name, value)} has no effect on {resolved}; a schedule needs a pipeline, such"
                " as pp=2"
            )


def _nothing_left(name: str, batch: int, devices: int, said: Limits) -> str:
    return (
        f"no plan for {name} with a batch of {batch} on {devices} devices is left: the batch has to be a"
        f" multiple of the devices, and something has to be left by what is fixed{said.words} and forbidden"
    )


def _notes(allow: Sequence[str], interrupted: bool, undecided: int) -> Iterator[str]:
    if allow:
        yield f"values are per sample; {', '.join(allow)} may change the result of training"
    if interrupted:
        yield "interrupted: the best so far; nothing is known of the plans that were not simulated"
    elif undecided:
        yield f"{undecided:,} plans were not simulated; --most simulates more of them"


def _same(tried: Ranked, plan: Plan, found: DistributedPrediction) -> bool:
    """Whether recomputation changes neither time nor memory of a plan."""
    plain = tried.prediction
    return tried.plan == replace(plan, recompute=Recompute.NONE) and (plain.step_s, plain.peak_bytes) == (
        found.step_s,
        found.peak_bytes,
    )


class Captured:
    """A module captured once per micro-batch and way to recompute; a saved workload has one of each."""

    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        self._model, self.options = model, options
        self._kept: dict[tuple[int, bool], Workload] = {}
        self.fixed = model if isinstance(model, Workload) else None
        self.name = self.fixed.name if self.fixed else str(model)
        usual = options.get("precision") or usual_precision(model)
        self.precision = self.fixed.precision if self.fixed else usual

    def check(self, said: Limits) -> None:
        """PlanError where a fixed word is not what was captured, or will be."""
        words = {
            "precision": self.precision.removeprefix("amp_"),
            "seq": self.fixed.seq if self.fixed else self.options.get("seq"),
        }
        for name, has in words.items():
            wanted = said.fixed.get(name, has)
            if wanted != has:
                raise PlanError(
                    f"--fix {spell(name, wanted)}: {self.name} is captured with {name} {has}; capture it with"
                    f" {wanted}"
                )

    @property
    def settings(self) -> Mapping[str, Any]:
        """How it was, or will be, captured."""
        return self.fixed.options if self.fixed else self.options

    def get(self, plan: Plan) -> Workload:
        if self.fixed:
            return self.fixed
        key = plan.mbs, plan.recompute is Recompute.FULL
        if key not in self._kept:
            self._kept[key] = capture(self._model, batch=plan.mbs, checkpointing=key[1], **self.options)
            self.name = self._kept[key].name
        return self._kept[key]


def _check(allow: Sequence[str]) -> None:
    for word in allow:
        if word not in LOSSY:
            near = nearest(word, list(LOSSY))
            raise PlanError(
                f"--allow {word}: "
                + (f"did you mean {near[0]!r}?" if near else f"expected some of {', '.join(LOSSY)}")
            )


def _plans(
    devices: int, gbs: int, said: Limits, allow: Sequence[str], captured: Captured
) -> Iterator[tuple[Plan, str]]:
    """Every plan, with what of it changes the result of training."""
    fixed = captured.fixed
    recomputes = (Recompute.NONE,) if fixed else (Recompute.NONE, Recompute.FULL)
    precision = said.fixed.get("precision", captured.precision)
    for factor in BATCHES if "batch" in allow else (1,):
        batch = gbs * factor
        if batch % devices:
            continue
        sizes = said.among("mbs", [fixed.batch] if fixed else _sizes(batch // devices, said))
        for mbs, recompute, (relax, lossy) in product(sizes, recomputes, _ways(said, allow)):
            marks = ", ".join(filter(None, (lossy, "batch" if factor > 1 else "")))
            layers = {"mbs": mbs, "precision": precision, "recompute": recompute, "relax": relax}
            for state in _states(devices, said, relax.plain):
                chosen = {**layers, **vars(state)}
                if said.keep(chosen, ineffective(state.sharding)):
                    yield Plan(**{**said.fixed, **chosen, "gbs": batch}), marks


def _sizes(samples: int, said: Limits) -> list[int]:
    """Micro-batches to try for so many samples of a device."""
    if "mbs" in said.fixed:
        return [said.fixed["mbs"]]
    return [samples // split for split in SPLITS if samples % split == 0]


def _ways(said: Limits, allow: Sequence[str]) -> list[tuple[Relaxation, str]]:
    """How gradients may be brought together, with what of it changes the result of training."""
    if "relax" in said.fixed:
        relax = said.fixed["relax"]
        return [(relax, _kind(relax))]
    words = [(word, "") for word in EXACT] + [(word, kind) for kind in allow for word in _lossy(kind)]
    return [(Plan.parse(word).relax, kind) for word, kind in words]


def _lossy(kind: str) -> tuple[str, ...]:
    """Words of the ways of a kind that change the result of training."""
    return tuple(f"compress={name}" for name in compressions()) if kind == "compress" else LOSSY[kind]


def _kind(relax: Relaxation) -> str:
    """What a way to bring gradients together changes: the word that allows it."""
    if relax.compress:
        return "compress"
    return "" if relax.mode.every_step else "staleness"


def _states(devices: int, said: Limits, exact: bool) -> Iterator[StateOptions]:
    """What data-parallel ranks share; whole replicas alone where gradients are not averaged in full."""
    buckets = said.tried("bucket_bytes", BUCKETS if exact else BUCKETS[:1])
    yield from (StateOptions(Sharding.DDP, bucket_bytes=size) for size in buckets)
    if devices == 1 or not exact:
        return
    yield from (StateOptions(Sharding.ZERO1), StateOptions(Sharding.ZERO2))
    way = {name: said.fixed.get(name, getattr(Plan, name)) for name in ("reshard", "prefetch")}
    yield StateOptions(Sharding.FSDP, **way)
    powers = [shard for shard in divisors(devices) if 1 < shard < devices and shard.bit_count() == 1]
    yield from (StateOptions(Sharding.HSDP, shard=shard, **way) for shard in said.tried("shard", powers))
