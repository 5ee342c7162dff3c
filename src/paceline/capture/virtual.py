"""Operators that a GPU runs as one kernel and that meta tensors would take apart.

Fused attention, cuDNN's recurrent layers and fused RMS norm: each is an autograd function whose
passes log one piece of work and return empty tensors of the right shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.capture.classify import DTYPE_NAMES, DeviceWork
from paceline.capture.record import StepRecorder

Tensor = torch.Tensor


class FusedAttention(torch.autograd.Function):
    """scaled_dot_product_attention as flash, cuDNN or memory-efficient kernels run it.

    FLOPs: 2 products of 2*b*h*sq*sk*d forward, 5 backward (the scores are computed again); a causal
    mask halves both.
    """

    @staticmethod
    def forward(
        ctx: Any,
        recorder: StepRecorder,
        causal: bool,
        extras: tuple[str, ...],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        b, hq, sq, d = q.shape if q.dim() == 4 else (1, *_lead(q))
        sk, dv = v.shape[-2:]
        hk = k.shape[-3] if k.dim() > 2 else 1
        dims = (b, hq, hk, sq, sk, d, dv)

        def run() -> tuple[Tensor, Tensor]:
            with recorder.pause():
                out = _laid_out(q, dv)
                lse = q.new_empty((*q.shape[:-1], 1), dtype=torch.float32)
            tags = ("forward", *(("causal",) if causal else ()), *extras)
            reads = [q, k, v, *([mask] if mask is not None else [])]
            flops = _flops(dims, causal, 2)
            work = DeviceWork("attention", reads, [out, lse], dims, flops, tags, DTYPE_NAMES[q.dtype])
            recorder.record("aten.scaled_dot_product_attention", [work], [out, lse])
            return out, lse

        recorder.note_sequence()
        out, lse = recorder.once("attention", run)
        ctx.save_for_backward(q, k, v, out, lse, mask)
        ctx.recorder, ctx.causal, ctx.extras, ctx.dims = recorder, causal, extras, dims
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse, mask = ctx.saved_tensors
        recorder: StepRecorder = ctx.recorder
        with recorder.pause():
            grads = [_laid_out(t, t.shape[-1]) for t in (q, k, v)]
            accumulator = torch.empty_like(q, dtype=torch.float32)
        tags = ("backward", *(("causal",) if ctx.causal else ()), *ctx.extras)
        reads = [grad, q, k, v, out, lse, *([mask] if mask is not None else [])]
        work = DeviceWork(
            "attention", reads, grads, ctx.dims, _flops(ctx.dims, ctx.causal, 5), tags, DTYPE_NAMES[q.dtype]
        )
        recorder.record("aten.scaled_dot_product_attention_backward", [work], [*grads, accumulator])
        return None, None, None, *grads, None


def _laid_out(like: Tensor, size: int) -> Tensor:
    """A result as the kernels lay it out: half-precision ones follow their input, the fp32 one (batch,
    length, heads, size).
    """
    if like.dtype != torch.float32 and size == like.shape[-1]:
        return torch.empty_like(like)
    return like.new_empty((*like.shape[:-3], like.shape[-2], like.shape[-3], size)).transpose(-2, -3)


def _lead(q: Tensor) -> tuple[int, int, int]:
    return (q.shape[0] if q.dim() == 3 else 1, q.shape[-2], q.shape[-1])


def _flops(dims: tuple[int, ...], causal: bool, products: int) -> float:
    b, hq, _, sq, sk, d, dv = dims
    return 2.0 * b * hq * sq * sk * (d + dv) / 2 * products * (0.5 if causal and sq == sk else 1.0)


class FusedRmsNorm(torch.autograd.Function):
    """Fused RMS norm over the last dimensions."""

    @staticmethod
    def forward(ctx: Any, recorder: StepRecorder, columns: int, x: Tensor, weight: Tensor | None) -> Tensor:
        rows = x.numel() // columns

        def run() -> tuple[Tensor, Tensor]:
            with recorder.pause():
                out = torch.empty_like(x)
                scale = x.new_empty((rows, 1), dtype=torch.float32)
            reads = [x, *([weight] if weight is not None else [])]
            work = DeviceWork("norm", reads, [out, scale], (rows, columns), tags=("forward", "rms"))
            recorder.record("aten.rms_norm", [work], [out, scale])
            return out, scale

        recorder.note_sequence()
        out, scale = recorder.once("norms", run)
        ctx.save_for_backward(x, weight, scale)
        ctx.recorder, ctx.dims = recorder, (rows, columns)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        recorder: StepRecorder = ctx.recorder
        with recorder.pause():
            grad_x = torch.empty_like(x)
            grad_w = torch.empty_like(weight) if weight is not None else None
        outs = [grad_x, *([grad_w] if grad_w is not None else [])]
        reads = [grad, x, scale, *([weight] if weight is not None else [])]
        tags = ("backward", "weights" if grad_w is not None else "plain", "rms")
        recorder.record(
            "aten.rms_norm_backward", [DeviceWork("norm", reads, outs, ctx.dims, tags=tags)], outs
        )
        return None, None, grad_x, grad_w


class FusedRecurrent(torch.autograd.Function):
    """An LSTM, GRU or plain recurrent stack as cuDNN runs it: all layers and steps in one call."""

    @staticmethod
    def forward(
        ctx: Any,
        recorder: StepRecorder,
        gates: int,
        layers: int,
        directions: int,
        batch_first: bool,
        states: int,
        x: Tensor,
        *rest: Tensor,
    ) -> Any:
        initial, weights = rest[:states], rest[states:]
        hidden = initial[0].shape[-1]
        steps, batch = (x.shape[1], x.shape[0]) if batch_first else (x.shape[0], x.shape[1])
        dims = (layers * directions, steps, batch, x.shape[-1], hidden)
        flops = _rnn_flops(gates, layers, directions, steps, batch, x.shape[-1], hidden)

        def run() -> tuple[Tensor, ...]:
            with recorder.pause():
                out = x.new_empty((steps, batch, hidden * directions))
                out = out.transpose(0, 1) if batch_first else out
                last = [torch.empty_like(state) for state in initial]
                # cuDNN keeps gates and cell states of every step for the backward pass
                reserve = x.new_empty((layers * directions, steps, batch, hidden * (gates + 2)))
            tags = ("forward", f"gates{gates}", f"layers{layers}")
            reads, dtype = [x, *weights], DTYPE_NAMES[x.dtype]
            work = DeviceWork("rnn", reads, [out, reserve], dims, flops, tags, dtype)
            recorder.record("aten.rnn", [work], [out, reserve, *last])
            return (out, reserve, *last)

        recorder.note_sequence()
        out, reserve, *last = recorder.once("recurrent", run)
        ctx.save_for_backward(x, *rest, out, reserve)
        ctx.recorder, ctx.dims, ctx.flops, ctx.states, ctx.counts = (
            recorder,
            dims,
            flops,
            states,
            (gates, layers),
        )
        return (out, *last)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *grad_states: Tensor) -> Any:
        x, *rest, out, reserve = ctx.saved_tensors
        recorder: StepRecorder = ctx.recorder
        initial, weights = rest[: ctx.states], rest[ctx.states :]
        with recorder.pause():
            grad_x = torch.empty_like(x)
            grad_initial = [torch.empty_like(state) for state in initial]
            grad_weights = [torch.empty_like(weight) for weight in weights]
        gates, layers = ctx.counts
        tags = ("backward", f"gates{gates}", f"layers{layers}")
        work = DeviceWork(
            "rnn",
            [grad, x, out, reserve, *weights],
            [grad_x, *grad_weights],
            ctx.dims,
            2 * ctx.flops,
            tags,
            DTYPE_NAMES[x.dtype],
        )
        recorder.record("aten.rnn_backward", [work], [grad_x, *grad_initial, *grad_weights])
        return None, None, None, None, None, None, grad_x, *grad_initial, *grad_weights


def _rnn_flops(
    gates: int, layers: int, directions: int, steps: int, batch: int, inputs: int, hidden: int
) -> float:
    first = inputs + hidden
    later = hidden * directions + hidden
    return 2.0 * steps * batch * directions * gates * hidden * (first + (layers - 1) * later)


def recurrent(recorder: StepRecorder, name: str, args: Sequence[Any]) -> Any:
    """`torch.lstm(x, hx, params, has_biases, layers, dropout, train, bidirectional, batch_first)` and its
    kin.
    """
    x, hx, params, _, layers, _, _, bidirectional, batch_first = args
    initial = list(hx) if isinstance(hx, (list, tuple)) else [hx]
    gates = {"lstm": 4, "gru": 3}.get(name, 1)
    weights = [w.to(x.dtype) for w in params]
    initial = [state.to(x.dtype) for state in initial]
    settings = (gates, layers, 2 if bidirectional else 1, batch_first, len(initial))
    return FusedRecurrent.apply(recorder, *settings, x, *initial, *weights)  # type: ignore[no-untyped-call]
