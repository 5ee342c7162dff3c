"""One captured step: precisions, FLOPs, memory, folding, checkpointing, losses."""

import math
from collections import Counter
from functools import cache

import pytest

torch = pytest.importorskip("torch", reason="capture needs torch")
from torch import nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import paceline as pl  # noqa: E402
from paceline.catalog import devices  # noqa: E402
from paceline.errors import CaptureError, SpecError  # noqa: E402

GRANULE = 512  # the allocator's


def ops(workload, phase=None):
    """Every operator that runs, repetitions included."""
    found = [op for index in workload.order for op in workload.segments[index].ops]
    return [op for op in found if phase in (None, op.phase)]


def kinds(workload, phase=None):
    return Counter(op.kind for op in ops(workload, phase))


def moved(workload):
    return sum(op.bytes_read + op.bytes_written for op in ops(workload))


def left(workload):
    """Bytes by kind that the step adds to what was there before it."""
    total = Counter()
    for index in workload.order:
        total.update(workload.segments[index].net)
    return total


def rounded(size):
    return -(-size // GRANULE) * GRANULE


@cache
def captured(name, **options):
    return pl.capture(name, **options)


class Mixed(nn.Module):
    """A product, a softmax, a norm, another product and an exponential."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return self.last(self.norm(torch.softmax(self.first(x), -1))).exp()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return x + self.inner(x).relu()


def stack(depth, width=32):
    return nn.Sequential(*(Block(width) for _ in range(depth)))


# -- precision -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "product", "rest", "parameters"),
    [
        ("fp32", "fp32", "fp32", "fp32"),
        ("tf32", "tf32", "fp32", "fp32"),
        ("bf16", "bf16", "bf16", "bf16"),
        ("fp16", "fp16", "fp16", "fp16"),
        ("amp_bf16", "bf16", "fp32", "fp32"),
        ("amp_fp16", "fp16", "fp32", "fp32"),
    ],
)
def test_dtype_each_operator_runs_in(precision, product, rest, parameters):
    workload = pl.capture((Mixed(), torch.randn(32, 64)), precision=precision)
    found = {
        (op.kind, op.dtype)
        for op in ops(workload)
        if op.kind in ("gemm", "softmax", "norm") or op.name == "aten.exp"
    }
    assert found == {("gemm", product), ("softmax", rest), ("norm", rest), ("elementwise", rest)}
    assert (
        {p.dtype for p in workload.parameters}
        == {parameters}
        == {op.dtype for op in ops(workload, "optimizer")}
    )
    assert (kinds(workload)["cast"] > 0) == precision.startswith("amp")


def test_autocast_casts_a_shared_weight_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(64, 64, bias=False)

        def forward(self, x):
            return self.inner(self.inner(x))

    workload = pl.capture((Twice(), torch.randn(8, 64)), precision="amp_bf16")
    casts = [op for op in ops(workload, "forward") if op.kind == "cast" and op.dims == (64 * 64,)]
    assert len(casts) == 1


def test_autocast_equals_torchs_own_on_the_cpu():
    """The dtypes that leave each function are those of torch's autocast, where both have a rule for it."""
    calls = {
        "linear": lambda x: nn.functional.linear(x, x),
        "matmul": lambda x: x @ x,
        "conv": lambda x: nn.functional.conv1d(x[None], x[:, :, None]),
        "add": lambda x: x + x.half(),
        "relu": torch.relu,
        "gelu": nn.functional.gelu,
        "mse": lambda x: nn.functional.mse_loss(x.bfloat16(), x),
    }
    for name, call in calls.items():
        seen = []

        class Probe(nn.Module):
            def forward(self, x, call=call, seen=seen):
                seen.append(call(x).dtype)
                return x.sum()

        pl.capture((Probe(), torch.randn(8, 8, requires_grad=True)), precision="amp_bf16")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert seen == [call(torch.randn(8, 8)).dtype], name


# -- FLOPs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "shape", "flops"),
    [
        # forward and the weight's gradient; the first layer's input needs none
        (nn.Linear(48, 80), (16, 48), 2 * 2 * 16 * 48 * 80),
        (
            nn.Sequential(nn.Linear(48, 80), nn.Linear(80, 24)),
            (16, 48),
            2 * 2 * 16 * 48 * 80 + 3 * 2 * 16 * 80 * 24,
        ),
        (nn.Conv2d(8, 16, 3, padding=1), (2, 8, 10, 10), 2 * 2 * 2 * 100 * 16 * 8 * 9),
        (nn.Conv2d(8, 16, 3, stride=2, groups=4), (2, 8, 9, 9), 2 * 2 * 2 * 16 * 16 * 2 * 9),
        (nn.ConvTranspose2d(8, 16, 2, stride=2), (2, 8, 5, 5), 2 * 2 * 2 * 25 * 8 * 16 * 4),
        (nn.LSTM(24, 32, 2), (7, 4, 24), 3 * 2 * 7 * 4 * 4 * 32 * (24 + 32 + 32 + 32)),
        (nn.GRU(24, 32, batch_first=True), (4, 7, 24), 3 * 2 * 7 * 4 * 3 * 32 * (24 + 32)),
    ],
)
def test_flops_by_hand(module, shape, flops):
    def mean(out):
        return (out if isinstance(out, torch.Tensor) else out[0]).mean()

    assert pl.capture((module, torch.randn(shape), mean)).flops == flops


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
def test_flops_of_attention(causal, precision):
    class Attend(nn.Module):
        def forward(self, q):
            return nn.functional.scaled_dot_product_attention(q, q, q, is_causal=causal)

    b, h, s, d = 2, 4, 128, 32
    workload = pl.capture((Attend(), torch.randn(b, h, s, d, requires_grad=True)), precision=precision)
    assert kinds(workload)["attention"] == 2 and kinds(workload)["gemm"] == 0
    # two products forward and five backward, which computes the scores again; a causal mask leaves half
    assert workload.flops == 7 * 2 * b * h * s * s * d * (0.5 if causal else 1)


