"""A server's part of the model: what an update does to it, who must wait, what was applied already. No input
or output in here.

Every change goes through `join`, `leave` and `push`; whoever calls them holds the lock and sleeps while
`held` says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.spec.vocabulary import ServerMode, ServerRule
from paceline.train.asynchronous.policy import UpdatePolicy

#: what became of an update
APPLIED, WAITING, LATE, AGAIN = 1, 2, 3, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRun:
    """A run of parameters that share the options of one parameter group."""

    count: int
    options: Mapping[str, Any]
    #: number of the parameter group
    group: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one update, and the version that its worker may compute on once it is no longer held."""

    kind: int
    staleness: int


class Shard:
    """Parameters with their optimizer, the version (updates applied), and the book of who applied what."""

    def __init__(
        self,
        start: Tensor,
        parts: Sequence[ParameterRun],
        optimizer: type[torch.optim.Optimizer],
        policy: UpdatePolicy,
    ) -> None:
        self.policy = policy
        self.values = start.clone().float()
        self._parts = tuple(parts)
        self._views = [view.requires_grad_() for view in self.values.split([part.count for part in parts])]
        groups = [{**part.options, "params": [view]} for part, view in zip(parts, self._views, strict=True)]
        self._optimizer = optimizer(groups) if policy.rule == ServerRule.GRADIENT else None  # type: ignore[call-arg]
        #: of each parameter group, as the last update was computed under; None: as at the start
        self._options: Sequence[Mapping[str, Any]] | None = None
        self.version = 0
        self.active: set[int] = set()
        #: updates that each worker has had applied: the last number, and how many
        self.last: Counter[int] = Counter()
        self.clock: Counter[int] = Counter()
        self.seen: Counter[int] = Counter()  # staleness -> updates
        self.dropped = 0
        self._started, self._needed = False, policy.workers
        self._round: dict[int, Tensor] = {}
        self._moves: dict[int, Tensor] = {}

    # -- who is there ------------------------------------------------------------------------------

    def join(self, worker: int) -> None:
        """A new worker starts level with the slowest, so that it neither holds others back nor is held."""
        if worker not in self.active:
            self.clock[worker] = max(self.clock[worker], min((self.clock[w] for w in self.active), default=0))
            self.active.add(worker)
        self._started |= len(self.active) >= self._needed

    def leave(self, worker: int) -> None:
        """Gone, for good or not: nobody waits for it any more."""
        self.active.discard(worker)
        self._round.pop(worker, None)
        self._close_round()

    # -- updates -----------------------------------------------------------------------------------

    def push(
        self,
        worker: int,
        sequence: int,
        base: int,
        update: Tensor,
        options: Sequence[Mapping[str, Any]] | None = None,
    ) -> Outcome:
        """Takes one update. A number seen before is not applied again: its worker lost the answer.

        `options` are those of each parameter group at the worker, whose schedulers change them.
        """
        staleness = max(0, self.version - base)
        if sequence <= self.last[worker]:
            return Outcome(kind=AGAIN, staleness=staleness)
        if self.policy.mode.in_rounds:
            if staleness and self.policy.rule == ServerRule.GRADIENT:  # of a round that has closed
                self.last[worker] = sequence
                self.dropped += 1
                return Outcome(kind=LATE, staleness=staleness)
            self._round[worker] = update
            self._options = options or self._options
            self.last[worker] = sequence
            self._close_round()
            return Outcome(kind=WAITING if worker in self._round else APPLIED, staleness=0)
        self._options = options or self._options
        self._apply(worker, update, staleness)
        self.last[worker] = sequence
        self.clock[worker] += 1
        self.seen[staleness] += 1
        return Outcome(kind=APPLIED, staleness=staleness)

    def held(self, worker: int) -> bool:
        """Whether the answer to this worker has to wait for others."""
        if worker in self._round:
            return True
        if self.policy.mode != ServerMode.BOUNDED or worker not in self.active:
            return False
        if not self._started:  # those who are still to come count as at the start
            return self.clock[worker] > self.policy.staleness
        return self.clock[worker] - min(self.clock[w] for w in self.active) > self.policy.staleness

    def answer(self, worker: int) -> Tensor:
        """What the worker gets: the parameters, or what it is to move by."""
        move = self._moves.pop(worker, None)
        return self.values.detach().clone() if move is None else move

    def _apply(self, worker: int, update: Tensor, staleness: int) -> None:
        if self._optimizer is None:
            self._moves[worker] = move = self.policy.elasticity * (update - self.values.detach())
            self.values.detach().add_(move)
        else:
            slower = max(1, staleness) if self.policy.staleness_aware else 1
            for group, part in zip(self._optimizer.param_groups, self._parts, strict=True):
                group.update(part.options if self._options is None else self._options[part.group])
                group["lr"] /= slower
            for view, gradient in zip(
                self._views, update.split([view.numel() for view in self._views]), strict=True
            ):
                view.grad = gradient
            self._optimizer.step()
        self.version += 1

    def _close_round(self) -> None:
        """Applies a round once enough workers are in it."""
        spare = self.policy.backups if self.policy.mode == ServerMode.BACKUP else 0
        if not self._round or not self._started or len(self._round) < max(1, len(self.active) - spare):
            return
        updates, self._round = self._round, {}
        for worker in updates:
            self.clock[worker] += 1
        self.seen[0] += len(updates)
        if self.policy.rule == ServerRule.GRADIENT:
            self._apply(-1, torch.stack(list(updates.values())).mean(dim=0), 0)
            return
        centre = self.values.detach()
        for worker, mine in updates.items():
            self._moves[worker] = self.policy.elasticity * (mine - centre)
        centre += torch.stack([self._moves[worker] for worker in updates]).sum(dim=0)
        self.version += 1

    # -- the optimizer's state -----------------------------------------------------------------------

    def moments(self) -> list[dict[str, Any]]:
        """What the optimizer keeps of each part."""
        kept = {} if self._optimizer is None else self._optimizer.state
        return [_copied(dict(kept.get(view, {}))) for view in self._views]

    def load_moments(self, kept: Sequence[Mapping[str, Any]]) -> None:
        """Takes what `moments` gives."""
        if self._optimizer is not None:
            for view, entries in zip(self._views, kept, strict=True):
                self._optimizer.state[view] = dict(entries)

    # -- checkpoints -------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All that a server needs to go on; updates that wait for a round are not in it, their workers send
        them again.
        """
        waiting = set(self._round)
        return {
            "values": self.values.detach().clone(),
            "version": self.version,
            "clock": dict(self.clock),
            "seen": dict(self.seen),
            "dropped": self.dropped,
            "last": {worker: number - (worker in waiting) for worker, number in self.last.items()},
            "active": len(self.active),
            "optimizer": None if self._optimizer is None else _copied(self._optimizer.state_dict()),
        }

    def restore(self, state: Mapping[str, Any], *, same_run: bool = True) -> None:
        """Goes on from `state`, with nobody connected yet; of an earlier run without its workers' numbers."""
        self.values.detach().copy_(state["values"])
        self.version = state["version"]
        if self._optimizer is not None:
            self._optimizer.load_state_dict(state["optimizer"])
        if same_run:
            self.dropped = state["dropped"]
            self._needed = max(1, state["active"])  # a round waits until those who were there are back
            self.last, self.clock, self.seen = (Counter(state[key]) for key in ("last", "clock", "seen"))


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value
