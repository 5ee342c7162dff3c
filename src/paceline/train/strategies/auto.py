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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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
from paceline.train.strategies.base import Strategy
from paceline.train.strategies.estimate import EXACT, LOSSES, NO_LOSS, Load, Setting, averaging_s, step_s
from paceline.train.strategies.overlap import Overlap
from paceline.train.strategies.priority import Priority

#: a strategy must be faster by this share to replace plain all-reduce, and layers treated differently by this
#: to replace all alike: those in float32 need messages of another kind, which the model counts too low on a
#: busy core
MARGIN, _MIXED = 0.03, 0.1
FLOAT32 = Float32()
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
    mixes: Mapping[str, Mapping[str, Scheme]]
    reason: str
    setting: Setting
    profile: Profile
    #: of strategies that were tried
    measured_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def by_name(self) -> Mapping[str, Scheme]:
        """The scheme of each parameter."""
        return self.mixes.get(self.strategy) or {layer.name: FLOAT32 for layer in self.profile.layers}


class StrategyTrials:
    """Strategies that are tried in turn, there and back: a machine whose pace drifts is as slow for one as
    for the others. They go on while it is not clear which is the fastest.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._left = [*names, *reversed(names)]
        #: when the steps of the trial that runs ended
        self._ends: list[float] = []
        #: seconds of a step in each trial
        self.seconds: dict[str, list[float]] = {}

    @property
    def now(self) -> str | None:
        """The one to try now; None where all are through."""
        return self._left[0] if self._left else None

    @property
    def names(self) -> set[str]:
        """Those that were tried, or will be."""
        return {*self.seconds, *self._left}

    def stepped(self, expected_s: float) -> float | None:
        """After a step of the one that is tried now: what a step takes, if there were enough of them."""
        self._ends.append(time.perf_counter())
        wanted = min(_MOST, max(_FEWEST, round(_TRIAL_S / expected_s)))
        if len(self._ends) <= _LEAD + wanted:
            return None
        timed, self._ends = self._ends[_LEAD:], []
        return statistics.median(b - a for a, b in zip(timed, timed[_ROW:], strict=False)) / _ROW

    def took(self, seconds: float) -> None:
        """A step of the one that is tried now took so long."""
        self.seconds.setdefault(self._left.pop(0), []).append(seconds)
        if not self._left:
            names = undecided(self.seconds)
            self._left = [*names, *reversed(names)]

    def result(self, choice: Choice) -> Choice:
        """A choice with what was measured: the fastest of those that were in the running to the end."""
        measured = {name: statistics.fmean(seconds) for name, seconds in self.seconds.items()}
        best = min(_rivals(self.seconds), key=lambda name: measured[name])
        others = ", ".join(
            f"{name} {seconds * 1e3:.1f} ms" for name, seconds in measured.items() if name != best
        )
        reason = f"{best} took {measured[best] * 1e3:.1f} ms a step here; {others}"
        return replace(choice, strategy=best, measured_s=measured, reason=reason)


class Auto(Strategy):
    """Plain averaging for `watch` steps, then what is fastest; where that is not clear (`trial`), after some
    steps of each that may be.
    """

    name = "auto"
    paper = "choice per layer as in Wang et al., Espresso, 2022; model in `estimate`"

    def __init__(
        self,
        *,
        loss: str = NO_LOSS,
        schemes: tuple[str, ...] | None = None,
        watch: int = 4,
        cores: int | None = None,
        trial: bool = True,
    ) -> None:
        super().__init__()
        if loss not in LOSSES:
            raise SpecError(f"loss must be {', '.join(LOSSES)}; got {loss!r}")
        if watch < 2:
            raise SpecError(f"auto watches at least 2 steps, got {watch}")
        self.schemes = tuple(LOSSES[loss] if schemes is None else schemes)
        self.watch, self.cores, self.trial = watch, cores, trial
        self.choice: Choice | None = None
        # after the passes: they are timed
        self.inner: Strategy = Averaging("fp32", bucket_bytes=float("inf"), first_bytes=float("inf"))
        #: steps still to be watched
        self._left = watch
        self._trials = StrategyTrials(())
        #: what those that were tried remember
        self._remembered: dict[str, dict[str, Any]] = {}
        #: what it goes on with, and the scheme of each parameter
        self._taken: tuple[str, Mapping[str, Scheme]] | None = None
        self._scaler: Any = None
        self._told = False

    @property
    def settled(self) -> bool:
        """Whether what it does now is what it will do."""
        return not self._left and self._trials.now is None

    def _begin(self) -> None:
        self.inner.attach(self.model, self.optimizer, self.engine, alike=True)
        self._hold_optimizer()
        self._profiler = Profiler(self.model)
        self._undo.callback(lambda: self.inner.detach())
        self._undo.callback(self._say_unsettled)
        self._undo.callback(self._profiler.remove)

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = self.inner._step(*args, **kwargs)
        if self._left:
            self._profiler.stepped(time.perf_counter() - start)
            self._left -= 1
            if not self._left:
                self._profiler.remove()
                if self.world > 1:  # one rank alone sends nothing, whatever the strategy
                    self._decide()
        elif self._trials.now is not None:
            self._try_on(self._trials.now)
        return result

    def _decide(self) -> None:
        self._scaler = getattr(self.inner, "scaler", None)  # which later ones may not have, or not be told of
        with torch.no_grad():
            self.choice = self._choose()
        self._trials = StrategyTrials(near(self.choice) if self.trial else ())
        self._take(self._trials.now or self.choice.strategy)
        self._tell()

    def _tell(self) -> None:
        """What it goes on with, once and on one rank, for the user."""
        if self.settled and self._taken is not None and not self._told:
            self._told = True
            self._say(told(*self._taken, self.schemes))

    def _say(self, line: str) -> None:
        if self.rank == 0:
            print(f"{NOTE}{line}", file=sys.stderr, flush=True)

    def _try_on(self, name: str) -> None:
        """After a step of a trial: the next one, or the fastest, where this was the last of it and no other
        may be.
        """
        assert self.choice is not None
        seconds = self._trials.stepped(self.choice.expected_s[name])
        if seconds is None:
            return
        slowest = torch.tensor([seconds], device=self.parameters[0][1].device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        self._trials.took(float(slowest))
        if self.settled:
            self.choice = self._trials.result(self.choice)
        following = self._trials.now or self.choice.strategy
        if following != name:
            self._take(following)
        if self.settled:
            self._remembered.clear()
            self._tell()

    def _take(self, name: str, by_name: Mapping[str, Scheme] | None = None) -> None:
        """Goes on with another strategy, with these schemes, or those that were chosen for it, and with what
        it remembers if it was tried before.
        """
        if by_name is None:
            assert self.choice is not None
            by_name = replace(self.choice, strategy=name).by_name
        new = _OVERLAPPED[name]() if name in _OVERLAPPED else Averaging(by_name=by_name, scaler=self._scaler)
        self.inner.synchronize()
        if self._trials.now is not None and self._taken is not None:
            self._remembered[self._taken[0]] = self.inner.state_dict()
        self._taken = name, by_name
        self.inner.detach()
        self.inner = new
        new.attach(self.model, self.optimizer, self.engine, alike=True)
        if name in self._remembered:
            new.load_state_dict(self._remembered.pop(name))
        self._hold_optimizer()

    def _choose(self) -> Choice:
        """Rank 0 decides from its own profile; all take part in the probe."""
        device = self.parameters[0][1].device
        machine = probe(self.engine, device)
        profile = self._profiler.profile(self.optimizer)
        own, threads = cores(device)
        setting = Setting(
            machine=machine,
            world=self.world,
            cores=self.cores or own,
            threads=min(threads, self.cores or own),
            rates=rates(self.schemes, [p.numel() for _, p in self.parameters], self.world, device),
        )
        return agree(choose(profile, setting, self.schemes))

    def synchronize(self) -> None:
        self.inner.synchronize()

    def no_sync(self) -> Any:
        return self.inner.no_sync()

    def _say_unsettled(self) -> None:
        if self._trials.now is not None:
            self._say(unsettled(self._trials.names))

    def state_dict(self) -> dict[str, Any]:
        if self._taken is None or not self.settled:
            return {}
        name, by_name = self._taken
        schemes = {parameter: str(scheme) for parameter, scheme in by_name.items()}
        return {"world": self.world, "strategy": name, "schemes": schemes, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on as before, with what compressors held back.

        It looks again where the number of ranks has changed, or where what was taken is not allowed any more.
        """
        if state.get("world") != self.world or state["strategy"] not in (*EXACT, *self.schemes):
            return
        self._profiler.remove()
        self._left, self._trials = 0, StrategyTrials(())
        self._take(state["strategy"], {name: parse(text) for name, text in state["schemes"].items()})
        self.inner.load_state_dict(state["inner"])
        self._tell()

    def optimizer_state(self) -> dict[str, Any]:
        return self.inner.optimizer_state()

    def asked_state(self) -> dict[str, Any]:
        return self.inner.asked_state()

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        self.inner.load_optimizer_state(state)


