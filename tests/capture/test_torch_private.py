"""One test for each private or fragile torch API that capture stands on; a torch upgrade that moves one fails
here by name.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="capture needs torch")
from torch.nn import functional as F  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from paceline.capture import _torch  # noqa: E402


class Calls(TorchFunctionMode):
    """Names of the torch functions called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def trainable(*shape):
    return torch.empty(*shape, device="meta", requires_grad=True)


def test_next_sequence_is_one_past_the_newest_node():
    before = _torch.next_sequence()
    node = trainable(2).exp().grad_fn
    assert _torch.node_sequence(node) == _torch.next_sequence() - 1 >= before


def test_sequence_of_gradient_accumulation_is_beyond_all_others():
    ((accumulate, _),) = trainable(2).exp().grad_fn.next_functions
    assert _torch.node_sequence(accumulate) >= 1 << 62


def test_running_node_is_that_of_the_forward_operator():
    x = trainable(2)
    y = x.exp()
    seen = []
    y.grad_fn.register_prehook(lambda _: seen.append(_torch.running_node()))
    assert _torch.running_node() is None
    torch.autograd.backward([y.sum()])
    assert _torch.running_node() is None
    assert [_torch.node_sequence(node) for node in seen] == [_torch.node_sequence(y.grad_fn)]


def test_function_modes_are_counted_and_the_engine_runs_hooks_with_none():
    x = trainable(2)
    seen = []
    x.register_hook(lambda _: seen.append(_torch.function_modes()))
    assert _torch.function_modes() == 0
    with Calls():
        assert _torch.function_modes() == 1
        torch.autograd.backward([x.exp().sum()])
    assert seen == [0]


def test_storage_key_is_shared_by_views_only():
    x = torch.empty(4, 4, device="meta")
    assert (
        _torch.storage_key(x)
        == _torch.storage_key(x.t())
        == _torch.storage_key(x[1:])
        == _torch.storage_key(x.detach())
    )
    assert _torch.storage_key(x) != _torch.storage_key(x.clone())


def test_opened_shows_the_calls_inside():
    x, weight = torch.randn(3, 2, 8), torch.randn(24, 8)
    options = {
        "embed_dim_to_check": 8,
        "num_heads": 2,
        "in_proj_weight": weight,
        "in_proj_bias": None,
        "bias_k": None,
        "bias_v": None,
        "add_zero_attn": False,
        "dropout_p": 0.0,
        "out_proj_weight": weight[:8],
        "out_proj_bias": None,
        "need_weights": False,
    }
    with Calls() as closed:
        expected = F.multi_head_attention_forward(x, x, x, **options)[0]
    with Calls() as shown:
        got = _torch.opened(F.multi_head_attention_forward)(x, x, x, **options)[0]
    assert (
        "scaled_dot_product_attention" not in closed.names and "scaled_dot_product_attention" in shown.names
    )
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("function", [torch.relu, torch.nn.Linear, len])
def test_opened_leaves_other_functions(function):
    assert _torch.opened(function) is None


@pytest.mark.parametrize(
    "name", ["max_pool1d", "max_pool2d", "max_pool3d", "adaptive_max_pool2d", "fractional_max_pool2d"]
)
def test_boolean_dispatch_targets(name):
    if_true, if_false, flag, default = _torch.boolean_dispatch_targets()[getattr(F, name)]
    assert (flag, default) == ("return_indices", False)
    assert if_true.__name__ == f"{name}_with_indices" and if_false is not if_true


def test_schemas_tell_views_and_writes():
    seen = {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            schema = func._schema
            alias = schema.returns[0].alias_info
            seen[schema.name] = (alias is not None and not alias.is_write, schema.is_mutable)
            return func(*args, **(kwargs or {}))

    x = torch.empty(4, 4, device="meta")
    with Watch():
        x.t().exp().relu_()
    assert seen == {"aten::t": (True, False), "aten::exp": (False, False), "aten::relu_": (False, True)}


def test_checkpoint_recomputes_when_saved_tensors_are_asked_for():
    """Folding under checkpointing rests on it."""
    runs = []

    def body(x):
        runs.append(_torch.running_node() is not None)
        return x.exp()

    y = torch.utils.checkpoint.checkpoint(
        body, trainable(2), use_reentrant=False, preserve_rng_state=False, determinism_check="none"
    )
    torch.autograd.backward([y.sum()])
    assert runs == [False, True]


COMPILER = """
import sys, torch
from paceline.capture import _torch
x = torch.empty(4, device="meta")
with _torch.without_compiler():
    torch.ops.aten.add.Tensor(x, x), x.normal_(), torch.nn.init.normal_(x)
    early = [name for name in sys.modules if name.startswith("torch._dynamo")]
    {inside}
print(
    early,
    "torch._dynamo" in sys.modules,
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item(),
)
"""


@pytest.mark.parametrize(
    ("inside", "loaded"),
    [
        ("", False),
        ("import torch._dynamo.config as c; c.verbose", True),
        ("from torch._dynamo import is_compiling", True),
        ("import torch._dynamo.testing; torch._dynamo.testing, torch._dynamo.reset()", True),
    ],
)
def test_without_compiler(inside, loaded):
    """Meta kernels do not import the compiler; who wants it gets the real one, within and after."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILER.format(inside=inside)], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"['torch._dynamo'] {loaded} 2.0\n"


def test_compiling_is_seen_by_model_code():
    assert not torch.compiler.is_compiling()
    with _torch.compiling():
        assert torch.compiler.is_compiling()
    assert not torch.compiler.is_compiling()


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed")
def test_torchvision_imports_beside_any_build():
    assert "resnet50" in _torch.import_torchvision().models.list_models()


def test_torchvision_is_importable_by_others_too():
    finders = list(sys.meta_path)
    with _torch.torchvision_importable():
        assert sys.meta_path[1:] == finders
        assert importlib.util.find_spec("torchvision_of_nobody") is None
    assert sys.meta_path == finders


def test_compiling_is_what_model_code_sees():
    with _torch.compiling():
        assert torch.compiler.is_compiling()
    assert not torch.compiler.is_compiling()


def test_the_compiler_is_loaded():
    _torch.compiler_loaded()
    assert "torch._dynamo" in sys.modules


def test_checkpoint_begun_ends_at_the_next_step():
    weight = torch.ones(2, requires_grad=True)
    runs = []

    def twice(x):
        runs.append(x)
        return (x * weight).exp()

    options = {"preserve_rng_state": True, "determinism_check": "default"}
    contexts = torch.utils.checkpoint.noop_context_fn
    x = torch.ones(2)
    begun = _torch.checkpoint_begun(twice, contexts, options, (x,), {})
    y = (x * weight).exp()
    assert next(begun, "over") == "over" and not runs
    y.sum().backward()
    assert len(runs) == 1 and torch.equal(weight.grad, y.detach())


def test_each_wrapper_has_a_test():
    wrappers = [
        name
        for name, value in vars(_torch).items()
        if getattr(value, "__module__", "") == _torch.__name__ and not name.startswith("_")
    ]
    tested = Path(__file__).read_text(encoding="utf-8")
    assert wrappers and [name for name in wrappers if f"_torch.{name}(" not in tested] == []
