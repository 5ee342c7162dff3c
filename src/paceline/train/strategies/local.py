"""Replicas that drift apart and are averaged now and then.

    local-sgd   every `period` steps parameters are averaged
                (Stich, Local SGD Converges Fast, ICLR 2019)
    post-local  every step at first, then as local
                (Lin et al., Don't Use Large Mini-Batches, ICLR 2020)
    diloco      every `period` steps the mean drift is the gradient of an outer SGD with Nesterov momentum
                (Douillard et al., DiLoCo, 2023)

With `island`, so many neighbouring ranks average gradients in every backward pass, through torch's DDP, and
replicas of islands meet once in a period.

Bytes per step: 2 (P-1)/P N 4 / period in the ring, against 2 (P-1)/P N 4. Cost: F + B + update, and every
`period` steps the average. Optimizer state stays local. `drop_momentum` clears it after averaging.

Between two averages each rank's model is its own, and so is what `model.state_dict()` gives there.
`synchronize`, which all ranks call, averages the replicas now, and so does `paceline.train.close`.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor

from paceline.errors import RunError, SpecError
from paceline.spec import defaults
from paceline.spec.defaults import DEFAULTS
from paceline.spec.vocabulary import Mode
from paceline.train.comm import Collective, Job, agree
from paceline.train.hooks import Gradients
from paceline.train.launch import local_ranks
from paceline.train.strategies.base import State, Strategy, average
from paceline.train.strategies.island import Island


class Drifting(Strategy):
    """Replicas that meet every `period` steps; `drop_momentum` then clears the optimizer's tensors."""

    exact = False
    #: as plans call it
    mode: ClassVar[Mode] = Mode.LOCAL_SGD

    def __init__(
        self, *, period: int, after: int = 0, drop_momentum: bool = False, island: int | None = None
    ) -> None:
        super().__init__()
        if period < 1 or after < 0:
            raise SpecError(f"period counts from 1 and after from 0; got {period} and {after}")
        self.period, self.after, self.drop_momentum = period, after, drop_momentum
        #: neighbouring ranks that average gradients in every backward pass; None: as predicted
        self.island = island
        self._inside: Island | None = None
        self.steps = 0
        #: the step after which all replicas were last the same
        self._met = 0

    def _begin(self) -> None:
        self._hear_of_scaler()
        if self.island is None:
            here = agree(local_ranks(self.world))
            self.island = defaults.island(self.mode, self.world, here, self.world // here)
        if self.island > 1:
            self._inside = Island(self.model, self.island)
            self._undo.callback(self._inside.close)

    def no_sync(self) -> AbstractContextManager[None]:
        return super().no_sync() if self._inside is None else self._inside.passes.no_sync()

    def due(self, step: int) -> bool:
        """Whether replicas meet after this step, counted from 1."""
        return step < self.after or step % self.period == 0

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        result = self._plain_step(*args, **kwargs)
        self.skipped()
        return result

    def _scaled_step(self, *args: Any, **kwargs: Any) -> Any:
        """A rank whose gradients overflowed leaves out its update; the step counts, so that all ranks meet at
        the same ones.
        """
        result = self._plain_scaled_step(*args, **kwargs)
        self.skipped()
        return result

    def skipped(self) -> None:
        """A step is over, with an update or without."""
        self.steps += 1
        if self.due(self.steps):
            self._join()
            self._met = self.steps

    def _join(self) -> None:
        """Makes all replicas the same."""
        self._mean(list(self.names))
        self._average_buffers()
        if self.drop_momentum:
            for entries in self.optimizer.state.values():
                for value in entries.values():
                    if isinstance(value, Tensor) and value.dim() > 0:
                        value.zero_()

    def _mean(self, tensors: list[Tensor]) -> None:
        """The mean over ranks, which must all have come to the same step."""
        self.engine.submit("parameters", self._together(tensors)).wait()

    def _together(self, tensors: list[Tensor]) -> Job:
        steps = torch.tensor([self.steps, -self.steps], device=self.device)
        yield Collective("max", [steps])
        last, first = int(steps[0]), -int(steps[1])
        if first != last:
            raise RunError(
                f"rank {self.rank} of {self.world}: replicas would be averaged after step {first} of one "
                f"rank and step {last} of another; call synchronize() on all ranks, or on none"
            )
        yield from average(tensors, self.world)

    @property
    def _drifted(self) -> bool:
        """Whether replicas may differ."""
        return self.steps > self._met

    def synchronize(self) -> None:
        """Averages the replicas, where they have drifted since the last time; all ranks call it."""
        if self._drifted:
            Drifting._join(self)
            self._met = self.steps
        self._before_forward()  # buffers may be on their way

    def _arrive(self) -> None:
        """Nothing is on its way that this rank has not waited for."""

    def state_dict(self) -> State:
        """Also this rank's own replica, which is another than the others' between two averages, and its own
        state of the optimizer.
        """
        own = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        state = copy.deepcopy(self._plain_state())
        return {"steps": self.steps, "met": self._met, "model": own, "optimizer": state}

    def load_state_dict(self, state: State) -> None:
        """Of a run on another number of ranks, the first one's: all replicas begin as that one."""
        self.steps, self._met = state["steps"], state.get("met", 0)
        if "model" in state:
            self.model.load_state_dict(state["model"])
            self._plain_load(state["optimizer"])


class LocalSGD(Drifting):
    """Averages parameters every `period` steps; before step `after`, every step."""

    name = "local-sgd"
    paper = "Stich, ICLR 2019"

    def __init__(
        self,
        *,
        period: int = DEFAULTS[Mode.LOCAL_SGD].period,
        after: int = 0,
        drop_momentum: bool = False,
        island: int | None = None,
    ) -> None:
        super().__init__(period=period, after=after, drop_momentum=drop_momentum, island=island)


class PostLocalSGD(Drifting):
    """Gradients are averaged in the first `after` steps, then parameters every `period`."""

    name = "post-local"
    paper = "Lin et al., ICLR 2020"

    def __init__(
        self, *, period: int = DEFAULTS[Mode.LOCAL_SGD].period, after: int = 100, drop_momentum: bool = False
    ) -> None:
        super().__init__(period=period, after=after, drop_momentum=drop_momentum)

    def _begin(self) -> None:
        super()._begin()
        self._gradients = Gradients(self.names, lambda _: None, self._done)
        self._undo.callback(self._gradients.remove)

    def _done(self) -> None:
        if self.steps < self.after:
            self._average_gradients("gradients")
            self._average_buffers()

    def due(self, step: int) -> bool:
        return step >= self.after and (step - self.after) % self.period == 0

    @property
    def _drifted(self) -> bool:
        return self.steps > max(self._met, self.after)


class DiLoCo(Drifting):
    """An outer optimizer on the mean drift of `period` local steps; the papers take 500 steps, 0.7 and 0.9,
    and AdamW inside.
    """

    name = "diloco"
    paper = "Douillard et al., 2023"
    mode = Mode.DILOCO

    def __init__(
        self,
        *,
        period: int = DEFAULTS[Mode.DILOCO].period,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        island: int | None = None,
    ) -> None:
        super().__init__(period=period, island=island)
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum

    def _begin(self) -> None:
        super()._begin()
        self._start = [parameter.detach().clone() for parameter in self.names]
        self._outer = torch.optim.SGD(
            self._start, lr=self.outer_lr, momentum=self.outer_momentum, nesterov=self.outer_momentum > 0
        )

    @torch.no_grad()
    def _join(self) -> None:
        drift = [start - now for start, now in zip(self._start, self.names, strict=True)]
        self._mean(drift)
        for start, mean in zip(self._start, drift, strict=True):
            start.grad = mean
        self._outer.step()
        self._outer.zero_grad()
        for start, parameter in zip(self._start, self.names, strict=True):
            parameter.copy_(start)
        self._average_buffers()

    def state_dict(self) -> State:
        start = [tensor.clone() for tensor in self._start]
        return {**super().state_dict(), "start": start, "outer": self._outer.state_dict()}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        for own, saved in zip(self._start, state["start"], strict=True):
            own.copy_(saved)
        self._outer.load_state_dict(state["outer"])