@pytest.mark.parametrize(
    ("name", "options"), [("resnet18", {"image": 64}), ("vgg11", {"image": 64}), ("dlrm-small", {})]
)
def test_flops_equal_torchs_counter(name, options):
    module, inputs, loss = pl.models.build(pl.models.get(name), batch=2, **options)
    with FlopCounterMode(display=False) as counter:
        out = module(*inputs)
        (loss(out) if loss else out.sum()).backward()
    assert captured(name, batch=2, **options).flops == counter.get_total_flops()


def test_flops_of_a_language_model():
    """6 N D and attention: the usual estimate is close to what is counted."""
    workload = captured("gpt2-124m", batch=2, seq=256, precision="amp_bf16")
    tokens, depth, width = 512, 12, 768
    estimate = 6 * tokens * (workload.parameter_count - 1024 * width) + 7 * tokens * 256 * width * depth
    assert workload.flops == pytest.approx(estimate, rel=0.01)


# -- memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet50", {"batch": 2, "precision": "amp_bf16"}),
        ("resnet101", {"batch": 1, "image": 64}),
        ("vit_b_16", {"batch": 2}),
        ("gpt2-124m", {"batch": 1, "seq": 64, "precision": "bf16", "checkpointing": True}),
        ("bert-base", {"batch": 1, "seq": 64}),
        ("lstm-650", {"batch": 2}),
        ("dlrm-small", {"batch": 4}),
    ],
)
def test_after_the_step_only_gradients_and_the_loss_are_left(name, options):
    workload = captured(name, **options)
    gradients = sum(rounded(p.bytes) for p in workload.parameters if p.ready >= 0)
    assert +left(workload) == {"gradients": gradients, "activations": GRANULE}


def test_resident_bytes_are_parameters_buffers_states_and_inputs():
    module = nn.Sequential(nn.Linear(100, 100), nn.BatchNorm1d(100))
    workload = pl.capture((module, torch.randn(10, 100)), optimizer="adamw")
    trained = rounded(40000) + 3 * GRANULE  # each of the small ones takes one granule
    assert workload.resident == {
        "parameters": trained + 3 * GRANULE,
        "optimizer": 2 * trained,
        "activations": rounded(4000),
    }


