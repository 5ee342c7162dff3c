"""The model catalog: exact counts, training steps on the meta device, names, and other implementations."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from typing import Any

import pytest

from paceline.catalog import models
from paceline.errors import SpecError, UnknownName

torch = pytest.importorskip("torch", reason="building models needs torch")

NAMES = models.names()
REQUIRED = """
alexnet vgg16 googlenet inception_v3 resnet18 resnet34 resnet50 resnet101 resnet152 mobilenet_v2 vit_b_16
vit_l_16 lstm-1500 lstm-650 transformer-base transformer-big bert-base bert-large gpt2-124m gpt2-355m
gpt2-774m gpt2-1.5b gpt3-125m gpt3-350m gpt3-760m gpt3-1.3b gpt3-2.7b gpt3-6.7b gpt3-13b gpt3-175b
llama2-7b llama2-13b llama2-70b llama3-8b llama3-70b llama3-405b llama3.2-1b llama3.2-3b mixtral-8x7b dlrm
dlrm-small""".split()
VISION = [name for name in NAMES if models.get(name).image is not None]

# What papers say, where a paper gives a count.
PUBLISHED = {
    "alexnet": 60e6,
    "vgg16": 138e6,
    "resnet50": 25.6e6,
    "mobilenet_v2": 3.4e6,
    "vit_b_16": 86e6,
    "vit_l_16": 307e6,
    "transformer-base": 65e6,
    "transformer-big": 213e6,
    "bert-base": 110e6,
    "bert-large": 340e6,
    "gpt3-125m": 125e6,
    "gpt3-350m": 350e6,
    "gpt3-760m": 760e6,
    "gpt3-1.3b": 1.3e9,
    "gpt3-2.7b": 2.7e9,
    "gpt3-6.7b": 6.7e9,
    "gpt3-13b": 13e9,
    "gpt3-175b": 175e9,
    "llama2-7b": 6.7e9,
    "llama2-13b": 13e9,
    "llama2-70b": 69e9,
    "llama3-405b": 405e9,
    "mixtral-8x7b": 47e9,
    "dlrm": 24e9,
}


def count(module: Any) -> int:
    """Parameters of a module, tied ones once."""
    return sum(p.numel() for p in module.parameters())


def built(name: str, **sizes: Any) -> Any:
    """A catalog model at batch 2, with a short sequence where it has one."""
    entry = models.get(name)
    return models.build(entry, batch=2, **({"seq": 16} if entry.seq else {}), **sizes)


def class_loss(scores: Any) -> Any:
    """What a loss of None stands for."""
    labels = torch.zeros(scores.shape[0], dtype=torch.int64, device=scores.device)
    return torch.nn.functional.cross_entropy(scores, labels)


def flops(module: Any, *inputs: Any) -> int:
    """Operations of a forward pass, as torch counts them."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        module(*inputs)
    return counter.get_total_flops()


@pytest.fixture(scope="module")
def torchvision() -> Any:
    """torchvision; where its compiled operators do not load, with two of them declared by hand."""
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    try:
        return importlib.import_module("torchvision")
    except (RuntimeError, ImportError):
        for loaded in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
            del sys.modules[loaded]
        for op in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{op}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
    try:
        return importlib.import_module("torchvision")
    except (RuntimeError, ImportError) as error:
        pytest.skip(f"torchvision does not load with this torch: {error}")


@pytest.fixture(scope="module")
def transformers(request: pytest.FixtureRequest) -> Any:
    """transformers; it may load torchvision, so that one is settled first."""
    if importlib.util.find_spec("torchvision") is not None:
        request.getfixturevalue("torchvision")
    return pytest.importorskip("transformers", reason="counts are compared with those of transformers")


def test_every_promised_model_is_there() -> None:
    assert not set(REQUIRED) - set(NAMES)
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.parametrize("name", NAMES)
def test_entry_is_complete(name: str) -> None:
    entry = models.get(name)
    assert entry.family in {
        "cnn",
        "vit",
        "rnn",
        "encoder",
        "decoder",
        "encoder-decoder",
        "moe",
        "recommender",
    }
    sequences = "tokens" if entry.seq else "samples"
    assert entry.unit == ("images" if entry.image else sequences)
    assert entry.optimizer in {"sgd", "adamw"}
    assert entry.title and "count of" in entry.source
    hash(entry)


@pytest.mark.parametrize("name", NAMES)
def test_count_is_exact(name: str) -> None:
    module, inputs, _ = models.build(models.get(name), batch=2)
    assert count(module) == models.get(name).parameters
    assert all(t.is_meta for t in (*inputs, *module.parameters(), *module.buffers()))


@pytest.mark.parametrize("name", PUBLISHED)
def test_count_is_near_the_published_one(name: str) -> None:
    assert models.get(name).parameters == pytest.approx(PUBLISHED[name], rel=0.035)


