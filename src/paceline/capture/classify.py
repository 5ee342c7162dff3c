"""From an ATen call to what the device has to do: kind, sizes, FLOPs, bytes.

Kinds and the meaning of `dims` (see `cost.operators` for their formulas):

    gemm         batch, m, n, k
    conv         n, c, k, groups, input points, output points, filter points, stride
    attention    batch, query heads, key heads, query length, key length, head size, value size
    elementwise  elements
    cast copy fill cat gather scatter pool scan sort     elements written
    reduce       kept, reduced
    norm softmax rows, columns
    batchnorm    rows (batch x points), channels
    rnn          layers x directions, steps, batch, input, hidden
    optimizer    tensors, elements, launches
    fused        elements, rows, special functions, launches (see `capture.fuse`)

FLOPs count matrix work only (a multiply-add is two), the convention of torch's own counter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor

DTYPE_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
    torch.complex64: "complex64",
}


class DeviceWork(NamedTuple):
    """One piece of device work; an ATen call is one or more of them."""

    kind: str
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]
    dims: tuple[int, ...]
    flops: float = 0.0
    tags: tuple[str, ...] = ()
    dtype: str | None = None
    #: see `spec.workload.Op`
    needs: Sequence[Tensor] = ()
    makes: Sequence[Tensor] = ()


Handler = Callable[[tuple[Any, ...], dict[str, Any], Any], Iterator[DeviceWork] | list[DeviceWork]]
HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler for ATen operators by name, without overload."""

    def register(handler: Handler) -> Handler:
        for name in names:
            HANDLERS[name] = handler
        return handler

    return register


def tensors(value: Any) -> list[Tensor]:
    """All tensors in (nested) arguments or results, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors(item)]
    return []


def touched_bytes(tensor: Tensor) -> int:
    """Bytes of memory a tensor covers: broadcast dimensions count once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride:
            count *= size
    return count * tensor.element_size() if tensor.numel() else 0