def told(name: str, by_name: Mapping[str, Scheme], schemes: Sequence[str]) -> str:
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
    mixes: dict[str, dict[str, Scheme]] = {}
    for text in schemes:
        allowed = assign(parse(text), [(layer.name, layer.shape) for layer in profile.layers])
        mixes[text], expected[text] = mix(profile, setting, allowed)
    best = min(expected, key=lambda name: expected[name])
    if expected[best] > plain * (1 - MARGIN):
        reason = (
            f"nothing is faster than all-reduce by more than {MARGIN:.0%}: communication hides, or costs less"
            " than what would save it"
        )
        best = "allreduce"
    else:
        reason = f"{best} is expected to take {expected[best] / plain:.0%} of the time of all-reduce"
    return Choice(
        strategy=best, expected_s=expected, mixes=mixes, reason=reason, setting=setting, profile=profile
    )


def near(choice: Choice) -> list[str]:
    """Strategies that may be the fastest, if there are several, those that hold something back last, so that
    it waits for as few steps as may be.
    """
    limit = _NEAR * choice.expected_s[choice.strategy]
    found = sorted(
        (seconds, name)
        for name, seconds in choice.expected_s.items()
        if seconds <= limit or name == choice.strategy
    )
    chosen = [choice.strategy, *(name for _, name in found if name != choice.strategy)][:_TRIED]
    return (
        sorted(chosen, key=lambda name: (name == "dgc", choice.expected_s[name])) if len(chosen) > 1 else []
    )


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


def mix(profile: Profile, setting: Setting, allowed: Mapping[str, Scheme]) -> tuple[dict[str, Scheme], float]:
    """Per layer, float32 or the scheme, and the seconds of a step: starting from all compressed, layers go
    back to float32 while that ends the step sooner.
    """
    uniform = {layer: Load.of(layer, allowed[layer.name], setting) for layer in profile.layers}
    chosen = dict(uniform)
    best = first = averaging_s(profile, setting, uniform.values())
    for layer in order_of(profile.layers):  # the first ready have the most slack
        kept = chosen[layer]
        if isinstance(kept.scheme, Float32):
            continue
        chosen[layer] = Load.of(layer, FLOAT32, setting)
        now = averaging_s(profile, setting, chosen.values())
        if now < best:
            best = now
        else:
            chosen[layer] = kept
    if best >= first * (1 - _MIXED):
        chosen, best = uniform, first
    return {layer.name: load.scheme for layer, load in chosen.items()}, best
