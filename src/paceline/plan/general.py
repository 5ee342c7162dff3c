"""Plan any other module: captured, then every way to share its work by data, each simulated.

The space is small enough to try all of it, so that the certificate is exact. What changes the result of training (compressed or late
gradients, another batch) is tried only where it is allowed, and marked.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.capture import capture, usual_precision
from paceline.errors import PacelineError, PlanError, nearest
from paceline.plan.answer import front, why
from paceline.plan.run import goal
from paceline.plan.search import Progress
from paceline.plan.space import BUCKETS, Limits
from paceline.predict.parallel import predict
from paceline.spec.cluster import Cluster
from paceline.spec.plan import Plan, divisors
from paceline.spec.planned import Planned, Ranked
from paceline.spec.prediction import DistributedPrediction
from paceline.spec.synchronisation import compressions
from paceline.spec.workload import Workload

#: samples per device where no batch is given
SAMPLES = 32
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
    model: Any, where: Sequence[Cluster], *, gbs: int | None = None, objective: str = "time", fix: Sequence[str] = (), forbid: Sequence[str] = (),
    allow: Sequence[str] = (), top: int = 10, pareto: Sequence[str] = (), options: Mapping[str, Any] | None = None, progress: Progress | None = None,
) -> Planned:
    """The best plan of a captured module on one of some clusters; all plans of its space are simulated."""
    begun = time.monotonic()
    _check(allow)
    settings = dict(options or {})
    said = Limits.of(fix, [word for word in forbid if word not in LOSSY])
    batch = gbs or said.fixed.get("gbs") or SAMPLES * where[0].device_count
    captured = model if isinstance(model, Captured) else Captured(model, settings)
    value = goal(objective, where)
    tried: list[Ranked] = []
    over = failed = 0
    plans = [
        (cluster, plan, lossy) for cluster in where
        for plan, lossy in _plans(cluster.device_count, batch, said, fix, allow, captured.fixed, captured.precision)]
    if not plans:
        raise PlanError(
            f"no plan for {captured.name} with a batch of {batch} on {where[0].device_count} devices is left: the batch has to be a multiple of "
            "the devices, and something has to be left by what is fixed and forbidden")
    reason = ""
    interrupted = False
    try:
        for i, (cluster, plan, lossy) in enumerate(plans, 1):
            try:
                found = predict(captured.get(plan), cluster, plan)
            except PacelineError as error:
                failed, reason = failed + 1, str(error)
                continue
            if plan.recompute == "full" and any(_same(t, plan, found) for t in tried):  # nothing of it repeats, so nothing is recomputed
                failed += 1
                continue
            if not found.fit.fits:
                over += 1
                continue
            worth = found.step_s / plan.gbs * value.factor(cluster)
            tried.append(Ranked(plan=plan, cluster=cluster, prediction=found, value=worth, bound_s=found.step_s, lossy=lossy))
            if progress:
                progress("simulating", i, len(plans), min(t.value for t in tried))
    except KeyboardInterrupt:
        interrupted = True
    if not tried:
        raise PlanError(reason if failed else f"no plan for {captured.name} fits: the smallest micro-batch of a batch of {batch} is too large")
    tried.sort(key=lambda ranked: ranked.value)
    best = tried[0].prediction
    shown = [tried[0], *(replace(ranked, lost=why(ranked.prediction, best)) for ranked in tried[1:])]
    space = len(plans) - failed
    notes = (f"values are per sample; {', '.join(allow)} may change the result of training",) if allow else ()
    return Planned(
        model=captured.name, objective=objective, gbs=batch, seq=best.seq, space=space, by_memory=over,
        by_bound=0, by_evaluation=len(tried), undecided=space - over - len(tried),
        gap_pct=100.0 if interrupted else 0.0, elapsed_s=time.monotonic() - begun, top=tuple(shown[:top]),
        pareto=front(shown, pareto) if pareto else (), interrupted=interrupted, notes=notes)


def _same(tried: Ranked, plan: Plan, found: DistributedPrediction) -> bool:
    """Whether recomputation changes neither time nor memory of a plan."""
    plain = tried.prediction
    return tried.plan == replace(plan, recompute="none") and (plain.step_s, plain.peak_bytes) == (found.step_s, found.peak_bytes)


class Captured:
    """A module captured once per micro-batch and way to recompute; a saved workload has one of each."""

    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        self._model, self._options = model, options
        self._kept: dict[tuple[int, bool], Workload] = {}
        self.fixed = model if isinstance(model, Workload) else None
        self.name = self.fixed.name if self.fixed else str(model)
        usual = options.get("precision") or usual_precision(model)
        self.precision = self.fixed.precision if self.fixed else usual

    def get(self, plan: Plan) -> Workload:
        if self.fixed:
            return self.fixed
        key = plan.mbs, plan.recompute == "full"
        if key not in self._kept:
            self._kept[key] = capture(self._model, batch=plan.mbs, checkpointing=key[1], **self._options)
            self.name = self._kept[key].name
        return self._kept[key]


def _check(allow: Sequence[str]) -> None:
    for word in allow:
        if word not in LOSSY:
            near = nearest(word, list(LOSSY))
            raise PlanError(f"--allow {word}: " + (f"did you mean {near[0]!r}?" if near else f"expected some of {', '.join(LOSSY)}"))


def _plans(
    devices: int, gbs: int, said: Limits, fix: Sequence[str], allow: Sequence[str], fixed: Workload | None, precision: str,
) -> Iterator[tuple[Plan, str]]:
    """Every plan, with what of it changes the result of training."""
    ways = [(word, "") for word in EXACT] + [(word, kind) for kind in allow for word in _lossy(kind)]
    factors = BATCHES if "batch" in allow else (1,)
    for factor in factors:
        batch = gbs * factor
        if batch % devices:
            continue
        sizes = [fixed.batch] if fixed else [batch // devices // split for split in SPLITS if batch // devices % split == 0]
        for mbs in said.among("mbs", sizes):
            for recompute in ("none",) if fixed else ("none", "full"):
                for word, lossy in ways:
                    marks = ", ".join(filter(None, (lossy, "batch" if factor > 1 else "")))
                    for state in _states(devices) if not word else [{"sharding": "ddp"}]:
                        plan = Plan.parse(" ".join([word, *fix]))
                        chosen = {"mbs": mbs, "precision": precision, "gbs": batch, "recompute": recompute, **state}
                        if said.keep(chosen):
                            yield replace(plan, **chosen), marks


def _lossy(kind: str) -> tuple[str, ...]:
    """Words of the ways of a kind that change the result of training."""
    return tuple(f"compress={name}" for name in compressions()) if kind == "compress" else LOSSY[kind]


def _states(devices: int) -> Iterator[dict[str, Any]]:
    """What data-parallel ranks share."""
    for bucket in BUCKETS:
        yield {"sharding": "ddp", "bucket_bytes": bucket}
    if devices > 1:
        yield from ({"sharding": kind} for kind in ("zero1", "zero2", "fsdp"))
        yield from ({"sharding": "hsdp", "shard": shard} for shard in divisors(devices) if 1 < shard < devices and math.log2(shard) % 1 == 0)
