"""Averaging for a model that torch's DistributedDataParallel wraps already: its buckets, the engine's
messages, as a communication hook.

DDP decides when a bucket is full and waits for it; gradients are compressed and averaged as everywhere else,
parameter by parameter, so that state outlives the buckets, which DDP fills otherwise from its second step on.
Buffers and `no_sync` are DDP's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from paceline.errors import SpecError
from paceline.train._torch import after_backward
from paceline.train.comm import Job
from paceline.train.hooks import Gradients
from paceline.train.strategies.averaging import Averaging
from paceline.train.strategies.base import Strategy
from paceline.train.strategies.ddp import refuse_twice
from paceline.train.transport import said


class Hooked(Averaging):
    """What an averaging strategy does, within DDP.

    DDP keeps its hook for good: once let go, it goes on as DDP alone would.
    """

    name = "averaging"

    def __init__(self, like: Averaging) -> None:
        super().__init__(
            like.scheme, by_name=like.by_name, seed=like.seed, fused=like.fused, scaler=like.scaler
        )
        self._let_go = False

    def _listen(self) -> None:
        assert isinstance(self.model, nn.parallel.DistributedDataParallel)
        # DDP sees to gradients that are ready
        watched = self._watched()
        self._held = {id(parameter) for parameter in watched}
        self._gradients = Gradients((), self._ready, self._done, watched=watched, before=self._before_adding)
        #: whether DDP will bring the next pass together: once after each forward pass outside `no_sync`
        self._syncs = False
        #: parameters that the pass did not use, with their places in buckets
        self._unused: list[tuple[nn.Parameter, Tensor]] = []
        try:
            self.model.register_comm_hook(None, lambda _, bucket: self._hook(bucket))
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
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self._take_out(parameter, gradient)
        buffer = bucket.buffer()
        done: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        names = [self._names[id(parameter)] for parameter in bucket.parameters()]
        title = names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"
        self._tickets.append(self.engine.submit(title, self._bucket(bucket, names), future=done))
        return done

    def _done(self) -> None:
        """Before DDP waits for its futures: it would not tell what went wrong in the words that it was said
        in.
        """
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            ticket.wait()
        self._put_together()
        self._syncs = False
        unused, self._unused = self._unused, []
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

    def _kept(self, parameter: nn.Parameter) -> Tensor:
        """A copy: a gradient may lie in its bucket, which DDP fills again."""
        assert parameter.grad is not None
        return parameter.grad.clone()

    def _take_out(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Takes the mean out of a bucket: DDP puts gradients there whole that the pass did not touch."""
        key = id(parameter)
        if key not in self._held or self._apart is None or key in self._apart:
            return
        self._apart.add(key)
        self._unused.append((parameter, gradient))
        if key not in self._means:
            return
        if parameter.grad is None:
            del self._means[key]
            return
        mean = self._means[key]
        if mean is None:
            mean = self._means[key] = self._kept(parameter)
        gradient.sub_(mean)

    def _put_together(self) -> None:
        """The jobs have put means together, in the buckets, from which DDP takes them."""
        self._means = dict.fromkeys(self._held)
        self._apart = None

    def _bucket(self, bucket: Any, names: list[str]) -> Job:
        """The mean over ranks of a bucket of DDP's, in place; its memory."""
        buffer, gradients, parameters = bucket.buffer(), bucket.gradients(), bucket.parameters()
        plain = [i for i, name in enumerate(names) if self._plain(name)]
        if len(plain) == len(names) and sum(gradient.numel() for gradient in gradients) == buffer.numel():
            together: Tensor | None = buffer
        else:
            together = buffer.new_empty(sum(gradients[i].numel() for i in plain)) if plain else None
        views = yield from self._mean(parameters, gradients, together)
        for i, (_, view) in zip(plain, views, strict=True):
            if view.data_ptr() != gradients[i].data_ptr():
                gradients[i].copy_(view)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            mean = self._means.get(id(parameter))
            if mean is not None:
                gradient.add_(mean)
        return buffer

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with self.model.no_sync():  # type: ignore[operator]
            yield

    def detach(self) -> None:
        self._let_go = True
        super().detach()


def _give(means: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    """Gradients from buckets, after DDP has given those that it gives."""
    for parameter, mean in means:
        parameter.grad = mean.clone()


def within_ddp(strategy: Strategy) -> Strategy:
    """The same strategy for a model that DDP wraps; refused where gradients must not be averaged by
    DDP, too.
    """
    refuse_twice(strategy)
    if type(strategy) is not Averaging:
        raise SpecError(
            f"{strategy.name!r} keeps replicas the same by itself, but the model is wrapped in"
            " DistributedDataParallel, which averages gradients, too; pass the module that it wraps, or use"
            " allreduce or a compressed strategy (terngrad, dgc, ...)"
        )
    return Hooked(strategy)
