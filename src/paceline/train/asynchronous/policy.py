"""How updates of many workers become one model: the choices, and what each means."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import SpecError
from paceline.spec.defaults import DEFAULTS
from paceline.spec.vocabulary import Mode, ServerMode, ServerRule, member


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePolicy:
    """What a server does with an update.

    Modes: `async` applies it at once; `sync` waits for all workers and applies the mean; `backup` waits for
    all but `backups` and drops the late ones (Chen et al. 2016); `bounded` applies at once, but holds back a
    worker that is more than `staleness` updates ahead of the slowest (stale synchronous parallel, Ho et al.
    2013).

    Rules: `gradient` takes gradients through the optimizer; `elastic` takes a worker's parameters x, moves
    the centre c by `elasticity` * (x - c) and returns that difference for the worker to move by (Zhang,
    Choromanska and LeCun 2015).
    """

    mode: ServerMode = ServerMode.ASYNC
    rule: ServerRule = ServerRule.GRADIENT
    workers: int = 1
    staleness: int = DEFAULTS[Mode.PS_BOUNDED].staleness
    backups: int = DEFAULTS[Mode.PS_BACKUP].backup
    elasticity: float = 0.5
    #: divides the learning rate of an update by its staleness (Zhang et al. 2016)
    staleness_aware: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", member(ServerMode, "policy: mode", self.mode, SpecError))
        object.__setattr__(self, "rule", member(ServerRule, "policy: rule", self.rule, SpecError))
        if self.workers < 1 or self.staleness < 0 or not 0 < self.elasticity <= 1:
            raise SpecError(
                f"a policy needs workers >= 1, staleness >= 0 and elasticity in (0, 1], got {self}"
            )
        if self.mode == ServerMode.BACKUP and not 0 <= self.backups < self.workers:
            raise SpecError(
                f"of {self.workers} workers at most {self.workers - 1} can be backups, got {self.backups}"
            )
        if self.rule == ServerRule.ELASTIC and self.mode not in (ServerMode.ASYNC, ServerMode.SYNC):
            raise SpecError(f"elastic averaging runs async or sync, got {self.mode!r}")
