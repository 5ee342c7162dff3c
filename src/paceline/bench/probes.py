"""Operators to time on this machine, each with its description for the cost model.

Sizes are of training: large enough that caches hold none of the data from one run to the next, plus
a few small ones, for small networks. Outputs are allocated anew, as they are in a training step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from paceline.cost import make
from paceline.spec.workload import Access, Op

Run = Callable[[], Any]
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Probe:
    """One operator as the cost model sees it, and the call that runs it."""

    op: Op
    run: Run


@dataclass(frozen=True, slots=True)
class Scale:
    """How large to make things: a GPU needs more of everything to be busy."""

    device: torch.device
    batch: int
    tokens: int
    elements: int

    @staticmethod
    def of(device: torch.device) -> Scale:
        if device.type == "cuda":
            return Scale(device, 128, 16384, 1 << 26)
        return Scale(device, 8, 512, 1 << 22)

    def normal(
        self, *shape: int, dtype: str = "fp32", layout: torch.memory_format = torch.contiguous_format
    ) -> torch.Tensor:
        made = torch.randn(*shape, device=self.device, dtype=TORCH_DTYPES[dtype])
        return made.contiguous(memory_format=layout) if len(shape) == 4 else made


def probes(device: torch.device, dtypes: Iterable[str] = tuple(TORCH_DTYPES)) -> Iterator[Probe]:
    """Every probe, products in each of `dtypes`; made when their turn comes, so that few hold memory at a
    time.
    """
    scale = Scale.of(device)
    for dtype in dtypes:
        yield from _products(scale, dtype)
    yield from _attention(scale)
    yield from _recurrent(scale)
    # (inputs, outputs, groups, side, kernel, stride) of residual, depthwise and grouped networks
    for shape in (
        (64, 64, 1, 56, 3, 1),
        (256, 256, 1, 14, 3, 1),
        (128, 128, 1, 56, 3, 2),
        (256, 64, 1, 56, 1, 1),
        (256, 512, 1, 14, 1, 1),
        (3, 64, 1, 224, 7, 2),
        (6, 16, 1, 14, 5, 1),
        (192, 192, 192, 28, 3, 1),
        (128, 128, 32, 28, 3, 1),
    ):
        yield from _convolution(scale, *shape)
    for layout in ("nhwc", "nchw"):
        yield from _batch_norm(scale, layout)
    yield from _max_pool(scale)
    yield from _pointwise(scale)
    yield from _rows(scale)
    yield from _movement(scale)
    yield from _lookup(scale)
    yield from _optimizers(scale)


def _gradient(output: torch.Tensor, inputs: list[torch.Tensor]) -> Run:
    """The backward pass of what made `output`."""
    grad = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True)


def _products(s: Scale, dtype: str) -> Iterator[Probe]:
    wide = 768 if s.device.type == "cpu" else 4096
    for tokens, inputs, outputs in (
        (s.tokens, wide, wide),
        (s.tokens // 8, wide // 2, 4 * wide),
        (32, 256, 256),
    ):
        x, w, b, g = (
            s.normal(*shape, dtype=dtype)
            for shape in ((tokens, inputs), (outputs, inputs), (outputs,), (tokens, outputs))
        )
        yield Probe(make.gemm(1, tokens, outputs, inputs, dtype, bias=True), partial(F.linear, x, w, b))
        yield Probe(make.gemm(1, tokens, inputs, outputs, dtype, "tn"), partial(torch.matmul, g, w))
        yield Probe(make.gemm(1, outputs, inputs, tokens, dtype, "nn"), partial(torch.matmul, g.t(), x))
    heads, seq, size = s.tokens // 32, 128, 64
    q, k = s.normal(heads, seq, size, dtype=dtype), s.normal(heads, seq, size, dtype=dtype)
    yield Probe(make.gemm(heads, seq, seq, size, dtype), lambda: q @ k.transpose(1, 2))


def _attention(s: Scale) -> Iterator[Probe]:
    batch, heads, seq, size = max(1, s.tokens // 512), 12, min(s.tokens, 512), 64
    q, k, v = (s.normal(batch, heads, seq, size).requires_grad_() for _ in range(3))
    for causal in (True, False):
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        yield Probe(
            make.attention(batch, heads, seq, seq, size, "fp32", causal),
            partial(F.scaled_dot_product_attention, q.detach(), k.detach(), v.detach(), is_causal=causal),
        )
        yield Probe(
            make.attention(batch, heads, seq, seq, size, "fp32", causal, backward=True),
            _gradient(y, [q, k, v]),
        )


def _convolution(
    s: Scale, inputs: int, outputs: int, groups: int, side: int, kernel: int, stride: int
) -> Iterator[Probe]:
    padding = kernel // 2
    x = s.normal(s.batch, inputs, side, side, layout=torch.channels_last).requires_grad_()
    w = s.normal(outputs, inputs // groups, kernel, kernel, layout=torch.channels_last).requires_grad_()
    y = F.conv2d(x, w, stride=stride, padding=padding, groups=groups)
    runs: dict[str, Run] = {
        "fprop": lambda: F.conv2d(x.detach(), w.detach(), stride=stride, padding=padding, groups=groups),
        "dgrad": _gradient(y, [x]),
        "wgrad": _gradient(y, [w]),
    }
    for which, run in runs.items():
        yield Probe(
            make.conv(s.batch, inputs, outputs, groups, side, kernel, stride, padding, "fp32", which, "nhwc"),
            run,
        )


def _op(
    kind: str,
    reads: list[int],
    writes: list[int],
    dims: tuple[int, ...],
    tags: tuple[str, ...],
    name: str = "",
) -> Op:
    accesses = [tuple(Access(i, size) for i, size in enumerate(sizes)) for sizes in (reads, writes)]
    return Op(name or kind, kind, "forward", "", "fp32", 0.0, accesses[0], accesses[1], dims, tags)


def _recurrent(s: Scale) -> Iterator[Probe]:
    layers, steps, hidden = 2, 35, 512
    lstm = torch.nn.LSTM(hidden, hidden, layers, batch_first=True).to(s.device)
    x = s.normal(s.batch, steps, hidden).requires_grad_()
    size, weights = 4 * x.numel(), 4 * sum(p.numel() for p in lstm.parameters())
    dims = (layers, steps, s.batch, hidden, hidden)
    runs: dict[str, Run] = {
        "forward": partial(lstm, x),
        "backward": _gradient(lstm(x)[0], [x, *lstm.parameters()]),
    }
    for which, run in runs.items():
        yield Probe(_op("rnn", [size, weights], [size], dims, (which, "gates4", f"layers{layers}")), run)


def _batch_norm(s: Scale, layout: str) -> Iterator[Probe]:
    for channels, side in ((64, 56), (512, 7)):
        x = s.normal(
            s.batch,
            channels,
            side,
            side,
            layout=torch.channels_last if layout == "nhwc" else torch.contiguous_format,
        ).requires_grad_()
        w, b, mean, var = (torch.ones(channels, device=s.device) for _ in range(4))
        w.requires_grad_()
        b.requires_grad_()
        size, dims = 4 * x.numel(), (x.numel() // channels, channels)
        y = F.batch_norm(x, mean, var, w, b, training=True)
        yield Probe(
            _op("batchnorm", [size], [size], dims, ("forward", layout)),
            partial(F.batch_norm, x.detach(), mean, var, w.detach(), b.detach(), training=True),
        )
        yield Probe(
            _op("batchnorm", [size, size], [size], dims, ("backward", layout)), _gradient(y, [x, w, b])
        )


def _max_pool(s: Scale) -> Iterator[Probe]:
    x = s.normal(s.batch, 64, 112, 112, layout=torch.channels_last).requires_grad_()
    y = F.max_pool2d(x, 3, 2, 1)
    size, out = 4 * x.numel(), 4 * y.numel()
    yield Probe(
        _op("pool", [size], [out, 2 * out], (y.numel(), 9), ("forward", "nhwc"), "max_pool2d"),
        lambda: F.max_pool2d(x.detach(), 3, 2, 1),
    )
    yield Probe(
        _op("pool", [out, size, 2 * out], [size], (x.numel(), 9), ("backward", "nhwc"), "max_pool2d"),
        _gradient(y, [x]),
    )


def _pointwise(s: Scale) -> Iterator[Probe]:
    for n in (s.elements, s.elements // 16, 1024):
        x, y = s.normal(n), s.normal(n)
        yield Probe(make.pointwise(n, "fp32", 2), partial(torch.add, x, y))
        yield Probe(make.pointwise(n, "fp32"), partial(torch.relu, x))
        yield Probe(make.pointwise(n, "fp32", tags=("math",)), partial(F.gelu, x))
    x, column = s.normal(s.elements // 1024, 1024), s.normal(s.elements // 1024, 1)
    n = x.numel()
    yield Probe(_op("elementwise", [4 * n, column.numel()], [4 * n], (n,), ("strided",)), lambda: x + column)
    yield Probe(
        _op("elementwise", [4 * n], [4 * n, n], (n,), ("random",)), lambda: F.dropout(x, 0.1, training=True)
    )


def _rows(s: Scale) -> Iterator[Probe]:
    """Norms, softmax and reductions."""
    for rows, cols in ((s.elements // 1024, 1024), (256, 256)):
        x = s.normal(rows, cols).requires_grad_()
        w, b = (torch.ones(cols, device=s.device, requires_grad=True) for _ in range(2))
        yield Probe(
            make.norm(rows, cols, "fp32"), partial(F.layer_norm, x.detach(), (cols,), w.detach(), b.detach())
        )
        yield Probe(
            make.norm(rows, cols, "fp32", backward=True), _gradient(F.layer_norm(x, (cols,), w, b), [x, w, b])
        )
        yield Probe(make.softmax(rows, cols, "fp32"), partial(F.log_softmax, x.detach(), -1))
        yield Probe(make.softmax(rows, cols, "fp32", backward=True), _gradient(F.log_softmax(x, -1), [x]))
        size = 4 * rows * cols
        yield Probe(
            _op("reduce", [size], [4 * cols], (cols, rows), ("outer",)), partial(torch.sum, x.detach(), 0)
        )
        yield Probe(
            _op("reduce", [size], [4 * rows], (rows, cols), ("inner",)), partial(torch.sum, x.detach(), 1)
        )


def _movement(s: Scale) -> Iterator[Probe]:
    """Copies, fills, concatenation and casts."""
    n = s.elements
    x = s.normal(n // 1024, 1024)
    half = x.bfloat16()
    size = 4 * n
    yield Probe(_op("copy", [size], [size], (n,), ()), lambda: x.clone())
    yield Probe(_op("copy", [size], [size], (n,), ("strided",)), lambda: x.t().contiguous())
    yield Probe(_op("fill", [], [size], (n,), ()), lambda: torch.zeros_like(x))
    yield Probe(_op("cat", [size, size], [2 * size], (2 * n,), ()), lambda: torch.cat((x, x)))
    yield Probe(_op("cast", [size], [size // 2], (n,), ()), lambda: x.bfloat16())
    yield Probe(_op("cast", [size // 2], [size], (n,), ()), lambda: half.float())


def _lookup(s: Scale) -> Iterator[Probe]:
    table, width = 30_000, 768
    rows = 4 * s.tokens
    weight = s.normal(table, width).requires_grad_()
    index = torch.randint(table, (rows,), device=s.device)
    size = 4 * rows * width
    yield Probe(
        _op("gather", [8 * rows, size], [size], (rows * width,), ()),
        lambda: F.embedding(index, weight.detach()),
    )
    # the gradient is filled with zeros first, which is an operator of its own; few rows would time nothing
    # but that
    grad = s.normal(rows, width)
    target = torch.zeros(table, width, device=s.device)
    yield Probe(
        _op("scatter", [size, 8 * rows], [size], (rows * width,), ("sorted", f"rows{rows}")),
        lambda: target.index_add_(0, index, grad),
    )


def _optimizers(s: Scale) -> Iterator[Probe]:
    parameters = [s.normal(s.elements // 16).requires_grad_() for _ in range(8)]
    for p in parameters:
        p.grad = torch.randn_like(p)
    count, n = len(parameters), s.elements // 2
    size = 4 * n
    # a step of SGD is one multi-tensor operator for each of its three arithmetic steps: here as one of their
    # sum
    sgd = torch.optim.SGD(parameters, lr=1e-6, momentum=0.9, foreach=True)
    yield Probe(_op("optimizer", [5 * size], [3 * size], (count, n, 3), ("foreach",)), sgd.step)
    adam = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
    yield Probe(_op("optimizer", [4 * size], [3 * size], (count, n, 1), ("fused",)), adam.step)
