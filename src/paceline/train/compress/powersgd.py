"""PowerSGD: each matrix by two thin factors, from one step of power iteration that starts where the last one
ended.

Vogels, Karimireddy, Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization,
NeurIPS 2019.

    M = gradient + error;  P = orthogonal(sum over ranks of M Q);  Q = mean over ranks of M' P;
    result P Q';  error = M - P Q'

Two all-reduces, the second of what the first brought: `exchange` asks for them one after the other, in the
order of the caller. Vectors, and matrices whose factors would not be smaller, are averaged in float32.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.spec import compression as spec

from .base import Arrived, Compressor, Round, flat, writing


class PowerSGDCompressor(Compressor):
    """Low-rank gradients with error feedback.

    Factors lie so that products read matrices along rows: ten times as fast on CPUs.
    """

    scheme: spec.PowerSGD
    #: the second factor is the same on all ranks
    local_state: ClassVar[tuple[str, ...]] = ("residual",)

    def encode(self, key: str, grad: Tensor, shared: Tensor | None = None) -> list[Tensor]:
        """The first factor; `continued` makes the second from the sum of the first."""
        found = self.scheme.factors(grad.shape)
        x = flat(grad)
        if found is None:
            return [x.clone()]
        rows, columns, rank = found
        residual = self._tensor(key, "residual", x)
        residual.add_(x, alpha=1.0 / self.loss_scale)
        entry = self._entry(key)
        if "factor" not in entry:
            draw = torch.Generator().manual_seed(self._seed(key, shared=True))
            entry["factor"] = torch.randn(rank, columns, generator=draw).to(x.device)
        return [F.linear(residual.view(rows, columns), entry["factor"])]

    def continued(self, key: str, arrived: Arrived, grad: Tensor) -> list[Tensor] | None:
        """The second factor, from the sum over ranks of the first; None: the gradient went whole, and there
        is no second.
        """
        found = self.scheme.factors(grad.shape)
        if found is None:
            return None
        rows, columns, rank = found
        basis = torch.linalg.qr(arrived[0][0].view(rows, rank)).Q
        self._pending[key] = basis
        return [basis.T.contiguous() @ self.state[key]["residual"].view(rows, columns)]

    def decode(self, key: str, gathered: Arrived, out: Tensor) -> None:
        with writing(out) as target:
            if self.scheme.factors(out.shape) is None:
                torch.mul(gathered[0][0], 1.0 / self.world, out=target)
                return
            basis, entry = self._pending.pop(key), self._entry(key)
            factor = gathered[0][0].view(basis.shape[1], -1) / self.world
            torch.mm(basis, factor, out=target.view(basis.shape[0], -1))
            entry["factor"] = factor
            entry["residual"] -= target
            if self.loss_scale != 1.0:
                target *= self.loss_scale

    def exchange(self, key: str, grad: Tensor, out: Tensor) -> Generator[Round, Arrived, None]:
        arrived = yield Round("sum", self.encode(key, grad))
        second = self.continued(key, arrived, grad)
        self.decode(key, arrived if second is None else (yield Round("sum", second)), out)
