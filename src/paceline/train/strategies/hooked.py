"""Averaging for a model that torch's DistributedDataParallel wraps already: its buckets, the engine's
messages, as a communication hook.

DDP decides when a bucket is full and waits for it; gradients are compressed and averaged as everywhere else,
parameter by parameter, so that state outlives the buckets, which DDP fills otherwise from its second step on.
Buffers and `no_sync` are DDP's own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from paceline.errors import SpecError
from paceline.train._torch import after_backward
from paceline.train.comm import Job
from paceline.train.hooks import Gradients
from paceline.train.strategies.averager import Averager
from paceline.train.strategies.averaging import Averaging
from paceline.train.strategies.base import Strategy, Tensors
from paceline.train.strategies.ddp import DDP
from paceline.train.transport import said


class Hooked(Averager):
    """What an averaging strategy does, within DDP.

    DDP keeps its hook for good: once let go, it goes on as DDP alone would.
    """

    _let_go = False

    def _listen(self) -> None:
        self._undo.callback(setattr, self, "_let_go", True)
        # DDP sees to gradients that are ready
        self._gradients = Gradients(
            (), lambda _: None, self._done, watched=self._means.watched, before=self._before_adding
        )
        self._watched = set(self._means.watched)
        #: whether DDP will bring the next pass together: once after each forward pass outside `no_sync`
        self._syncs = False
        #: of parameters that the pass did not use, their places in buckets
        self._unused: dict[nn.Parameter, Tensor] = {}
        try:
            self.model.register_comm_hook(None, lambda _, bucket: self._hook(bucket))  # type: ignore[operator]
        except RuntimeError as error:
            raise SpecError(
                f"this DistributedDataParallel takes no communication hook: {said(error)}; pass the module"
                " that it wraps"
            ) from None

    def _hook(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """What DDP calls with a `torch.distributed.GradBucket`; the future of its memory with the means in
        it.
        """
        if self._let_go:
            return allreduce_hook(self.model.process_group, bucket)  # type: ignore[arg-type]
        self._gradients.begin()
        self._begin_pass()
        gradients = dict(zip(bucket.parameters(), bucket.gradients(), strict=True))
        for parameter in self._watched & gradients.keys():
            # DDP puts gradients there whole that the pass did not touch
            if self._set_apart(parameter, gradients[parameter]):
                self._unused[parameter] = gradients[parameter]
        buffer = bucket.buffer()
        done: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        self._submit(gradients, self._job(gradients, buffer), future=done)
        return done

    def _job(self, gradients: Tensors, buffer: Tensor) -> Job:
        """The mean over ranks of a bucket of DDP's, in place; its memory."""
        sizes = [gradient.numel() for parameter, gradient in gradients.items() if self._plain(parameter)]
        plain = buffer if len(sizes) == len(gradients) and sum(sizes) == buffer.numel() else None
        if sizes and plain is None:
            plain = buffer.new_empty(sum(sizes))
        views = yield from self._mean(gradients, plain)
        for parameter, gradient in gradients.items():
            view, mean = views.get(parameter, gradient), self._means.held.get(parameter)
            if view.data_ptr() != gradient.data_ptr():
                gradient.copy_(view)
            if mean is not None:
                gradient.add_(mean)
        return buffer

    def _done(self) -> None:
        """Before DDP waits for its futures: it would not tell what went wrong in the words that it was said
        in.
        """
        self._wait()
        self._means.end()  # the jobs have put means together, in the buckets, from which DDP takes them
        self._syncs = False
        unused, self._unused = self._unused, {}
        if unused:
            # DDP leaves gradients that no rank used as they were; compressors may have sent what they held
            # back
            after_backward(lambda: _give(unused))

    @property
    def _paused(self) -> bool:
        return not self._syncs

    def _before_forward(self, *_: Any) -> None:
        super()._before_forward()
        if torch.is_grad_enabled():  # DDP decides here for the backward pass, too
            self._syncs = bool(self.model.require_backward_grad_sync)

    def no_sync(self) -> AbstractContextManager[None]:
        passes: AbstractContextManager[None] = self.model.no_sync()  # type: ignore[operator]
        return passes


def _give(means: Tensors) -> None:
    """Gradients from buckets, after DDP has given those that it gives."""
    for parameter, mean in means.items():
        parameter.grad = mean.clone()


def within_ddp(strategy: Strategy) -> Strategy:
    """The same strategy for a model that DDP wraps; refused where gradients must not be averaged by
    DDP, too.
    """
    if isinstance(strategy, DDP):
        raise SpecError(
            "the model is wrapped in DistributedDataParallel already, which is what 'ddp' does; "
            "name another strategy, or none"
        )
    if not isinstance(strategy, Averaging):
        raise SpecError(
            f"{strategy.name!r} keeps replicas the same by itself, but the model is wrapped in"
            " DistributedDataParallel, which averages gradients, too; pass the module that it wraps, or use"
            " allreduce or a compressed strategy (terngrad, dgc, ...)"
        )
    options = {name: getattr(strategy, name) for name in ("by_name", "seed", "fused", "scaler")}
    return Hooked(strategy.scheme, **options)
