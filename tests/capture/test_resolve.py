"""What a user may call a model: files of their own, configurations, names; and what is said when it does not
work.
"""

import json

import pytest

torch = pytest.importorskip("torch", reason="capture needs torch")

import paceline as pl  # noqa: E402
from paceline.errors import CaptureError, SpecError, UnknownName  # noqa: E402

SOURCE = """\
import torch
from torch import nn
from beside import WIDTH


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.deeper(x)

    def deeper(self, x):
        return self.inner(x[:, :3])  # too narrow


class Asking(nn.Module):
    def forward(self, x):
        return x if x.sum().item() > 0 else -x


def two(batch):
    return nn.Linear(WIDTH, 4), torch.randn(batch, WIDTH)

def three(batch, seq=5):
    return nn.Linear(WIDTH, 4), (torch.randn(batch, seq, WIDTH),), lambda y: y.square().sum()

def named(**sizes):
    return nn.Linear(WIDTH, 4), {"input": torch.randn(sizes["batch"], WIDTH)}

def fixed():
    return nn.Linear(WIDTH, 4), [torch.randn(2, WIDTH)]

def large(batch):
    return nn.Linear(1 << 20, 1 << 20), torch.empty(batch, 1 << 20)

def failing(batch):
    return Failing(), torch.randn(batch, WIDTH)

def asking(batch):
    return Asking(), torch.randn(batch, WIDTH, requires_grad=True)

def raising(batch):
    return {}["absent"]

def wrong(batch):
    return nn.Linear(WIDTH, 4)

def demanding(batch, colour):
    return two(batch)
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "beside.py").write_text("WIDTH = 6\n")
    path = tmp_path / "net.py"
    path.write_text(SOURCE)
    return path


def forward_products(workload):
    return [
        op.dims
        for index in workload.order
        for op in workload.segments[index].ops
        if op.kind == "gemm" and op.phase == "forward"
    ]


@pytest.mark.parametrize(
    ("function", "sizes", "rows"),
    [
        ("two", {"batch": 7}, 7),
        ("three", {"batch": 3}, 15),
        ("three", {"batch": 3, "seq": 4}, 12),
        ("named", {"batch": 9, "seq": 2}, 9),
        ("fixed", {"batch": 9}, 2),
        ("two", {}, 1),
    ],
)
def test_build_function(file, function, sizes, rows):
    workload = pl.capture(f"{file}:{function}", **sizes)
    assert forward_products(workload) == [(1, rows, 4, 6)]
    assert (workload.batch, workload.unit, workload.units_per_step) == (
        sizes.get("batch", 1),
        "samples",
        sizes.get("batch", 1),
    )


def test_build_allocates_no_large_tensor(file):
    assert pl.capture(f"{file}:large").parameter_count == 2**40 + 2**20


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (
            "failing",
            CaptureError,
            (
                r"failing: forward pass raised RuntimeError: .*\n.*net.py:12 in forward: .*\n.*net.py:15 in"
                r" deeper: .*# too narrow$"
            ),
        ),
        (
            "asking",
            CaptureError,
            r"forward pass: the model asks for the value of a tensor.*\n.*net.py:20 in forward",
        ),
        ("raising", CaptureError, r"net.py:raising: build raised KeyError: 'absent'\n.*in raising"),
        ("demanding", CaptureError, r"build raised TypeError: .*colour"),
        (
            "wrong",
            SpecError,
            r"net.py:wrong: expected \(module, inputs\) or \(module, inputs, loss_fn\), got Linear$",
        ),
        ("tow", UnknownName, r"unknown function in .*net.py 'tow'; did you mean 'two'"),
        ("", SpecError, r"name the function that builds the model, as in .*net.py:build"),
    ],
)
def test_what_goes_wrong_in_a_file(file, function, kind, message):
    with pytest.raises(kind, match=message) as caught:
        pl.capture(f"{file}:{function}", batch=2)
    text = str(caught.value)
    assert "site-packages" not in text and "paceline/capture" not in text and text.count("\n") <= 3


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "import no_such_module\n",
            r"import raised ModuleNotFoundError: No module named 'no_such_module'\n.*net.py:1 in <module>",
        ),
        ("def build(:\n", r"import raised SyntaxError: .*line 1"),
    ],
)
def test_file_that_does_not_import(file, source, message):
    file.write_text(source)
    with pytest.raises(CaptureError, match=message):
        pl.capture(f"{file}:build")


def test_absent_file():
    with pytest.raises(SpecError, match="no file 'absent.py'; give FILE.py:FUNCTION"):
        pl.capture("absent.py:build")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"batch": 0}, "batch must be a whole number of 1 or more, got 0"),
        ({"batch": -4}, "got -4"),
        ({"seq": 0}, "seq must be a whole number of 1 or more, got 0"),
        ({"image": -1}, "image must be a whole number of 1 or more"),
        ({"image": 64}, "gpt2-124m takes no image"),
    ],
)
def test_bad_sizes(sizes, message):
    with pytest.raises(SpecError, match=message):
        pl.capture("gpt2", **sizes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "bf61"}, "unknown precision 'bf61'; did you mean 'bf16'"),
        ({"optimizer": "adan"}, "unknown optimizer 'adan'; did you mean 'adam'"),
    ],
)
def test_unknown_settings(options, message):
    with pytest.raises(UnknownName, match=message):
        pl.capture("resnet18", **options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"not valid JSON: line 1 column 2"),
        ("[]", "no model_type"),
        (None, "cannot read"),
        ('{"model_type": "lama"}', "unknown model_type 'lama'; did you mean"),
    ],
)
def test_bad_configuration(tmp_path, text, message):
    if text and "lama" in text:
        pytest.importorskip("transformers", reason="knowing model types needs transformers")
    if text:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(SpecError, match=message):
        pl.capture(f"hf:{tmp_path}")


def test_configuration_of_transformers(tmp_path):
    pytest.importorskip("transformers", reason="building the model needs transformers")
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes})
    )
    workload = pl.capture(f"hf:{tmp_path}/config.json", batch=2, seq=32, precision="bf16")
    block = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    assert workload.parameter_count == 6 * block + 2 * 100 * 64 + 64
    assert (workload.unit, workload.units_per_step) == ("tokens", 64)
    assert {
        op.dtype
        for i in workload.order
        for op in workload.segments[i].ops
        if op.kind in ("gemm", "attention")
    } == {"bf16"}


def test_torchvision_names():
    pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError), reason="needs torchvision")
    ours, theirs = (pl.capture(name, batch=2, image=64) for name in ("resnet18", "torchvision:resnet18"))
    assert (ours.flops, ours.parameter_count, ours.optimizer) == (
        theirs.flops,
        theirs.parameter_count,
        theirs.optimizer,
    )
    with pytest.raises(UnknownName, match="unknown torchvision model 'resnet81'; did you mean"):
        pl.capture("torchvision:resnet81")