@pytest.mark.parametrize("name", NAMES)
def test_training_step_on_meta(name: str) -> None:
    """No entry is left out, nn.LSTM included; of more than 12 like blocks (see below), 12 run, to save
    time.
    """
    module, inputs, loss_fn = built(name)
    if isinstance(getattr(module, "blocks", None), torch.nn.ModuleList):
        module.blocks = module.blocks[:12]
    loss = (loss_fn or class_loss)(module(*inputs))
    assert loss.shape == () and loss.is_meta
    loss.backward()
    assert [n for n, p in module.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("name", NAMES)
def test_repeated_blocks_are_alike(name: str) -> None:
    """Blocks of a list have the same parameters, so that a capture may fold them."""
    module, _, _ = built(name)
    for label in ("blocks", "encoder", "decoder"):
        blocks = getattr(module, label, None)
        if isinstance(blocks, torch.nn.ModuleList):
            shapes = {tuple((n, p.shape) for n, p in block.named_parameters()) for block in blocks}
            assert len(shapes) == 1
            assert not [b for block in blocks for b in block.buffers()]


@pytest.mark.parametrize(
    ("build", "options"),
    [
        ("rnn:lstm_lm", {"width": 8, "vocab": 11}),
        ("seq2seq:transformer", {"width": 16, "depth": 2, "heads": 2, "inner": 32, "vocab": 11}),
        ("bert:bert", {"width": 16, "depth": 2, "heads": 2, "vocab": 11}),
        ("gpt:gpt", {"width": 16, "depth": 2, "heads": 2, "vocab": 11, "p": 0.1}),
        ("llama:llama", {"width": 16, "depth": 2, "heads": 4, "kv_heads": 2, "inner": 24, "vocab": 11}),
        ("moe:mixtral", {"width": 16, "depth": 2, "heads": 4, "kv_heads": 2, "inner": 24, "vocab": 11}),
    ],
)
def test_small_language_models_run_for_real(build: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module, function = build.split(":")
    net, inputs, loss_fn = getattr(importlib.import_module(f"{models.__name__}.{module}"), function)(
        batch=2, seq=7, **options
    )
    loss = loss_fn(net(*inputs))
    loss.backward()
    assert bool(loss.isfinite()) and loss.item() > 0
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in net.parameters())


@pytest.mark.parametrize(("name", "weight", "extra"), [("googlenet", 0.3, 2), ("inception_v3", 0.4, 1)])
def test_auxiliary_classifiers(name: str, weight: float, extra: int) -> None:
    module, inputs, _ = built(name)
    assert len(module(*inputs)) == 1 + extra
    assert module.eval()(*inputs).shape == (2, 1000)
    _, _, loss_fn = built(name, device="cpu")
    scores = torch.randn(2, 1000)
    assert loss_fn is not None
    assert loss_fn((scores,) * (1 + extra)).item() == pytest.approx(
        (1 + extra * weight) * loss_fn(scores).item()
    )


def test_causal_models_do_not_look_ahead() -> None:
    from paceline.catalog.models import gpt, llama, seq2seq

    torch.manual_seed(0)
    for make in (gpt.gpt, llama.llama, seq2seq.transformer):
        net, inputs, _ = make(batch=1, seq=6, width=16, depth=2, heads=2, vocab=11)
        changed = inputs[-1].clone()
        changed[0, 4] = 5
        net.eval()
        before, after = net(*inputs), net(*inputs[:-1], changed)
        torch.testing.assert_close(before[:, :4], after[:, :4])
        assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_sizes_follow_the_request() -> None:
    module, (x,), _ = models.build(models.get("vit_b_16"), batch=3, image=384)
    assert module(x).shape == (3, 1000) and x.shape == (3, 3, 384, 384)
    module, (ids,), _ = models.build(models.get("llama3.2-1b"), batch=3, seq=10)
    assert module(ids).shape == (3, 10, 128_256)
    module, (dense, ids), _ = models.build(models.get("dlrm"), batch=5)
    assert module(dense, ids).shape == (5,)


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("resnet50", {"seq": 128}, "takes no seq"),
        ("gpt2", {"image": 224}, "takes no image"),
        ("gpt2", {"seq": 2048}, "1024 learned positions"),
        ("bert-base", {"seq": 513}, "512 learned positions"),
        ("vit_b_16", {"image": 225}, "multiple of 16"),
        ("inception_v3", {"image": 224}, "299 or more"),
        ("resnet50", {"image": 0}, "whole number of 1 or more"),
    ],
)
def test_impossible_sizes_are_refused(name: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        models.build(models.get(name), batch=2, **sizes)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("ResNet-50", "resnet50"),
        ("inception-v3", "inception_v3"),
        ("VIT_B-16", "vit_b_16"),
        ("vit-b/16", "vit_b_16"),
        ("GPT2", "gpt2-124m"),
        ("gpt2_xl", "gpt2-1.5b"),
        ("gpt3", "gpt3-175b"),
        ("Llama-2-7B", "llama2-7b"),
        ("llama 3.1 405b", "llama3-405b"),
        ("BERT_large", "bert-large"),
        ("Mixtral", "mixtral-8x7b"),
        ("DLRM", "dlrm"),
    ],
)
def test_names_fold(given: str, name: str) -> None:
    assert models.get(given) is models.get(name)
    assert models.get(name).name == name