def _dense(tensor: Tensor) -> bool:
    """No gaps and no overlap, in whatever order of dimensions."""
    expected = 1
    pairs = sorted(
        (stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1
    )
    for stride, size in pairs:
        if stride != expected:
            return False
        expected *= size
    return True


def _same_layout(inputs: Sequence[Tensor], output: Tensor) -> bool:
    """Whether a pointwise kernel can walk all tensors linearly: scalars apart, equal strides, dense."""
    shape, strides = output.shape, output.stride()
    for t in inputs:
        if t.numel() == 1:
            continue
        if t.shape != shape or not _dense(t):
            return False
        if any(a != b for a, b, size in zip(t.stride(), strides, shape, strict=True) if size != 1):
            return False
    return True


def pointwise(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[DeviceWork]:
    """Any operator without a formula of its own: reads its inputs, writes its outputs."""
    reads, writes = tensors(args) + tensors(tuple(kwargs.values())), tensors(out)
    if not writes:
        return []
    largest = max(writes, key=Tensor.numel)
    if largest.numel() == 0:
        return []
    if not _same_layout(reads, largest):
        tags: tuple[str, ...] = ("strided",)
    else:
        # operands of different width take a kernel that converts element by element
        widths = {t.element_size() for t in (*reads, largest) if t.is_floating_point() and t.numel() > 1}
        tags = ("mixed",) if len(widths) > 1 else ()
    return [DeviceWork("elementwise", reads, writes, (largest.numel(),), tags=tags)]


@handles("gelu", "gelu_backward", "erf", "erfinv", "mish", "mish_backward")
def _transcendental(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[DeviceWork]:
    """Pointwise, but with an error function (or as long a chain) per element."""
    return [w._replace(tags=("math",)) if not w.tags else w for w in pointwise(args, kwargs, out)]


def _gemm(a: Tensor, b: Tensor, out: Tensor, extra: Sequence[Tensor] = ()) -> DeviceWork:
    """out[..., m, n] = a[..., m, k] @ b[..., k, n]; tags say which operands are k-contiguous and how
    aligned.
    """
    m, k = a.shape[-2:]
    n = b.shape[-1]
    batch = math.prod(a.shape[:-2])
    a_layout = "t" if a.stride(-1) == 1 or k == 1 else "n"  # t: k runs fastest
    b_layout = "t" if b.stride(-2) == 1 and n != 1 else "n"
    leads = [max(a.stride(-1), a.stride(-2)) if min(m, k) > 1 else max(m, k)]
    leads += [max(b.stride(-1), b.stride(-2)) if min(n, k) > 1 else max(n, k), n]
    align = math.gcd(*(max(1, lead) for lead in leads), 16)
    return DeviceWork(
        "gemm",
        [a, b, *extra],
        [out],
        (batch, m, n, k),
        2.0 * batch * m * n * k,
        (a_layout + b_layout, f"align{align}"),
        DTYPE_NAMES.get(a.dtype, "fp32"),
    )


@handles("mm", "bmm", "_grouped_mm")
def _mm(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[DeviceWork]:
    return [_gemm(args[0], args[1], out)]


@handles("addmm", "baddbmm")
def _addmm(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[DeviceWork]:
    return [_gemm(args[1], args[2], out, [args[0]])]


@handles("mv", "dot", "vdot")
def _mv(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[DeviceWork]:
    a = args[0] if args[0].dim() == 2 else args[0][None]
    return [_gemm(a, args[1][:, None], out[..., None] if out.dim() else out[None, None])]


@handles("_scaled_mm")
def _scaled_mm(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[DeviceWork]:
    return [_gemm(args[0], args[1], tensors(out)[0])._replace(dtype="fp8")]


def _conv_dims(
    x: Tensor, weight: Tensor, out: Tensor, stride: Sequence[int], groups: int, transposed: bool
) -> tuple[int, ...]:
    # a transposed convolution is the data gradient of a plain one with input and output exchanged
    small, large = (out, x) if transposed else (x, out)
    return (
        x.shape[0],
        small.shape[1],
        large.shape[1],
        groups,
        math.prod(small.shape[2:]),
        math.prod(large.shape[2:]),
        math.prod(weight.shape[2:]),
        max(stride),
    )


def _conv_flops(dims: tuple[int, ...]) -> float:
    n, c, k, groups, _, points, filter_points, _ = dims
    return 2.0 * n * points * k * (c // groups) * filter_points


def is_channels_last(tensor: Tensor) -> bool:
    """Whether torch would call these strides channels-last: the channel runs fastest, the batch slowest.

    Strides decide also where sizes of one leave several readings open, as torch's own test does.
    """
    if tensor.dim() not in (4, 5):
        return False
    sizes, strides = tensor.shape, tensor.stride()
    if strides[1] == 0:
        return False
    least = 0
    for d in (1, *range(tensor.dim() - 1, 1, -1), 0):
        if sizes[d] == 0 or strides[d] < least or (d == 0 and least == strides[1]):
            return False
        least = strides[d] * max(1, sizes[d])
    return True


def _layout(tensor: Tensor) -> str:
    return "nhwc" if is_channels_last(tensor) else "nchw"


def conv_layout(x: Tensor, weight: Tensor) -> str:
    """The layout cuDNN convolves in: channels-last as soon as input or filter lies so."""
    return "nhwc" if "nhwc" in (_layout(x), _layout(weight)) else "nchw"


def _conv_tags(layout: str, which: str, transposed: bool) -> tuple[str, ...]:
    if transposed:
        which = {"fprop": "dgrad", "dgrad": "fprop", "wgrad": "wgrad"}[which]
    return (which, layout)


def _brought_to(layout: str, operands: Sequence[Tensor]) -> Iterator[DeviceWork]:
    """Copies of the operands that do not lie as the convolution wants them."""
    for t in operands:
        fmt = {4: torch.channels_last, 5: torch.channels_last_3d}.get(t.dim(), torch.contiguous_format)
        if not t.is_contiguous(memory_format=fmt if layout == "nhwc" else torch.contiguous_format):
            yield DeviceWork("copy", [t], [t], (t.numel(),), tags=("strided",))


@handles("convolution", "_convolution", "cudnn_convolution")
def _convolution(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Iterator[DeviceWork]:
    x, weight, bias, stride, _, _, transposed, _, groups = args[:9]
    dims = _conv_dims(x, weight, out, stride, groups, transposed)
    dtype, layout = DTYPE_NAMES.get(x.dtype, "fp32"), conv_layout(x, weight)
    yield from _brought_to(layout, [x, weight])
    yield DeviceWork(
        "conv", [x, weight], [out], dims, _conv_flops(dims), _conv_tags(layout, "fprop", transposed), dtype
    )
    if bias is not None:  # cuDNN convolves first, a pointwise kernel adds the bias
        yield DeviceWork("elementwise", [out, bias], [out], (out.numel(),), tags=("strided",))


@handles("convolution_backward")
def _convolution_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Iterator[DeviceWork]:
    grad, x, weight, _, stride, _, _, transposed, _, groups, mask = args[:11]
    dims = _conv_dims(x, weight, grad, stride, groups, transposed)
    dtype, layout = DTYPE_NAMES.get(x.dtype, "fp32"), conv_layout(x, weight)
    yield from _brought_to(layout, [grad, x, weight])
    if mask[0]:
        yield DeviceWork(
            "conv",
            [grad, weight],
            [out[0]],
            dims,
            _conv_flops(dims),
            _conv_tags(layout, "dgrad", transposed),
            dtype,
        )
    if mask[1]:
        yield DeviceWork(
            "conv",
            [grad, x],
            [out[1]],
            dims,
            _conv_flops(dims),
            _conv_tags(layout, "wgrad", transposed),
            dtype,
        )
    if mask[2]:
        yield _reduction(
            [grad], [out[2]], grad.numel(), grad.shape[1], "outer" if _layout(grad) == "nhwc" else "inner"
        )


def _reduction(
    reads: Sequence[Tensor], writes: Sequence[Tensor], elements: int, kept: int, direction: str
) -> DeviceWork:
    return DeviceWork("reduce", reads, writes, (kept, max(1, elements // max(1, kept))), tags=(direction,))


@handles(
    "sum",
    "mean",
    "amax",
    "amin",
    "max",
    "min",
    "argmax",
    "argmin",
    "var",
    "var_mean",
    "std",
    "std_mean",
    "norm",
    "prod",
    "any",
    "all",
    "count_nonzero",
    "linalg_vector_norm",
    "logsumexp",
)
def _reduce(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[DeviceWork]:
    writes = tensors(out)
    reads = tensors(args)
    x = reads[0]
    if len(reads) > 1 and writes[0].shape == torch.broadcast_shapes(*(t.shape for t in reads)):
        return pointwise(args, kwargs, out)  # the two-argument forms of max and min
    kept = writes[0].numel()
    # an expanded tensor, such as the gradient of a sum, may have no stride at all
    strides = [(s, i) for i, s in enumerate(x.stride()) if s and x.shape[i] > 1]
    fastest = min(strides, default=(0, -1))[1]
    dims = next(
        (
            a
            for a in (*args[1:], kwargs.get("dim"))
            if isinstance(a, (int, list, tuple)) and not isinstance(a, bool)
        ),
        None,
    )
    listed = [dims] if isinstance(dims, int) else dims or range(x.dim())
    reduced = {d % x.dim() for d in listed} if x.dim() else {-1}
    return [_reduction(reads, writes, x.numel(), kept, "inner" if fastest in reduced else "outer")]


def _channels(x: Tensor) -> int:
    return int(x.shape[1]) if x.dim() > 1 else 1


@handles(
    "native_batch_norm",
    "_native_batch_norm_legit",
    "cudnn_batch_norm",
    "_batch_norm_with_update",
    "miopen_batch_norm",
)
def _batch_norm(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[DeviceWork]:
    x, c = args[0], _channels(args[0])
    training = args[5] if len(args) > 5 and isinstance(args[5], bool) else True
    tags = ("forward" if training else "inference", _layout(x))
    return [DeviceWork("batchnorm", tensors(args), tensors(out), (x.numel() // c, c), tags=tags)]


@handles(
    "native_batch_norm_backward",
    "cudnn_batch_norm_backward",
    "batch_norm_backward",
    "miopen_batch_norm_backward",
)
def _batch_norm_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[DeviceWork]:
    grad, x = args[0], args[1]
    c = _channels(x)
    return [
        DeviceWork(
            "batchnorm", tensors(args), tensors(out), (x.numel() // c, c), tags=("backward", _layout(grad))
        )
    ]


def _contiguous(operands: Sequence[Tensor]) -> Iterator[DeviceWork]:
    """Copies of the operands that a kernel which wants contiguous input makes first."""
    for t in operands:
        if not t.is_contiguous():
            yield DeviceWork("copy", [t], [t], (t.numel(),), tags=("strided",))


@handles("native_layer_norm", "native_group_norm")
def _norm(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Iterator[DeviceWork]:
    outs = tensors(out)
    rows = max(1, outs[1].numel())
    yield from _contiguous(args[:1])
    yield DeviceWork("norm", tensors(args), outs, (rows, outs[0].numel() // rows), tags=("forward",))


@handles("native_layer_norm_backward", "native_group_norm_backward")
def _norm_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Iterator[DeviceWork]:
    reads, outs = tensors(args), tensors(out)
    rows = max(1, reads[2].numel())
    yield from _contiguous(args[:2])
    yield DeviceWork(
        "norm",
        reads,
        outs,
        (rows, reads[1].numel() // rows),
        tags=("backward", "weights" if len(outs) > 1 else "plain"),
    )


@handles("_softmax", "_log_softmax", "_safe_softmax")
def _softmax(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[DeviceWork]:
    x, dim = args[0], args[1] if len(args) > 1 else -1
    cols = x.shape[dim] if x.dim() else 1
    return [
        DeviceWork(
            "softmax",
            [x],
            [out],
            (x.numel() // max(1, cols), cols),
            tags=("forward", "inner" if x.stride(dim) == 1 else "outer"),
        )
    ]


@handles("_log_softmax_backward_data")
def _softmax_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Iterator[DeviceWork]:
    grad, y, dim = args[:3]
    cols = y.shape[dim] if y.dim() else 1
    yield DeviceWork(
        "softmax",
        [grad, y],
        [out],
        (y.numel() // max(1, cols), cols),
        tags=("backward", "inner" if y.stride(dim) == 1 else "outer"),
    )


@handles("_softmax_backward_data")
def _plain_softmax_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Iterator[DeviceWork]:
    grad, y = args[:2]  # a pointwise product first, then the kernel that log-softmax shares
    yield DeviceWork("elementwise", [grad, y], [out], (out.numel(),))
    yield from _softmax_backward(args, kwargs, out)


@handles("nll_loss_forward", "nll_loss2d_forward")
def _nll(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[DeviceWork]:
    # reads one log-probability per row: a gather followed by a small reduction in one block
    rows = (args[1].numel(),)
    return [DeviceWork("gather", [args[1]], tensors(out), rows, tags=("single-block",), needs=[args[0]])]


@handles("nll_loss_backward", "nll_loss2d_backward")
def _nll_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Iterator[DeviceWork]:
    yield DeviceWork("fill", [], [out], (out.numel(),))
    yield DeviceWork(
        "gather",
        [args[2]],
        [args[2]],
        (args[2].numel(),),
        tags=("single-block",),
        needs=[args[0]],
        makes=[out],
    )


@handles("embedding", "index_select", "gather", "index", "take", "masked_select")
def _gather(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[DeviceWork]:
    index = [t for t in tensors(args) if not t.is_floating_point()]
    source = [t for t in tensors(args) if t.is_floating_point()]
    return [DeviceWork("gather", [*index, out], [out], (out.numel(),), needs=source)]


@handles("embedding_dense_backward")
def _embedding_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Iterator[DeviceWork]:
    grad, index = args[0], args[1]
    yield DeviceWork("fill", [], [out], (out.numel(),))
    tags = ("sorted", f"rows{index.numel()}")
    yield DeviceWork("scatter", [grad, index], [grad], (grad.numel(),), tags=tags, makes=[out])


@handles(
    "scatter",
    "scatter_add",
    "scatter_add_",
    "scatter_",
    "index_add",
    "index_add_",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "index_copy",
    "index_copy_",
    "masked_scatter",
    "scatter_reduce",
)
def _scatter(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Iterator[DeviceWork]:
    target = args[0]
    source = max((t for t in tensors(args[1:])), key=Tensor.numel, default=target)
    writes = tensors(out)
    # the out-of-place form copies first
    if writes and writes[0] is not target and not _shares(writes[0], target):
        yield DeviceWork("copy", [target], writes, (target.numel(),))
    reads, size = tensors(args[1:]), (source.numel(),)
    yield DeviceWork("scatter", reads, [source], size, tags=("atomic",), makes=writes)


def _shares(a: Tensor, b: Tensor) -> bool:
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


@handles("_to_copy")
def _to_copy(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[DeviceWork]:
    x = args[0]
    if x.device.type == "cpu" and out.device.type == "meta":
        return []  # an index tensor changing hands between our two devices
    tags = () if _same_layout([x], out) else ("strided",)
    return [DeviceWork("cast" if x.dtype != out.dtype else "copy", [x], [out], (out.numel(),), tags=tags)]


@handles("roll")
def _roll(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[DeviceWork]:
    # one pass per dimension rolled
    return [
        DeviceWork("copy", [args[0]], [out], (out.numel(),), tags=("strided",))
        for _ in (args[1] if isinstance(args[1], (list, tuple)) else [0])
    ]


@handles(
    "clone",
    "copy_",
    "copy",
    "_reshape_copy",
    "flip",
    "repeat",
    "tril",
    "triu",
    "constant_pad_nd",
    "reflection_pad2d",
    "im2col",
    "col2im",
    "channel_shuffle",
    "pixel_shuffle",
    "pixel_unshuffle",
    "repeat_interleave",
    "_pad_circular",
)
def _copy(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[DeviceWork]:
    reads = tensors(args)
    source = reads[-1]
    if not any(t is out for t in reads) and source.shape == out.shape and out.numel() and _is_padding(args):
        return []  # padding by nothing returns its input
    kind = "cast" if source.dtype != out.dtype else "copy"
    tags = () if source.shape == out.shape and _same_layout([source], out) else ("strided",)
    return [DeviceWork(kind, [source], [out], (out.numel(),), tags=tags)]


def _is_padding(args: tuple[Any, ...]) -> bool:
    return len(args) > 1 and isinstance(args[1], (list, tuple)) and not any(args[1])


@handles("select_backward", "slice_backward", "diagonal_backward", "unfold_backward", "as_strided_scatter")
def _view_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Iterator[DeviceWork]:
    yield DeviceWork("fill", [], [out], (out.numel(),))
    yield DeviceWork("copy", [args[0]], [args[0]], (args[0].numel(),), tags=("strided",), makes=[out])


@handles(
    "zeros",
    "zeros_like",
    "new_zeros",
    "zero_",
    "fill_",
    "full",
    "full_like",
    "new_full",
    "ones",
    "ones_like",
    "new_ones",
    "scalar_tensor",
    "arange",
    "linspace",
    "eye",
    "zero",
    "fill",
)
def _fill(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[DeviceWork]:
    return [DeviceWork("fill", [], [out], (out.numel(),))]


@handles(
    "bernoulli_",
    "bernoulli",
    "uniform_",
    "normal_",
    "rand",
    "randn",
    "rand_like",
    "randn_like",
    "randint",
    "randperm",
    "exponential_",
    "random_",
    "native_dropout",
)
def _random(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[DeviceWork]:
    reads = [t for t in tensors(args) if t.numel() > 1] if len(tensors(out)) > 1 else []
    writes = tensors(out)
    return [DeviceWork("elementwise", reads, writes, (writes[0].numel(),), tags=("random",))]


@handles("_local_scalar_dense")
def _scalar(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[DeviceWork]:
    """Reading a value back: a copy of a few bytes, and the host waits until the device has caught up."""
    return [DeviceWork("sync", [args[0]], [], (1,))]


@handles("cat", "stack")
def _cat(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[DeviceWork]:
    parts = [t for t in tensors(args[0]) if t.numel()]
    tags: tuple[str, ...] = ("strided",)
    if all(t.is_contiguous() for t in parts):
        tags = ()
    elif all(is_channels_last(t) for t in parts):
        tags = ("nhwc",)
    return [DeviceWork("cat", parts, [out], (out.numel(),), tags=tags)]


@handles("cumsum", "cumprod", "logcumsumexp", "cummax", "_cummax_helper")
def _scan(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[DeviceWork]:
    return [DeviceWork("scan", tensors(args), tensors(out), (tensors(out)[0].numel(),))]


@handles("sort", "argsort", "topk", "unique_dim", "_unique2", "kthvalue", "median", "mode")
def _sort(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[DeviceWork]:
    return [DeviceWork("sort", tensors(args), tensors(out), (args[0].numel(), tensors(out)[0].numel()))]


_POOLS = (
    "max_pool2d_with_indices",
    "avg_pool2d",
    "_adaptive_avg_pool2d",
    "adaptive_max_pool2d",
    "max_pool3d_with_indices",
    "avg_pool3d",
    "_adaptive_avg_pool3d",
    "upsample_nearest2d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
    "_upsample_bilinear2d_aa",
    "_upsample_nearest_exact2d",
    "_upsample_bicubic2d_aa",
    "grid_sampler_2d",
    "max_unpool2d",
    "upsample_linear1d",
)


@handles(*_POOLS)
def _pool(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[DeviceWork]:
    outs = tensors(out)
    window = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else [1]
    return [
        DeviceWork(
            "pool",
            tensors(args),
            outs,
            (outs[0].numel(), math.prod(window) if len(window) <= 3 else 1),
            tags=("forward", _layout(args[0])),
        )
    ]


@handles(*(f"{name}_backward" for name in _POOLS))
def _pool_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[DeviceWork]:
    outs = tensors(out)
    window = args[2] if len(args) > 2 and isinstance(args[2], (list, tuple)) else [1]
    return [
        DeviceWork(
            "pool",
            tensors(args),
            outs,
            (outs[0].numel(), math.prod(window) if len(window) <= 3 else 1),
            tags=("backward", _layout(args[0])),
        )
    ]
