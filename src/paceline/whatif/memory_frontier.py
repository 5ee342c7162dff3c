"""Peak memory against step time: policies that compute activations again or send them to the host.

Schedules come from costs of the chain of modules (`memory_chain`, `cost.recompute_schedules`). What a point
shows does not: each policy is applied to the module as `paceline.train.recompute` does, the step is captured
again, and that capture is predicted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paceline.capture import capture
from paceline.capture.lifetimes import step_memory
from paceline.cost import recompute_schedules as schedules
from paceline.cost.host_link import link_rate
from paceline.cost.recompute_schedules import ChainSpan, OptimalSchedules
from paceline.errors import CaptureError, SpecError
from paceline.predict.step import Conditions, predict
from paceline.spec.device import Device
from paceline.spec.memory_frontier import FrontierPoint, KeepCost, LiveMoment, MemoryFrontier, ModuleMemory
from paceline.spec.prediction import Prediction
from paceline.spec.recomputation import RecomputePolicy, RecomputeSpan, kind_of
from paceline.spec.step_memory import StepMemory
from paceline.spec.workload import MEMORY_KINDS, Workload
from paceline.units import show
from paceline.whatif.memory_chain import DEAR, StepChain, live

#: moments of the chart of lifetimes
MOMENTS = 72
#: amounts of memory for which the optimal schedule is looked for
BUDGETS = 9
#: links beyond which the dynamic programme takes too long
MOST_LINKS = 160
#: shares of what modules keep that go to the host
OFFLOADED = (0.25, 0.5, 0.75, 1.0)
_STATE = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    name: str
    words: str
    policy: RecomputePolicy


def memory_frontier(
    model: Any, device: Device, conditions: Conditions | None = None, **options: Any
) -> MemoryFrontier:
    """Lifetimes of a step of `model` on a device, and the frontier of memory and time; `options` are those of
    `capture`.
    """
    for name in ("compile", "checkpointing", "recompute"):
        if options.pop(name, None):
            raise SpecError(
                f"{name} does not go with an analysis of memory, which chooses by module; leave it out"
            )
    where = conditions or Conditions()
    memory = step_memory(model, **options)
    chain = StepChain.of(memory, device, where)
    base = predict(memory.workload, device, where)
    points, notes = [_point(_KEEP_ALL, memory.workload, base, base, device)], []
    for candidate in _distinct(_candidates(chain, device)):
        try:
            again = capture(model, **options, recompute=candidate.policy)
        except CaptureError as error:
            notes.append(f"left out: {candidate.name}: {str(error).splitlines()[0]}")
            continue
        if candidate.policy.offload and not again.options.get("offloaded_bytes"):
            continue  # all that these modules keep is too small to be sent
        points.append(_point(candidate, again, predict(again, device, where), base, device))
    moments = _moments(chain)
    return MemoryFrontier(
        model=memory.workload.name,
        batch=memory.workload.batch,
        seq=memory.workload.seq,
        precision=memory.workload.precision,
        device=device.name,
        available_bytes=base.memory.available_bytes,
        peak=max(_live_moments(chain), key=lambda moment: moment.bytes),
        moments=tuple(moments),
        modules=tuple(_modules(chain, [at for at, _ in _bins(memory)])),
        kinds=tuple(_kinds(chain)),
        points=tuple(_marked(points)),
        notes=tuple(notes),
    )


def _distinct(candidates: Iterator[_Candidate]) -> Iterator[_Candidate]:
    seen = [RecomputePolicy()]
    for candidate in candidates:
        if candidate.policy not in seen:
            seen.append(candidate.policy)
            yield candidate


# -- points ----------------------------------------------------------------------------------------


def _point(
    candidate: _Candidate, workload: Workload, found: Prediction, base: Prediction, device: Device
) -> FrontierPoint:
    sent = int(workload.options.get("offloaded_bytes", 0))
    # the copies of one device are not hidden: each waits for the operator before it
    copies_s = 2 * sent / link_rate(device, 1)
    step_s = found.step_s + copies_s
    kinds = found.memory.by_kind
    return FrontierPoint(
        name=candidate.name,
        words=candidate.words,
        policy=candidate.policy,
        peak_bytes=found.memory.peak_bytes,
        passing_bytes=sum(size for kind, size in kinds.items() if kind not in _STATE),
        step_s=step_s,
        step_s_low=found.step_s_low + copies_s,
        step_s_high=found.step_s_high + copies_s,
        overhead=step_s / base.step_s - 1,
        compute=workload.flops / base.flops - 1,
        offloaded_bytes=sent,
        hidden_s=max(found.step_s, copies_s) if sent else None,
    )


def _marked(points: Sequence[FrontierPoint]) -> list[FrontierPoint]:
    """Points from the largest to the smallest, those marked that no other beats in both memory and time."""

    def beaten(point: FrontierPoint) -> bool:
        mine = (point.peak_bytes, point.step_s)
        theirs = [(other.peak_bytes, other.step_s) for other in points]
        return any(m <= mine[0] and s <= mine[1] and (m, s) != mine for m, s in theirs)

    ordered = sorted(points, key=lambda point: (-point.peak_bytes, point.step_s))
    return [replace(point, best=not beaten(point)) for point in ordered]


# -- policies to try -------------------------------------------------------------------------------

_KEEP_ALL = _Candidate(name="keep all", words="nothing is computed again", policy=RecomputePolicy())


def _candidates(chain: StepChain, device: Device) -> Iterator[_Candidate]:
    yield from _blocks(chain)
    yield from _square_root(chain)
    yield from _selective(chain)
    yield from _optimal(chain)
    if device.kind != "cpu":
        yield from _offloaded(chain)


def _policy(chain: StepChain, spans: Sequence[ChainSpan], keep: Sequence[str] = ()) -> RecomputePolicy:
    """Spans of links as spans of modules; `keep` holds for those that keep what is dear."""
    return RecomputePolicy(
        spans=tuple(
            RecomputeSpan(
                modules=tuple(unit.path for unit in chain.units[span.first : span.last + 1]),
                keep=tuple(keep) if span.selective else (),
            )
            for span in spans
        )
    )


def _blocks(chain: StepChain) -> Iterator[_Candidate]:
    spans = [
        ChainSpan(number, number)
        for number, unit in enumerate(chain.units)
        if unit.composite and unit.spannable and not unit.mutates
    ]
    if spans:
        words = f"each of {len(spans)} blocks keeps its input only"
        yield _Candidate(name="every block", words=words, policy=_policy(chain, spans))


def _square_root(chain: StepChain) -> Iterator[_Candidate]:
    spans = schedules.square_root(chain.links)
    if spans:
        most = max(span.last - span.first + 1 for span in spans)
        words = f"{len(spans)} checkpoints of up to {most} modules; what comes last is kept"
        yield _Candidate(name="square root", words=words, policy=_policy(chain, spans))


def _selective(chain: StepChain) -> Iterator[_Candidate]:
    """Keep fewer and fewer kinds of operators, from those that take the most seconds per byte."""
    kinds = [cost for cost in _kinds(chain) if cost.kind != "other" and cost.saved_bytes]
    size = max(1, int(np.sqrt(len(chain.units))))
    spans = [
        replace(span, selective=True)
        for span in schedules.all_pieces(_apart(chain), size)
        if span.last > span.first or chain.units[span.first].composite
    ]
    for count in range(len(kinds), 0, -1):
        kept = tuple(cost.kind for cost in kinds[:count])
        words = f"results of {', '.join(kept)} are kept, the others computed again"
        name = f"keep {kept[-1]} and dearer" if count > 1 else f"keep {kept[0]}"
        if spans:
            yield _Candidate(name=name, words=words, policy=_policy(chain, spans, kept))


def _apart(chain: StepChain) -> list[schedules.ChainLink]:
    """Links of which blocks join no other."""
    units = chain.units
    follows = [
        link.follows and not units[n].composite and not units[n - 1].composite
        for n, link in enumerate(chain.links)
    ]
    return [replace(link, follows=joined) for link, joined in zip(chain.links, follows, strict=True)]


def _optimal(chain: StepChain) -> Iterator[_Candidate]:
    links = chain.links
    if len(links) > MOST_LINKS:
        return
    everything = sum(link.saved for link in links) + max(
        link.forward_extra + link.backward_extra + link.gradients for link in links
    )
    found = OptimalSchedules(links, everything + sum(link.gradients for link in links))
    fastest = found.seconds(found.unit * found.steps)
    least, most = found.least(), found.unit * found.steps
    if not np.isfinite(least):
        return
    present = {kind_of(op.name) for op in chain.ops[: chain.memory.forward]}
    kept = tuple(kind for kind in DEAR if kind in present)
    enough = next(m for m in np.arange(least, most + found.unit, found.unit) if found.seconds(m) <= fastest)
    for budget in np.linspace(enough, least, BUDGETS)[1:]:
        spans = found.spans(float(budget))
        if spans:
            name = f"optimal, {show(float(budget), 'bytes')}"
            yield _Candidate(name=name, words=_words(spans, kept), policy=_policy(chain, spans, kept))


def _words(spans: Sequence[ChainSpan], kept: Sequence[str]) -> str:
    whole = [span for span in spans if not span.selective]
    outer = [span for span in whole if not any(_inside(span, other) for other in whole)]
    modules = sum(span.last - span.first + 1 for span in outer)
    parts = []
    if outer:
        parts.append(f"{_count(len(outer), 'checkpoint')} over {_count(modules, 'module')}")
    if len(whole) > len(outer):
        parts.append(f"{len(whole) - len(outer)} within them")
    if len(spans) > len(whole):
        selective = _count(len(spans) - len(whole), "module")
        parts.append(f"{selective} with only {', '.join(kept)} kept")
    return ", ".join(parts)


def _inside(span: ChainSpan, other: ChainSpan) -> bool:
    return other != span and other.first <= span.first and span.last <= other.last


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _offloaded(chain: StepChain) -> Iterator[_Candidate]:
    """From the front of the chain, whose activations wait longest, modules that keep so much of the whole."""
    saved = [sum(life.bytes for life in chain.saved(number)) for number in range(len(chain.units))]
    usable = [number for number, unit in enumerate(chain.units) if unit.spannable and saved[number]]
    sums = np.cumsum([saved[number] for number in usable])
    for share in OFFLOADED:
        if not len(sums):
            return
        count = int(np.searchsorted(sums, share * sums[-1] * (1 - 1e-9))) + 1
        paths = tuple(chain.units[number].path for number in usable[:count])
        words = f"what the first {len(paths)} modules keep waits in host memory"
        policy = RecomputePolicy(offload=paths)
        yield _Candidate(name=f"offload {100 * share:.0f} %", words=words, policy=policy)


# -- what lives when -------------------------------------------------------------------------------


def _kinds(chain: StepChain) -> list[KeepCost]:
    """Kinds of operators of modules that can be checkpoints, those that take most seconds per byte first."""
    makers: dict[int, str] = {}
    for op in chain.ops[: chain.memory.forward]:
        for access in op.writes:
            makers.setdefault(access.tensor, kind_of(op.name) or "other")
    sizes: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for number, unit in enumerate(chain.units):
        if not unit.spannable:
            continue
        for life in chain.saved(number):
            sizes[makers.get(life.tensor, "other")] += life.bytes
        for position in range(unit.start, unit.end):
            seconds[kind_of(chain.ops[position].name) or "other"] += float(chain.seconds[position])
    costs = [KeepCost(kind=kind, saved_bytes=sizes[kind], forward_s=seconds[kind]) for kind in seconds]
    return sorted(costs, key=lambda cost: -cost.s_per_byte)


def _bins(memory: StepMemory) -> Iterator[tuple[int, int]]:
    """Operators of each moment of the chart: first, and one beyond the last."""
    edges = np.unique(np.linspace(0, memory.operators, MOMENTS + 1).astype(int))
    yield from zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)


def _by_kind(chain: StepChain) -> Mapping[str, Any]:
    """Live bytes by kind at each operator."""
    memory = chain.memory
    found = {}
    for kind in MEMORY_KINDS:
        mine = live([life for life in memory.lives if life.kind == kind], memory.operators)
        found[kind] = mine + int(memory.workload.resident.get(kind, 0))
    return found


def _moment(chain: StepChain, by_kind: Mapping[str, Any], ends: Any, at: int) -> LiveMoment:
    return LiveMoment(
        at_s=float(ends[at]),
        phase="forward" if at < chain.memory.forward else "backward",
        by_kind={kind: int(sizes[at]) for kind, sizes in by_kind.items() if sizes[at]},
    )


def _live_moments(chain: StepChain) -> Iterator[LiveMoment]:
    """Every operator."""
    by_kind, ends = _by_kind(chain), np.cumsum(chain.seconds)
    for at in range(chain.memory.operators):
        yield _moment(chain, by_kind, ends, at)


def _moments(chain: StepChain) -> Iterator[LiveMoment]:
    """Of each bin of operators, the one at which most is live."""
    every = list(_live_moments(chain))
    for first, end in _bins(chain.memory):
        yield max(every[first:end], key=lambda moment: moment.bytes)


def _modules(chain: StepChain, starts: Sequence[int]) -> Iterator[ModuleMemory]:
    for number, unit in enumerate(chain.units):
        curve = live(chain.born_in[number], chain.memory.operators)
        yield ModuleMemory(
            path=unit.path or "(between modules)",
            saved_bytes=sum(life.bytes for life in chain.saved(number)),
            forward_s=chain.forward_s(unit),
            live=tuple(int(curve[at]) for at in starts),
        )