def test_peak_of_a_chain_of_products():
    """Without saved intermediates beyond the inputs of each layer, the peak follows by hand."""
    n, rows, depth = 256, 64, 4
    module = nn.Sequential(*(nn.Linear(n, n, bias=False) for _ in range(depth)))
    found = pl.predict(
        pl.capture((module, torch.randn(rows, n), torch.sum), optimizer="sgd-plain"), "h200"
    ).memory
    weights, activation = depth * n * n * 4, rows * n * 4
    # last gradient about to be made: all other gradients live, the input and two gradients of activations at
    # most
    assert found.by_kind["parameters"] == weights and found.by_kind["gradients"] == weights
    assert activation <= found.by_kind["activations"] + found.by_kind["temporary"] <= 4 * activation


def test_gradients_become_ready_from_the_last_layer_to_the_first():
    ready = {p.name: p.ready for p in captured("resnet18", batch=1, image=64).parameters}
    names = list(ready)
    assert sorted(ready.values()) == list(range(len(ready)))
    assert max(ready[name] for name in names[-2:]) < 2 and ready[names[0]] == len(names) - 1


def test_frozen_parameters_have_no_gradient_and_no_state():
    module = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 4))
    module[0].requires_grad_(False)
    workload = pl.capture((module, torch.randn(8, 256)), optimizer="adamw")
    assert [p.ready >= 0 for p in workload.parameters] == [False, False, True, True]
    assert workload.resident["optimizer"] == 2 * (rounded(4096) + GRANULE)


def test_capture_holds_no_weights():
    workload = captured("llama3-70b", precision="bf16")
    assert workload.parameter_count == 70_553_706_496 and workload.resident["parameters"] > 141e9
    module, inputs, _ = pl.models.build(pl.models.get("llama3-70b"), batch=1)
    assert all(t.is_meta for t in (*module.parameters(), *module.buffers(), *inputs))


def test_capture_leaves_the_module_usable():
    """Hooks and wrappers are gone after a capture, also after one that fails."""
    module = stack(6)

    def broken(_):
        raise KeyError("no")

    pl.capture((module, torch.randn(2, 32)), checkpointing=True)
    with pytest.raises(CaptureError):
        pl.capture((module, torch.randn(2, 32), broken))
    assert all(
        "forward" not in vars(m) and not m._forward_hooks and not m._forward_pre_hooks
        for m in module.modules()
    )
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
    assert module(torch.empty(2, 32)).shape == (2, 32)


# -- folding and checkpointing ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet101", {"batch": 1, "image": 64}),
        ("gpt2-124m", {"batch": 2, "seq": 64, "precision": "amp_bf16"}),
        ("gpt2-124m", {"batch": 1, "seq": 64, "precision": "bf16", "checkpointing": True}),
        ("vit_b_16", {"batch": 2}),
        ("llama3.2-1b", {"seq": 64, "precision": "amp_bf16"}),
        ("transformer-base", {"batch": 2}),
        ("dlrm-small", {"batch": 4}),
    ],
)
def test_folded_equals_unfolded(name, options):
    folded, whole = captured(name, **options), pl.capture(name, fold=False, **options)
    device = devices.get("h200")
    one, other = pl.predict(folded, device), pl.predict(whole, device)
    assert folded.flops == whole.flops
    assert {p.name: p.shape for p in folded.parameters} == {p.name: p.shape for p in whole.parameters}
    assert moved(folded) == pytest.approx(moved(whole), rel=1e-3)
    assert one.peak_bytes == pytest.approx(other.peak_bytes, rel=1e-3)
    assert one.kernel_s == pytest.approx(other.kernel_s, rel=2e-3)
    assert one.step_s == pytest.approx(other.step_s, rel=5e-3)


