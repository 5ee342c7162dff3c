"""Fusing a step as torch.compile does: fewer kernels and bytes, the same matrix work, never slower."""

from collections import Counter
from functools import cache

import pytest

torch = pytest.importorskip("torch", reason="capture needs torch")
from torch import nn  # noqa: E402

import paceline as pl  # noqa: E402
from paceline.capture.fuse import fuse  # noqa: E402
from paceline.catalog import devices  # noqa: E402
from paceline.errors import SpecError  # noqa: E402
from paceline.predict.step import predict  # noqa: E402
from paceline.spec.workload import Workload  # noqa: E402

MODELS = {
    "resnet18": {"batch": 16},
    "mobilenet_v2": {"batch": 16},
    "googlenet": {"batch": 8},
    "vit_b_16": {"batch": 8},
    "lstm-650": {"batch": 8},
    "bert-base": {"batch": 4, "seq": 128},
    "gpt2-124m": {"batch": 2, "seq": 512},
    "llama3.2-1b": {"batch": 1, "seq": 512},
    "mixtral-8x7b": {"batch": 1, "seq": 128},
    "dlrm-small": {"batch": 512},
    "dlrm": {"batch": 64},
    "transformer-base": {"batch": 4, "seq": 64},
}


@cache
def eager(name, precision="amp_bf16"):
    return pl.capture(name, precision=precision, **MODELS[name])


def ops(workload, phase=None):
    found = [op for index in workload.order for op in workload.segments[index].ops]
    return [op for op in found if phase in (None, op.phase)]


def moved(workload):
    return sum(op.bytes_read + op.bytes_written for op in ops(workload))


def matrix_work(workload):
    return Counter((op.kind, op.flops) for op in ops(workload) if op.flops)


def fused(module, *inputs, phase="forward", **options):
    """The kernels of one pass of a small module, as (form, names of what was fused) or the library operator's
    kind.
    """
    workload = pl.capture((module, inputs, lambda out: out.float().mean()), compile=True, **options)
    loss = {"fused.mean", "fused.ones_like"}
    return [
        (op.tags[0] if op.kind == "fused" else op.kind, op)
        for op in ops(workload, phase)
        if op.name not in loss
    ]


def forms(*args, **options):
    return [form for form, _ in fused(*args, **options)]


@pytest.mark.parametrize("name", MODELS)
def test_fewer_kernels_and_bytes_and_the_same_matrix_work(name):
    before, after = eager(name), fuse(eager(name))
    norms = sum(op.kind == "batchnorm" for op in ops(before))  # one operator of two or three kernels
    assert len(ops(after)) < len(ops(before)) + norms
    assert moved(after) < moved(before)
    assert matrix_work(after) == matrix_work(before)
    assert after.flops == pytest.approx(before.flops)
    assert after.order == before.order


@pytest.mark.parametrize("name", MODELS)
def test_never_slower_on_the_device_nor_larger(name):
    device = devices.get("h200")
    before, after = predict(eager(name), device), predict(fuse(eager(name)), device)
    assert after.kernel_s <= before.kernel_s
    assert after.host_s <= before.host_s
    assert after.peak_bytes <= 1.02 * before.peak_bytes


@pytest.mark.parametrize("precision", ["fp32", "bf16", "amp_fp16"])
def test_every_precision(precision):
    before = eager("llama3.2-1b", precision)
    after = fuse(before)
    assert matrix_work(after) == matrix_work(before)
    assert moved(after) < moved(before)


def test_a_fused_workload_survives_a_file(tmp_path):
    workload = fuse(eager("resnet18"))
    workload.save(tmp_path / "w.json")
    again = Workload.load(tmp_path / "w.json")
    assert again.to_dict() == workload.to_dict()
    assert again.options["compiled"]


def test_a_saved_eager_workload_can_be_fused(tmp_path):
    eager("gpt2-124m").save(tmp_path / "w.json")
    assert fuse(Workload.load(tmp_path / "w.json")).to_dict() == fuse(eager("gpt2-124m")).to_dict()


def test_fusing_twice_is_refused():
    with pytest.raises(SpecError, match="already fused"):
        fuse(fuse(eager("resnet18")))