def test_no_two_names_fold_alike() -> None:
    every = [alias for n in NAMES for alias in (n, *models.get(n).aliases)]
    assert len(models._by_name()) == len(every)


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("resnet51", "resnet50"),
        ("lama2-7b", "llama2-7b"),
        ("bert-bas", "bert-base"),
        ("mobilenet", "mobilenet_v2"),
    ],
)
def test_unknown_name_suggests_the_nearest(wrong: str, nearest: str) -> None:
    with pytest.raises(UnknownName, match="unknown model") as caught:
        models.get(wrong)
    assert nearest in caught.value.suggestions


def test_names_need_no_torch() -> None:
    code = (
        "import sys; from paceline.catalog import models; [models.get(n) for n in models.names()]; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", VISION)
def test_torchvision_agrees(name: str, torchvision: Any) -> None:
    """Same count as torchvision's model of that name, and same operations (one model of each kind)."""
    module, inputs, _ = built(name)
    more = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    with torch.device("meta"):
        theirs = torchvision.models.get_model(name, weights=None, **more)
    assert count(theirs) == count(module)
    if name not in ("vgg11", "vgg19", "resnet34", "resnet101", "resnet152", "vit_l_16"):
        assert flops(theirs, *inputs) == flops(module, *inputs)


def same_values(theirs: Any, ours: Any, x: Any) -> None:
    """Copies the parameters in order and compares outputs."""
    pairs = list(zip(theirs.parameters(), ours.parameters(), strict=True))
    with torch.no_grad():
        for source, target in pairs:
            assert source.shape == target.shape
            target.copy_(source)
        theirs, ours = theirs.eval(), ours.eval()
        expect = theirs(x)
        torch.testing.assert_close(ours(x), getattr(expect, "logits", expect), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2"])
def test_torchvision_computes_the_same(name: str, torchvision: Any) -> None:
    torch.manual_seed(0)
    ours, _, _ = models.build(models.get(name), batch=1, device="cpu")
    same_values(torchvision.models.get_model(name, weights=None), ours, torch.randn(1, 3, 64, 64))


def test_transformers_computes_the_same_llama(transformers: Any) -> None:
    from paceline.catalog.models.llama import llama

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=50,
        num_key_value_heads=2,
        intermediate_size=96,
        rms_norm_eps=1e-5,
    )
    ours, _, _ = llama(batch=2, seq=12, width=64, depth=2, heads=4, kv_heads=2, inner=96, vocab=50)
    same_values(transformers.LlamaForCausalLM(config), ours, torch.randint(0, 50, (2, 12)))


HUGGING_FACE = {
    "bert-base": ("Bert", "BertForMaskedLM", {}),
    "bert-large": (
        "Bert",
        "BertForMaskedLM",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    ),
    "gpt2-124m": ("GPT2", "GPT2LMHeadModel", {}),
    "gpt2-355m": ("GPT2", "GPT2LMHeadModel", {"n_embd": 1024, "n_layer": 24, "n_head": 16}),
    "gpt2-774m": ("GPT2", "GPT2LMHeadModel", {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
    "gpt2-1.5b": ("GPT2", "GPT2LMHeadModel", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "mixtral-8x7b": ("Mixtral", "MixtralForCausalLM", {}),
    **{
        name: (
            "Llama",
            "LlamaForCausalLM",
            {
                "hidden_size": o["width"],
                "num_hidden_layers": o["depth"],
                "num_attention_heads": o["heads"],
                "num_key_value_heads": o["kv_heads"],
                "intermediate_size": o["inner"],
                "vocab_size": o.get("vocab", 32_000),
                "tie_word_embeddings": o.get("tied", False),
            },
        )
        for name in NAMES
        if name.startswith("llama") and (o := models.get(name).options)
    },
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_transformers_agrees(name: str, transformers: Any) -> None:
    family, model, options = HUGGING_FACE[name]
    with torch.device("meta"):
        theirs = getattr(transformers, model)(getattr(transformers, f"{family}Config")(**options))
    assert count(theirs) == models.get(name).parameters
