"""`auto`: watches a few steps, probes the link and the encoders, and takes what the model of each strategy
says is fastest here.

Strategies between which the model cannot tell are tried, each for a few steps of the training itself, and the
fastest stays. It says no where nothing pays: plain all-reduce stays unless another strategy is faster by more
than the model errs.

What may be lost is the user's to say (`loss`): "none", the default, keeps synchronous SGD exact, "rounding"
allows half precision on the wire, "some" allows ternary and sparse gradients, too. Where schemes are allowed,
each layer goes as float32 or compressed, whichever ends the step sooner. Rank 0 says once, on stderr, what
was chosen and whether it is exact.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from paceline.cost.compression import assign
from paceline.errors import SpecError
from paceline.spec.compression import Float32, Scheme, parse
from paceline.train.comm import agree
from paceline.train.launch import NOTE
from paceline.train.probe import cores, probe, rates
from paceline.train.profile import Profile, Profiler, order_of
from paceline.train.strategies.averaging import Averaging
from paceline.train.strategies.base import State, Strategy
from paceline.train.strategies.estimate import (
    EXACT,
    FLOAT32,
    LOSSES,
    NO_LOSS,
    Schemes,
    Setting,
    averaging_s,
    step_s,
)
from paceline.train.strategies.overlap import Overlap
from paceline.train.strategies.priority import Priority

T = TypeVar("T")
#: goes on after each step, and is sent the seconds of its update
Course = Generator[None, float, T]
#: a strategy must be faster by this share to replace plain all-reduce, and layers treated differently by this
#: to replace all alike: those in float32 need messages of another kind, which the model counts too low on a
#: busy core
MARGIN, _MIXED = 0.03, 0.1
#: what is expected to take up to so many times as long as the best is tried, this many at most
_NEAR, _TRIED = 1.3, 3
#: steps before those timed, of which the first may be a plain one that is watched; then for so many seconds,
#: within these numbers of steps. The median of a few in a row counts: what hides under the next step is seen
#: over some only
_LEAD, _TRIAL_S, _FEWEST, _MOST, _ROW = 3, 0.5, 6, 30, 3
#: times that all are tried there and back, at most; doubt about their seconds, as a share, from which on none
#: of it matters
_PASSES, _SURE = 4, 0.02
#: exact ones whose updates hide under the next forward pass
_OVERLAPPED: Mapping[str, Callable[[], Strategy]] = {"overlap": Overlap, "priority": Priority}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen, why, and what was expected of everything else; seconds per step."""

    strategy: str
    expected_s: Mapping[str, float]
    #: by strategy, the scheme of each parameter
    mixes: Mapping[str, Schemes]
    reason: str
    #: of strategies that were tried
    measured_s: Mapping[str, float] = field(default_factory=dict)


