"""Averaging during the backward pass, plain or compressed: gradients are the mean over ranks when
`backward()` returns, as with DDP.

Gradients travel in buckets, in the order in which they become ready (rank 0's, seen in the first step).

Cost of a step: F + max(B, encode + wire + decode of what is ready) with the bytes of
`paceline.cost.compression`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.cost.compression import wire_bytes
from paceline.errors import SpecError
from paceline.sim.program import buckets
from paceline.spec import compression as spec
from paceline.spec.defaults import ENGINE
from paceline.train.comm import Job, agree
from paceline.train.hooks import Gradients, Sequencer
from paceline.train.probe import cores
from paceline.train.strategies.averager import Averager
from paceline.train.strategies.base import State

#: where a state keeps the order in which parameters lie in buckets
_ORDER = "order"
#: of gradients put into one bucket, and of the first, which starts communication early
BUCKET_BYTES, FIRST_BYTES = ENGINE.bucket_bytes, ENGINE.first_bucket_bytes
#: bytes of a gradient that count for a byte of it on the wire, at most, where encoders share the core of the
#: passes: a full bucket then sends 250 kB, for whose bytes a core works about as long as for the message
#: itself (0.2 ms; 0.55 to 0.8 ns a byte, by `probe` on emulated links)
_ALONE = 16


@dataclass(slots=True, eq=False)
class _Bucket:
    """Parameters whose gradients travel together."""

    parameters: list[nn.Parameter]
    #: for those that go as they are
    plain: Tensor | None
    #: parameters whose gradients have not become ready in this pass
    waiting: set[nn.Parameter]


class Averaging(Averager):
    """`scheme` for every parameter (float32 for small ones, and for the last layer where the scheme says so),
    or by name.
    """

    def __init__(
        self,
        scheme: spec.Scheme | str = "fp32",
        *,
        bucket_bytes: float | None = None,
        first_bytes: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(scheme, **options)
        if bucket_bytes is not None and bucket_bytes <= 0:
            raise SpecError(f"bucket_bytes must be positive, got {bucket_bytes:g}")
        self._asked = bucket_bytes is not None
        self.bucket_bytes = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
        self.first_bytes = min(FIRST_BYTES, self.bucket_bytes) if first_bytes is None else first_bytes

    def _listen(self) -> None:
        self._alone = not self._asked and agree(cores(self.device)[0] == 1)
        #: whether buckets are in the order in which gradients became ready in the first step
        self._agreed = False
        self._arrange([name for name, _ in reversed(self.parameters)])
        self._gradients = Gradients(
            self.names, self._ready, self._done, watched=self._means.watched, before=self._before_adding
        )

    def _arrange(self, names: Sequence[str]) -> None:
        """Buckets of parameters in the order given."""
        parameters = dict(self.parameters)
        listed = [parameters[name] for name in names]
        sizes = [
            counted(p.nbytes, self.compressors[name].scheme, tuple(p.shape), self._alone)
            for name, p in zip(names, listed, strict=True)
        ]
        found = buckets(sizes, self.bucket_bytes, self.first_bytes)
        self._buckets = [self._bucket([listed[i] for i in members]) for members in found]
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._sequencer = Sequencer(self._buckets)
        #: parameters in the order in which their gradients became ready in this pass
        self._seen: dict[nn.Parameter, None] = {}

    def _bucket(self, members: list[nn.Parameter]) -> _Bucket:
        plain = sum(parameter.numel() for parameter in members if self._plain(parameter))
        return _Bucket(members, members[0].new_empty(plain) if plain else None, set(members))

    # -- every step ------------------------------------------------------------------------------------

    @property
    def _paused(self) -> bool:
        return not self._gradients.enabled

    def _ready(self, parameter: nn.Parameter) -> None:
        self._begin_pass()
        self._seen[parameter] = None
        bucket = self._bucket_of[parameter]
        bucket.waiting.discard(parameter)
        if not bucket.waiting:
            for free in self._sequencer.ready(bucket):
                self._send(free)

    def _send(self, bucket: _Bucket) -> None:
        for parameter in bucket.parameters:
            self._set_apart(parameter, parameter.grad)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._submit(bucket.parameters, self._job(bucket))

    def _job(self, bucket: _Bucket) -> Job:
        """The mean over ranks of every gradient of a bucket, in place."""
        gradients = {p: p.grad for p in bucket.parameters if p.grad is not None}
        views = yield from self._mean(gradients, bucket.plain)
        for parameter, view in views.items():
            parameter.grad = view

    def _done(self) -> None:
        for bucket in self._sequencer.flush():
            self._send(bucket)
        for bucket in self._buckets:
            bucket.waiting = set(bucket.parameters)
        self._average_buffers()
        self._wait()
        for parameter in self._means.watched:
            mean = self._means.held.get(parameter)
            if mean is not None and parameter.grad is not None:
                parameter.grad = mean.add_(parameter.grad)
        self._means.end()
        if not self._agreed:  # the order in which gradients became ready, from the first step on
            self._agreed = True
            self._arrange(agree([self.names[p] for p in dict.fromkeys([*self._seen, *self.names])]))
        self._seen = {}

    def no_sync(self) -> AbstractContextManager[None]:
        return self._gradients.paused()

    def state_dict(self) -> State:
        order = [self.names[parameter] for bucket in self._buckets for parameter in bucket.parameters]
        return {**super().state_dict(), **({_ORDER: order} if self._agreed else {})}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        # the same buckets from the first step on: where a sum begins depends on its place in one
        if sorted(state.get(_ORDER, ())) == sorted(self.names.values()):
            self._arrange(state[_ORDER])
            self._agreed = True


def counted(size: float, scheme: spec.Scheme, shape: tuple[int, ...], alone: bool) -> float:
    """Bytes that a gradient of `size` counts for in a bucket. On the only core of a rank (`alone`) nothing is
    gained by encoding early, and messages take time from the passes: there, what hardly sends anything hardly
    counts."""
    return min(size, _ALONE * wire_bytes(scheme, shape)) if alone else size