def test_cost_of_depth():
    """Segments and their operators do not grow with depth."""
    shallow, deep = (pl.capture((stack(depth), torch.randn(4, 32))) for depth in (6, 60))
    assert [[op.name for op in s.ops] for s in shallow.segments] == [
        [op.name for op in s.ops] for s in deep.segments
    ]
    assert (kinds(shallow)["gemm"], kinds(deep)["gemm"]) == (3 * 6 - 1, 3 * 60 - 1)


def test_blocks_that_differ_are_not_folded():
    class Uneven(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(stack(6))
            self.blocks[3].inner = nn.Linear(32, 32, bias=False)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    module, inputs = Uneven(), torch.randn(4, 32)
    assert kinds(pl.capture((module, inputs))) == kinds(pl.capture((module, inputs), fold=False))


def test_checkpointing_recomputes_and_lowers_the_peak():
    plain, checkpointed = (
        captured("vit_b_16", batch=32, precision="amp_bf16", checkpointing=how) for how in (False, True)
    )
    forward = sum(op.flops for op in ops(plain, "forward") if op.module.startswith("blocks"))
    again = sum(op.flops for op in ops(checkpointed, "recompute"))
    assert not ops(plain, "recompute") and checkpointed.flops == plain.flops + again
    assert 0.6 * forward < again <= forward  # what follows the last saved tensor is not computed again
    one, other = pl.predict(plain, "h200"), pl.predict(checkpointed, "h200")
    assert other.peak_bytes < 0.6 * one.peak_bytes and other.kernel_s > 1.1 * one.kernel_s
    assert other.memory.by_kind["parameters"] == one.memory.by_kind["parameters"]


# -- losses ----------------------------------------------------------------------------------


class Output(dict):
    """What transformers' models return: fields by name."""

    __getattr__ = dict.__getitem__


@pytest.mark.parametrize(
    ("shape", "wrap", "loss"),
    [
        ((8, 10), lambda y: y, "nll_loss_forward"),
        ((8, 10), lambda y: (y, None), "nll_loss_forward"),
        ((8, 1), lambda y: y, "mean"),
        ((8, 3, 10), lambda y: y, "mean"),
        ((8, 10), lambda y: Output(loss=y.var(), logits=y), "var"),
    ],
)
def test_default_loss(shape, wrap, loss):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(6, shape[-1])

        def forward(self, x):
            return wrap(self.head(x))

    workload = pl.capture((Net(), torch.randn(*shape[:-1], 6)))
    assert [
        op.name
        for op in ops(workload, "forward")
        if op.name in ("aten.nll_loss_forward", "aten.mean", "aten.var")
    ] == [f"aten.{loss}"]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda y: y, r"the loss must be one number, got a tensor of shape \(8, 4\)"),
        (lambda y: 3.0, "the loss must be one number, got float"),
        (lambda y: y.detach().sum(), "does not depend on any trainable parameter"),
        (
            lambda y: y.sum() if y.mean() > 0 else y.mean(),
            "forward pass: the model asks for the value of a tensor",
        ),
    ],
)
def test_bad_loss(loss, message):
    with pytest.raises(CaptureError, match=message):
        pl.capture((nn.Linear(4, 4), torch.randn(8, 4), loss))


@pytest.mark.parametrize("value", [nn.Linear(2, 2), (nn.Linear(2, 2),), ("x", "y"), (1, 2, 3, 4), None])
def test_what_is_no_model(value):
    with pytest.raises(SpecError, match=r"expected \(module, inputs\) or \(module, inputs, loss_fn\), got"):
        pl.capture(value)


def test_names_and_sizes():
    tokens, images = (
        captured("gpt2-124m", batch=2, seq=256, precision="amp_bf16"),
        captured("resnet18", batch=2, image=64),
    )
    assert (tokens.unit, tokens.units_per_step, tokens.seq, tokens.optimizer) == ("tokens", 512, 256, "adamw")
    assert (images.unit, images.units_per_step, images.seq, images.optimizer) == ("images", 2, None, "sgd")
    assert tokens.captured_with["torch"] == torch.__version__
    assert math.prod(tokens.parameters[0].shape) == tokens.parameters[0].numel