class Auto(Strategy):
    """Plain averaging for `watch` steps, then what is fastest; where that is not clear (`trial`), after some
    steps of each that may be.
    """

    name = "auto"
    paper = "choice per layer as in Wang et al., Espresso, 2022; model in `estimate`"

    def __init__(self, *, loss: str = NO_LOSS, watch: int = 4, trial: bool = True) -> None:
        super().__init__()
        if loss not in LOSSES:
            raise SpecError(f"loss must be {', '.join(LOSSES)}; got {loss!r}")
        if watch < 2:
            raise SpecError(f"auto watches at least 2 steps, got {watch}")
        self.schemes, self.watch, self.trial = LOSSES[loss], watch, trial
        self.choice: Choice | None = None
        # after the passes: they are timed
        self.inner: Strategy = Averaging("fp32", bucket_bytes=float("inf"), first_bytes=float("inf"))
        #: whether what it does now is what it will do
        self.settled = False
        #: those that are tried, and what they remember
        self._tried: list[str] = []
        self._remembered: dict[str, State] = {}
        #: what it goes on with, and the scheme of each parameter
        self._taken: tuple[str, Schemes] | None = None
        self._scaler: Any = None

    def _begin(self) -> None:
        self.inner.attach(self.model, self.optimizer, self.engine, alike=True)
        self._hold_optimizer()
        self._profiler = Profiler(self.model)
        self._course = self._steps()
        next(self._course)
        self._undo.callback(lambda: self.inner.detach())
        self._undo.callback(self._say_unsettled)
        self._undo.callback(self._profiler.remove)
        self._undo.callback(self._course.close)

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed(self.inner._step, *args, **kwargs)

    def _scaled_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed(self.inner._scaled_step, *args, **kwargs)

    def _timed(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A step of the strategy at hand, of which its course learns."""
        start = time.perf_counter()
        result = step(*args, **kwargs)
        with suppress(StopIteration):  # it has settled
            self._course.send(time.perf_counter() - start)
        return result

    def _steps(self) -> Course[None]:
        """What it does after one step and the next; each time it is sent the seconds of the update."""
        for _ in range(self.watch):
            self._profiler.stepped((yield))
        self._profiler.remove()
        if self.world > 1:  # one rank alone sends nothing, whatever the strategy
            yield from self._decide()
        self.settled = True

    def _decide(self) -> Course[None]:
        """Chooses; strategies that may be the fastest are tried there and back, so that a machine whose pace
        drifts is as slow for one as for the others, while it is not clear which is.
        """
        self._scaler = getattr(self.inner, "scaler", None)  # later ones may not have it, or not be told of it
        with torch.no_grad():
            self.choice = self._choose()
        names = self._tried = near(self.choice) if self.trial else []
        seconds: defaultdict[str, list[float]] = defaultdict(list)
        while names:
            for name in (*names, *reversed(names)):
                self._go_on_with(name)
                took = yield from self._trial(self.choice.expected_s[name])
                seconds[name].append(took)
            names = undecided(seconds)
        if seconds:
            self.choice = measured(self.choice, seconds)
        self._go_on_with(self.choice.strategy)
        self._remembered.clear()
        self._tried = []
        self._tell()

    def _trial(self, expected_s: float) -> Course[float]:
        """Some steps of what it does now: the seconds of one, on the slowest rank."""
        ends = []
        for _ in range(_LEAD + min(_MOST, max(_FEWEST, round(_TRIAL_S / expected_s))) + 1):
            yield
            ends.append(time.perf_counter())
        timed = ends[_LEAD:]
        took = statistics.median(b - a for a, b in zip(timed, timed[_ROW:], strict=False)) / _ROW
        slowest = torch.tensor([took], device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest)

    def _tell(self) -> None:
        """What it goes on with, for the user."""
        if self._taken is not None:
            self._say(told(*self._taken, self.schemes))

    def _say(self, line: str) -> None:
        if self.rank == 0:
            print(f"{NOTE}{line}", file=sys.stderr, flush=True)

    def _go_on_with(self, name: str) -> None:
        """Takes a strategy as it was chosen, with what it remembers if it was tried before."""
        assert self.choice is not None
        if self._taken is not None:
            if name == self._taken[0]:
                return
            self.inner.synchronize()
            self._remembered[self._taken[0]] = self.inner.state_dict()
        self._take(name, self.choice.mixes[name])
        if name in self._remembered:
            self.inner.load_state_dict(self._remembered.pop(name))

    def _take(self, name: str, by_name: Schemes) -> None:
        """Goes on with another strategy, and with these schemes of parameters."""
        new = _OVERLAPPED[name]() if name in _OVERLAPPED else Averaging(by_name=by_name, scaler=self._scaler)
        self.inner.synchronize()
        self.inner.detach()
        self.inner, self._taken = new, (name, by_name)
        new.attach(self.model, self.optimizer, self.engine, alike=True)
        self.hears_of_scaler = new.hears_of_scaler
        self._hold_optimizer()

    def _choose(self) -> Choice:
        """Rank 0 decides from its own profile; all take part in the probe."""
        machine = probe(self.engine, self.device)
        own, threads = cores(self.device)
        setting = Setting(
            machine=machine,
            world=self.world,
            cores=own,
            threads=min(threads, own),
            rates=rates(self.schemes, [p.numel() for p in self.names], self.world, self.device),
        )
        return agree(choose(self._profiler.profile(self.optimizer), setting, self.schemes))

    def synchronize(self) -> None:
        self.inner.synchronize()

    def no_sync(self) -> Any:
        return self.inner.no_sync()

    def _say_unsettled(self) -> None:
        if self._tried:
            self._say(unsettled(self._tried))

    def state_dict(self) -> State:
        if self._taken is None or not self.settled:
            return {}
        name, by_name = self._taken
        schemes = {parameter: str(scheme) for parameter, scheme in by_name.items()}
        return {"world": self.world, "strategy": name, "schemes": schemes, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Goes on as before, with what compressors held back.

        It looks again where the number of ranks has changed, or where what was taken is not allowed any more.
        """
        if state.get("world") != self.world or state["strategy"] not in (*EXACT, *self.schemes):
            return
        self._profiler.remove()
        self._course.close()
        self.settled, self._tried = True, []
        self._take(state["strategy"], {name: parse(text) for name, text in state["schemes"].items()})
        self.inner.load_state_dict(state["inner"])
        self._tell()

    def optimizer_state(self) -> State:
        return self.inner.optimizer_state()

    def asked_state(self) -> State:
        return self.inner.asked_state()

    def load_optimizer_state(self, state: State) -> None:
        self.inner.load_optimizer_state(state)


def told(name: str, by_name: Schemes, schemes: Sequence[str]) -> str:
    """One line: what was taken, whether it is exact, and how to have it otherwise."""
    if any(not isinstance(scheme, Float32) for scheme in by_name.values()):
        return f"auto goes on with {name!r}, which is lossy; auto:loss=none keeps gradients exact"
    if schemes:
        return f"auto goes on with {name!r}, which is exact; lossy ones were allowed ({', '.join(schemes)})"
    return f"auto goes on with {name!r}, which is exact; auto:loss=some also allows lossy compression"


def unsettled(tried: Collection[str]) -> str:
    """One line for a run that ended during the trials: what its steps were averaged with."""
    kind = "which are exact" if set(tried) <= set(EXACT) else "some of which are lossy"
    return f"auto ended before it settled, while it tried {', '.join(sorted(tried))}, {kind}"


def choose(profile: Profile, setting: Setting, schemes: tuple[str, ...]) -> Choice:
    """The fastest strategy by the model, plain all-reduce unless the gain is worth it."""
    expected = {name: step_s(name, profile, setting) for name in EXACT}
    plain = expected["allreduce"]
    mixes: dict[str, Schemes] = dict.fromkeys(
        EXACT, dict.fromkeys((layer.name for layer in profile.layers), FLOAT32)
    )
    for text in schemes:
        allowed = assign(parse(text), profile.shapes)
        mixes[text], expected[text] = mix(profile, setting, allowed)
    best = min(expected, key=expected.__getitem__)
    if expected[best] > plain * (1 - MARGIN):
        reason = (
            f"nothing is faster than all-reduce by more than {MARGIN:.0%}: communication hides, or costs less"
            " than what would save it"
        )
        best = "allreduce"
    else:
        reason = f"{best} is expected to take {expected[best] / plain:.0%} of the time of all-reduce"
    return Choice(strategy=best, expected_s=expected, mixes=mixes, reason=reason)


def near(choice: Choice) -> list[str]:
    """Strategies that may be the fastest, if there are several, those that hold something back last, so that
    it waits for as few steps as may be.
    """
    expected = choice.expected_s
    limit = _NEAR * expected[choice.strategy]
    found = sorted((name != choice.strategy, seconds, name) for name, seconds in expected.items())
    tried = [name for _, seconds, name in found if seconds <= limit][:_TRIED]
    return sorted(tried, key=lambda name: (name == "dgc", expected[name])) if len(tried) > 1 else []


def measured(choice: Choice, tried: Mapping[str, Sequence[float]]) -> Choice:
    """A choice with what was measured: the fastest of those that were in the running to the end."""
    means = {name: statistics.fmean(seconds) for name, seconds in tried.items()}
    best = min(_rivals(tried), key=means.__getitem__)
    shown = {name: f"{seconds * 1e3:.1f} ms" for name, seconds in means.items()}
    others = ", ".join(f"{name} {took}" for name, took in shown.items() if name != best)
    reason = f"{best} took {shown[best]} a step here; {others}"
    return replace(choice, strategy=best, measured_s=means, reason=reason)


def _rivals(tried: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    """Those that were still in the running in the last pass."""
    most = max(map(len, tried.values()))
    return {name: seconds for name, seconds in tried.items() if len(seconds) == most}


def undecided(tried: Mapping[str, Sequence[float]]) -> list[str]:
    """Which strategies may still be the fastest, as far as trials of the same one differ; none where it does
    not matter, or was tried often.
    """
    last = _rivals(tried)
    measured = {name: statistics.fmean(seconds) for name, seconds in last.items()}
    doubt = max(
        (max(seconds) - min(seconds)) / measured[name] / len(seconds) ** 0.5 for name, seconds in last.items()
    )
    left = [name for name, seconds in measured.items() if seconds <= min(measured.values()) * (1 + doubt)]
    often = len(last[left[0]]) >= 2 * _PASSES
    return [] if len(left) < 2 or doubt < _SURE or often else left


def mix(profile: Profile, setting: Setting, allowed: Schemes) -> tuple[dict[str, Scheme], float]:
    """Per layer, float32 or the scheme, and the seconds of a step: starting from all compressed, layers go
    back to float32 while that ends the step sooner.
    """
    chosen = dict(allowed)
    best = first = averaging_s(profile, setting, chosen)
    for layer in order_of(profile.layers):  # the first ready have the most slack
        if isinstance(allowed[layer.name], Float32):
            continue
        plainer = {**chosen, layer.name: FLOAT32}
        now = averaging_s(profile, setting, plainer)
        if now < best:
            chosen, best = plainer, now
    return (chosen, best) if best < first * (1 - _MIXED) else (dict(allowed), first)