def test_folding_does_not_change_what_is_fused():
    options = {"batch": 1, "seq": 128, "precision": "bf16"}
    folded = pl.capture("gpt2-124m", compile=True, **options)
    unfolded = pl.capture("gpt2-124m", compile=True, fold=False, **options)
    # across blocks the unfolded step may fuse a little more: a residual sum with the norm of the next block
    assert len(ops(unfolded)) <= len(ops(folded)) <= 1.25 * len(ops(unfolded))
    assert matrix_work(folded) == matrix_work(unfolded)


def test_pointwise_between_products_is_one_kernel():
    module = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
    assert forms(module, torch.empty(64, 256)) == ["gemm", "pointwise", "gemm"]
    # gradient of the last product's operand, GELU's gradient, the two weights' and two biases' gradients
    assert Counter(forms(module, torch.empty(64, 256), phase="backward")) == Counter(
        gemm=3, pointwise=2, column=2
    )


def test_activation_is_recomputed_from_the_product_that_is_saved_anyway():
    class Tanh(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False)

        def forward(self, x):
            y = self.first(x)
            return self.last(0.5 * y * (1 + torch.tanh(0.8 * (y + 0.04 * y**3))))

    ((_, forward),) = [k for k in fused(Tanh(), torch.empty(64, 256)) if k[0] == "pointwise"]
    assert (forward.bytes_read, forward.bytes_written) == (64 * 512 * 4, 64 * 512 * 4)
    backward = [
        op
        for form, op in fused(Tanh(), torch.empty(64, 256), phase="backward")
        if form == "pointwise" and op.dims[0] == 64 * 512
    ]
    assert [(op.bytes_read, op.bytes_written) for op in backward] == [(2 * 64 * 512 * 4, 64 * 512 * 4)]


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.last = (
            nn.Linear(256, 256, bias=False),
            nn.LayerNorm(256),
            nn.Linear(256, 256, bias=False),
        )

    def forward(self, x):
        return self.last(self.norm(x + self.inner(x)))


def test_residual_and_layer_norm_are_one_kernel():
    assert forms(Residual(), torch.empty(64, 256)) == ["gemm", "row", "gemm"]
    _, norm = fused(Residual(), torch.empty(64, 256))[1]
    assert norm.name == "fused.add_native_layer_norm"
    assert norm.dims[:2] == (64 * 256, 64)


def test_batch_norm_needs_its_sums_first():
    module = nn.Sequential(
        nn.Conv2d(8, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3, bias=False)
    )
    # less the counter of batches seen
    found = [k for k in fused(module, torch.empty(16, 8, 34, 34)) if k[1].dims[0] > 1]
    assert [form for form, _ in found] == ["conv", "column", "pointwise", "conv"]
    sums, normalise = found[1][1], found[2][1]
    image = 16 * 16 * 32 * 32 * 4
    assert sums.bytes_written < 0.01 * image
    assert normalise.bytes_read == pytest.approx(image, rel=0.01)
    assert normalise.bytes_written == image


def test_dropout_keeps_its_mask_only():
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)

        def forward(self, x):
            return self.last(torch.dropout(self.first(x), 0.1, True))

    _, dropout = fused(Dropped(), torch.empty(64, 256))[1]
    assert dropout.bytes_written == 64 * 256 * (4 + 1)


def test_ragged_products_are_padded():
    module = nn.Linear(1024, 1001, bias=False)
    found = fused(module, torch.empty(2048, 1024), precision="bf16")
    assert [form for form, _ in found if form != "row"][:2] == ["pointwise", "gemm"]
    product = next(op for form, op in found if form == "gemm")
    assert product.dims == (1, 2048, 1008, 1024)
    assert product.flops == 2 * 2048 * 1001 * 1024


def test_model_code_sees_that_it_is_compiled():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x):
            return self.layer(x) if torch.compiler.is_compiling() else self.layer(self.layer(x))

    assert Counter(forms(Branch(), torch.empty(8, 64)))["gemm"] == 1


@pytest.mark.parametrize("checkpointing", [False, True])
def test_checkpointing_and_fusing_go_together(checkpointing):
    workload = pl.capture(
        "gpt2-124m", batch=1, seq=256, precision="bf16", checkpointing=checkpointing, compile=True
    )
    assert any(op.phase == "recompute" for op in ops(workload)) == checkpointing
    assert predict(workload, devices.get("h200")).step_s > 0
