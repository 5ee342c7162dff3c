"""Make code on meta tensors do what it would do on a GPU: autocast, fused operators, real indices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from paceline.capture import _torch
from paceline.capture.record import REAL_LIMIT, StepRecorder
from paceline.capture.virtual import FusedAttention, FusedRmsNorm, recurrent

Tensor = torch.Tensor

# torch's own rules for CUDA autocast (ATen/autocast_mode.h), by the names of the Python functions
_LOWER = frozenset(
    "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution prelu addmm"
    " addmv addr matmul __matmul__ __rmatmul__ mm mv linear addbmm baddbmm bmm chain_matmul linalg_multi_dot"
    " multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell scaled_dot_product_attention lstm gru rnn_tanh"
    " rnn_relu vecdot linalg_vecdot einsum".split()
)
_FP32 = frozenset(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__"
    " softplus layer_norm native_layer_norm rms_norm group_norm cosine_similarity poisson_nll_loss"
    " cosine_embedding_loss nll_loss nll_loss_nd cross_entropy_loss hinge_embedding_loss kl_div l1_loss"
    " smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss"
    " triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm"
    " logsumexp upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact2d"
    " upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d"
    " _upsample_bicubic2d_aa __rtruediv__ __rdiv__".split()
)
#: these compute in fp32 by an argument and not by a separate cast
_FP32_RESULT = frozenset(
    "prod softmax log_softmax cumprod cumsum linalg_vector_norm vector_norm sum norm".split()
)
_WIDEST = frozenset(
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add".split()
)

_RECURRENT = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))
#: makers of index tensors: what they make stays real where it is integer or boolean
_INDEX_MAKERS = frozenset(
    (
        "arange",
        "zeros",
        "ones",
        "full",
        "tensor",
        "as_tensor",
        "empty",
        "randint",
        "eye",
        "tril",
        "triu",
        "full_like",
        "zeros_like",
        "ones_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_tensor",
        "tril_indices",
        "triu_indices",
    )
)
_INTEGER = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)

#: the largest head size fused attention kernels take
FUSED_HEAD_LIMIT = 256


class InterposeMode(TorchFunctionMode):
    """Sees every torch call above autograd and replaces the few that meta tensors would get wrong."""

    def __init__(
        self, recorder: StepRecorder, autocast: torch.dtype | None, fused_attention: bool = True
    ) -> None:
        super().__init__()
        self.recorder = recorder
        self.autocast = autocast
        self.fused_attention = fused_attention
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}
        self._plans: dict[Any, str] = {}
        self._choices = _torch.boolean_dispatch_targets()

    def resumed(self) -> AbstractContextManager[Any]:
        """This mode, where the autograd engine has switched it off to recompute a forward pass."""
        return nullcontext() if _torch.function_modes() else self

    def end_forward(self) -> None:
        """Leave autocast, as training loops do before backward: cached weight casts are dropped."""
        self._casts.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plan = self._plans.get(func)
        if plan is None:
            plan = self._plans[func] = self._plan(func)
        if plan == "plain":
            return func(*args, **kwargs)
        if plan == "open":
            body = _torch.opened(func)
            assert body is not None
            with self:
                return body(*args, **kwargs)
        if plan == "choose":
            if_true, if_false, name, default = self._choices[func]
            chosen = if_true if kwargs.get(name, default) else if_false
            with self:
                return (_torch.opened(chosen) or chosen)(*args, **kwargs)
        return self._special(func, plan, args, kwargs)

    def _plan(self, func: Any) -> str:
        name = getattr(func, "__name__", "")
        if func in self._choices:
            return "choose"
        if name == "to" or name in _INDEX_MAKERS or name in _RECURRENT:
            return name
        if name in ("scaled_dot_product_attention", "dropout", "rms_norm") and _torch.opened(func) is None:
            return name
        if _torch.opened(func) is not None:
            return "open"
        if self.autocast and name in _LOWER | _FP32 | _FP32_RESULT | _WIDEST:
            return name
        return "plain"

    def _special(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if name == "to":
            return self._move(func, args, kwargs)
        if name in _INDEX_MAKERS:
            return self._make_index(func, args, kwargs)
        if self.autocast:
            args, kwargs = self._cast(name, args, kwargs)
        if name == "scaled_dot_product_attention":
            return self._attention(func, *args, **kwargs)
        if name == "dropout":
            x, p, training = args[:3]
            return (
                torch.native_dropout(x, p, True)[0]
                if training and 0 < p < 1 and x.is_meta
                else func(*args, **kwargs)
            )
        if name == "rms_norm":
            return self._rms_norm(func, *args, **kwargs)
        if name in _RECURRENT and len(args) == 9 and args[0].is_meta and isinstance(args[3], bool):
            return recurrent(self.recorder, name, args)
        return func(*args, **kwargs)

    # -- indices -----------------------------------------------------------------------------

    @staticmethod
    def _make_index(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "meta":
            return func(*args, **kwargs)
        probe = func(*args, **kwargs)
        if probe.dtype in _INTEGER and probe.numel() <= REAL_LIMIT:
            return func(*args, **{**kwargs, "device": "cpu"})
        return probe

    @staticmethod
    def _move(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0]
        if not x.is_meta and x.dtype in _INTEGER:
            keep = [a for a in args[1:] if not _is_meta_device(a)]
            kwargs = {k: v for k, v in kwargs.items() if not _is_meta_device(v)}
            keep = [a.dtype if isinstance(a, Tensor) else a for a in keep]
            if not keep and not set(kwargs) - {"non_blocking"}:
                return x
            target = next((a for a in (*keep, kwargs.get("dtype")) if isinstance(a, torch.dtype)), None)
            if target is None or target in _INTEGER:
                return func(x, *keep, **kwargs)
            return (
                func(x, *args[1:], **kwargs)
                if len(keep) == len(args[1:])
                else func(func(x, "meta"), *keep, **kwargs)
            )
        return func(*args, **kwargs)

    # -- fused operators ---------------------------------------------------------------------

    def _attention(
        self,
        func: Callable[..., Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if not self.fused_attention and q.is_meta:
            with self:  # autocast applies to what it is made of
                return _by_hand(q, k, v, attn_mask, dropout_p, is_causal, scale)
        fused = (
            q.is_meta
            and q.dim() == 4
            and q.shape[-1] <= FUSED_HEAD_LIMIT
            and q.dtype in (torch.float16, torch.bfloat16, torch.float32)
            # the fp32 kernel has no grouped heads
            and not (enable_gqa and q.dtype == torch.float32 and q.shape[-3] != k.shape[-3])
        )
        if not fused:
            options = {
                "dropout_p": dropout_p,
                "is_causal": is_causal,
                "scale": scale,
                "enable_gqa": enable_gqa,
            }
            return func(q, k, v, attn_mask=attn_mask, **options)  # type: ignore[no-any-return]
        extras = (*(("mask",) if attn_mask is not None else ()), *(("dropout",) if dropout_p else ()))
        return FusedAttention.apply(self.recorder, is_causal, extras, q, k, v, attn_mask)  # type: ignore[no-any-return, no-untyped-call]

    def _rms_norm(
        self,
        func: Callable[..., Any],
        x: Tensor,
        shape: Any,
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Any:
        if not x.is_meta:
            return func(x, shape, weight, eps)
        columns = 1
        for size in shape:
            columns *= size
        return FusedRmsNorm.apply(self.recorder, columns, x, weight)  # type: ignore[no-untyped-call]

    # -- autocast ----------------------------------------------------------------------------

    def _cast(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if name in _LOWER:
            target = self.autocast
        elif name in _FP32:
            target = torch.float32
        elif name in _FP32_RESULT:
            x = args[0] if args and isinstance(args[0], Tensor) else None
            if x is not None and x.dtype in (torch.float16, torch.bfloat16) and kwargs.get("dtype") is None:
                kwargs = {**kwargs, "dtype": torch.float32}
            return args, kwargs
        elif name in _WIDEST:
            found = [
                t.dtype for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point()
            ]
            target = torch.float32 if torch.float32 in found else self.autocast
        else:
            return args, kwargs
        assert target is not None
        return tuple(self._cast_value(a, target) for a in args), {
            k: self._cast_value(v, target) for k, v in kwargs.items()
        }

    def _cast_value(self, value: Any, target: torch.dtype) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._cast_value(item, target) for item in value)
        if (
            not isinstance(value, Tensor)
            or value.dtype == target
            or value.dtype not in (torch.float32, torch.float16, torch.bfloat16)
        ):
            return value
        if not (value.is_leaf and value.requires_grad and target != torch.float32):
            return value.to(target)
        cached = self._casts.get(id(value))
        if cached is None:
            cached = self._casts[id(value)] = (value, value.to(target))
        return cached[1]


def _is_meta_device(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_meta
    return isinstance(value, (str, torch.device)) and torch.device(value).type == "meta"


def _by_hand(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, causal: bool, scale: float | None
) -> Tensor:
    """Attention as it was written before there was a fused kernel."""
    if k.shape[-3] != q.shape[-3]:
        k, v = (t.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3) for t in (k, v))
    scores = torch.matmul(q * (scale or q.shape[-1] ** -0.5), k.transpose(-2, -1))
    if causal:
        scores = scores.masked_fill(
            torch.empty(scores.shape[-2:], dtype=torch.bool, device=q.device), -torch.inf
        )
    elif mask is not None:
        scores = scores.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = (
        torch.dropout(torch.softmax(scores, -1), dropout_p, True) if dropout_p else torch.softmax(scores, -1)
    )
    return torch.matmul(weights, v)
