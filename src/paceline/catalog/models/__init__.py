"""Named models in plain PyTorch, whose parameter counts match their published or reference counts.

`names` and `get` need no torch; `build` imports it, and makes a module with the inputs and the loss
of one training step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import MissingExtra, SpecError, UnknownName
from paceline.spec import checks

if TYPE_CHECKING:
    from .layers import Built


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model of the catalog: what it is, how large, and what builds it."""

    name: str
    title: str
    family: str  # cnn, vit, rnn, encoder, decoder, encoder-decoder, moe or recommender
    parameters: int  # tied ones once; `source` says whose count it is
    source: str  # paper, and the reference whose count `parameters` is
    unit: str  # what throughput counts: images, tokens or samples
    build: str  # "module:function" of this package
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)  # keyword arguments of that function
    image: int | None = None  # default side of the square images
    seq: int | None = None  # default sequence length
    optimizer: str = "sgd"  # what it is usually trained with
    aliases: tuple[str, ...] = ()


def names() -> list[str]:
    """Names of the catalog's models, by family and size."""
    return [entry.name for entry in _ENTRIES]


def get(name: str) -> ModelEntry:
    """The model called `name`, or by an alias; case, "-", "_" and spaces do not matter."""
    found = _by_name().get(fold(name))
    if found is None:
        known = [known for entry in _ENTRIES for known in (entry.name, *entry.aliases)]
        hint = "`paceline models` lists all"
        if (Path(name) / "config.json").is_file():
            hint = f"a folder with a Hugging Face configuration is named hf:{name}"
        elif Path(name).name == "config.json" and Path(name).is_file():
            hint = f"a Hugging Face configuration is named hf:{name}"
        raise UnknownName("model", name, known, hint)
    return found


def build(
    entry: ModelEntry, *, batch: int, seq: int | None = None, image: int | None = None, device: str = "meta"
) -> Built:
    """The module of `entry`, the inputs of one step, and its loss (None: cross-entropy of class scores).

    Sizes default to the entry's. On the meta device, the default, nothing is allocated.
    """
    for label, given, default in (("seq", seq, entry.seq), ("image", image, entry.image)):
        if given is not None and default is None:
            raise SpecError(f"{entry.name} takes no {label}; got {label}={given}, leave it out")
    for label, size in (("batch", batch), ("seq", seq), ("image", image)):
        if size is not None:
            checks.whole(label, size)
    try:
        import torch
    except ImportError as error:
        raise MissingExtra("torch", "torch", f"building {entry.name}") from error
    sizes = {"seq": entry.seq if seq is None else seq, "image": entry.image if image is None else image}
    module, _, function = entry.build.partition(":")
    make = getattr(import_module(f"{__name__}.{module}"), function)
    with torch.device(device):
        built: Built = make(batch=batch, **{k: v for k, v in sizes.items() if v is not None}, **entry.options)
    return built


def fold(name: str) -> str:
    """A name without what does not matter in it."""
    return name.lower().translate({ord(c): None for c in "-_ "})


@cache
def _by_name() -> dict[str, ModelEntry]:
    """Folded name or alias -> entry."""
    return {fold(name): entry for entry in _ENTRIES for name in (entry.name, *entry.aliases)}


def _cnn(
    name: str,
    title: str,
    parameters: int,
    paper: str,
    build: str,
    *aliases: str,
    image: int = 224,
    **options: Any,
) -> ModelEntry:
    return ModelEntry(
        name=name,
        title=title,
        family="cnn",
        parameters=parameters,
        unit="images",
        build=build,
        source=f"{paper}; count of torchvision",
        image=image,
        options=options,
        aliases=aliases,
    )


def _lm(
    name: str,
    title: str,
    parameters: int,
    source: str,
    build: str,
    seq: int,
    *aliases: str,
    family: str = "decoder",
    **options: Any,
) -> ModelEntry:
    return ModelEntry(
        name=name,
        title=title,
        family=family,
        parameters=parameters,
        source=source,
        unit="tokens",
        build=build,
        seq=seq,
        options=options,
        optimizer="adamw",
        aliases=aliases,
    )


def _gpt2(name: str, parameters: int, width: int, depth: int, heads: int, *aliases: str) -> ModelEntry:
    source = "Radford et al. 2019; count of the released weights, as in transformers"
    return _lm(
        name,
        f"GPT-2 {name[5:].upper()}",
        parameters,
        source,
        "gpt:gpt",
        1024,
        *aliases,
        width=width,
        depth=depth,
        heads=heads,
        context=1024,
        p=0.1,
    )


def _gpt3(
    size: str, parameters: int, width: int, depth: int, heads: int, *aliases: str, note: str = ""
) -> ModelEntry:
    source = f"Brown et al. 2020, table 2.1, which says {size.upper()}{note}; count of this implementation"
    return _lm(
        f"gpt3-{size}",
        f"GPT-3 {size.upper()}",
        parameters,
        source,
        "gpt:gpt",
        2048,
        *aliases,
        width=width,
        depth=depth,
        heads=heads,
        context=2048,
        p=0.0,
    )


_LLAMA2 = "Touvron et al. 2023 (Llama 2); count of the released weights, as in transformers"
_LLAMA3 = "Llama team 2024 (The Llama 3 herd of models); count of the released weights, as in transformers"
_LLAMA32 = "Meta 2024 (Llama 3.2); count of the released weights, as in transformers"


def _llama2(
    size: str, parameters: int, width: int, depth: int, heads: int, kv_heads: int, inner: int
) -> ModelEntry:
    return _lm(
        f"llama2-{size}",
        f"Llama 2 {size.upper()}",
        parameters,
        _LLAMA2,
        "llama:llama",
        4096,
        width=width,
        depth=depth,
        heads=heads,
        kv_heads=kv_heads,
        inner=inner,
    )


def _llama3(
    version: str,
    size: str,
    parameters: int,
    width: int,
    depth: int,
    heads: int,
    inner: int,
    *aliases: str,
    source: str = _LLAMA3,
    tied: bool = False,
) -> ModelEntry:
    name = "llama3.2" if version == "3.2" else "llama3"
    return _lm(
        f"{name}-{size}",
        f"Llama {version} {size.upper()}",
        parameters,
        source,
        "llama:llama",
        8192,
        *aliases,
        width=width,
        depth=depth,
        heads=heads,
        kv_heads=8,
        inner=inner,
        vocab=128_256,
        theta=500_000.0,
        tied=tied,
    )


_ALEXNET = "Krizhevsky et al. 2012, one-tower form of Krizhevsky 2014"
_VGG = "Simonyan and Zisserman 2014"
_RESNET = "He et al. 2015"
_VIT = "Dosovitskiy et al. 2020; count of torchvision"
_LSTM = "Zaremba et al. 2014"
_LSTM_BIAS = "count of this implementation, with the two bias vectors of nn.LSTM"
_VASWANI = "Vaswani et al. 2017, table 3, which says"
_VASWANI_COUNT = (
    "count of this implementation, with 37,000 shared tokens and no attention biases; no one vocabulary "
    "gives both of the paper's figures"
)
_BERT = "count of transformers' BertForMaskedLM (no pooler)"

_ENTRIES: tuple[ModelEntry, ...] = (
    _cnn("alexnet", "AlexNet", 61_100_840, _ALEXNET, "cnn:alexnet"),
    _cnn("vgg11", "VGG-11", 132_863_336, _VGG, "cnn:vgg", stages=(1, 1, 2, 2, 2)),
    _cnn("vgg16", "VGG-16", 138_357_544, _VGG, "cnn:vgg", "vgg", stages=(2, 2, 3, 3, 3)),
    _cnn("vgg19", "VGG-19", 143_667_240, _VGG, "cnn:vgg", stages=(2, 2, 4, 4, 4)),
    _cnn(
        "googlenet",
        "GoogLeNet with batch norm",
        13_004_888,
        "Szegedy et al. 2014, auxiliary classifiers included",
        "inception:googlenet",
        "inception_v1",
    ),
    _cnn(
        "inception_v3",
        "Inception v3",
        27_161_264,
        "Szegedy et al. 2015, auxiliary classifier included",
        "inception:inception_v3",
        image=299,
    ),
    _cnn("resnet18", "ResNet-18", 11_689_512, _RESNET, "cnn:resnet", layers=(2, 2, 2, 2), bottleneck=False),
    _cnn("resnet34", "ResNet-34", 21_797_672, _RESNET, "cnn:resnet", layers=(3, 4, 6, 3), bottleneck=False),
    _cnn(
        "resnet50", "ResNet-50 v1.5", 25_557_032, _RESNET, "cnn:resnet", "resnet50_v1.5", layers=(3, 4, 6, 3)
    ),
    _cnn("resnet101", "ResNet-101 v1.5", 44_549_160, _RESNET, "cnn:resnet", layers=(3, 4, 23, 3)),
    _cnn("resnet152", "ResNet-152 v1.5", 60_192_808, _RESNET, "cnn:resnet", layers=(3, 8, 36, 3)),
    _cnn(
        "resnext50_32x4d",
        "ResNeXt-50 32x4d",
        25_028_904,
        "Xie et al. 2016",
        "cnn:resnet",
        "resnext50",
        layers=(3, 4, 6, 3),
        groups=32,
        group_width=4,
    ),
    _cnn(
        "wide_resnet50_2",
        "Wide ResNet-50-2",
        68_883_240,
        "Zagoruyko and Komodakis 2016",
        "cnn:resnet",
        "wide_resnet50",
        layers=(3, 4, 6, 3),
        group_width=128,
    ),
    _cnn("mobilenet_v2", "MobileNetV2", 3_504_872, "Sandler et al. 2018", "cnn:mobilenet_v2"),
    ModelEntry(
        name="vit_b_16",
        title="ViT-B/16",
        family="vit",
        parameters=86_567_656,
        source=_VIT,
        unit="images",
        build="vit:vit",
        options={"width": 768, "depth": 12, "heads": 12},
        image=224,
        optimizer="adamw",
        aliases=("vit-base", "vit-b/16"),
    ),
    ModelEntry(
        name="vit_l_16",
        title="ViT-L/16",
        family="vit",
        parameters=304_326_632,
        source=_VIT,
        unit="images",
        build="vit:vit",
        options={"width": 1024, "depth": 24, "heads": 16},
        image=224,
        optimizer="adamw",
        aliases=("vit-large", "vit-l/16"),
    ),
    ModelEntry(
        name="lstm-650",
        title="LSTM language model, medium (2 x 650)",
        family="rnn",
        parameters=19_780_400,
        source=f"{_LSTM}; {_LSTM_BIAS}",
        unit="tokens",
        build="rnn:lstm_lm",
        options={"width": 650, "p": 0.5},
        seq=35,
        aliases=("lstm-medium",),
    ),
    ModelEntry(
        name="lstm-1500",
        title="LSTM language model, large (2 x 1500)",
        family="rnn",
        parameters=66_034_000,
        source=f"{_LSTM}; {_LSTM_BIAS}",
        unit="tokens",
        build="rnn:lstm_lm",
        options={"width": 1500, "p": 0.65},
        seq=35,
        aliases=("lstm", "lstm-large"),
    ),
    _lm(
        "transformer-base",
        "Transformer base",
        63_045_632,
        f"{_VASWANI} 65M; {_VASWANI_COUNT}",
        "seq2seq:transformer",
        64,
        "transformer",
        family="encoder-decoder",
        width=512,
        heads=8,
        inner=2048,
        p=0.1,
    ),
    _lm(
        "transformer-big",
        "Transformer big",
        214_171_648,
        f"{_VASWANI} 213M; {_VASWANI_COUNT}",
        "seq2seq:transformer",
        64,
        family="encoder-decoder",
        width=1024,
        heads=16,
        inner=4096,
        p=0.3,
    ),
    _lm(
        "bert-base",
        "BERT base",
        109_514_298,
        f"Devlin et al. 2018, which says 110M; {_BERT}",
        "bert:bert",
        512,
        "bert",
        "bert-base-uncased",
        family="encoder",
        width=768,
        depth=12,
        heads=12,
    ),
    _lm(
        "bert-large",
        "BERT large",
        335_174_458,
        f"Devlin et al. 2018, which says 340M; {_BERT}",
        "bert:bert",
        512,
        "bert-large-uncased",
        family="encoder",
        width=1024,
        depth=24,
        heads=16,
    ),
    _gpt2("gpt2-124m", 124_439_808, 768, 12, 12, "gpt2", "gpt2-small"),
    _gpt2("gpt2-355m", 354_823_168, 1024, 24, 16, "gpt2-medium"),
    _gpt2("gpt2-774m", 774_030_080, 1280, 36, 20, "gpt2-large"),
    _gpt2("gpt2-1.5b", 1_557_611_200, 1600, 48, 25, "gpt2-xl"),
    _gpt3("125m", 125_226_240, 768, 12, 12, "gpt3-small"),
    _gpt3("350m", 355_871_744, 1024, 24, 16, "gpt3-medium"),
    _gpt3("760m", 760_300_032, 1536, 24, 16, "gpt3-large"),
    _gpt3(
        "1.3b",
        1_315_723_264,
        2048,
        24,
        16,
        "gpt3-xl",
        note=" (16 heads of 128: the table's 24 would not make its width of 2048)",
    ),
    _gpt3("2.7b", 2_651_553_280, 2560, 32, 32),
    _gpt3("6.7b", 6_658_404_352, 4096, 32, 32),
    _gpt3("13b", 12_853_386_240, 5120, 40, 40, note=" (width 5120: the table's 5140 is not 40 heads of 128)"),
    _gpt3("175b", 174_604_259_328, 12_288, 96, 96, "gpt3"),
    _llama2("7b", 6_738_415_616, 4096, 32, 32, 32, 11_008),
    _llama2("13b", 13_015_864_320, 5120, 40, 40, 40, 13_824),
    _llama2("70b", 68_976_648_192, 8192, 80, 64, 8, 28_672),
    _llama3("3", "8b", 8_030_261_248, 4096, 32, 32, 14_336, "llama3.1-8b"),
    _llama3("3", "70b", 70_553_706_496, 8192, 80, 64, 28_672, "llama3.1-70b"),
    _llama3("3.1", "405b", 405_853_388_800, 16_384, 126, 128, 53_248, "llama3.1-405b"),
    _llama3("3.2", "1b", 1_235_814_400, 2048, 16, 32, 8192, source=_LLAMA32, tied=True),
    _llama3("3.2", "3b", 3_212_749_824, 3072, 28, 24, 8192, source=_LLAMA32, tied=True),
    _lm(
        "mixtral-8x7b",
        "Mixtral 8x7B, balanced dispatch",
        46_702_792_704,
        "Jiang et al. 2024; count of the released weights, as in transformers",
        "moe:mixtral",
        4096,
        "mixtral",
        family="moe",
    ),
    ModelEntry(
        name="dlrm-small",
        title="DLRM, Criteo Kaggle",
        family="recommender",
        parameters=540_677_217,
        source="Naumov et al. 2019; count of this implementation of the authors' Criteo Kaggle benchmark",
        unit="samples",
        build="dlrm:dlrm",
        aliases=("dlrm-kaggle",),
        options={"tables": "criteo-kaggle", "width": 16, "bottom": (512, 256, 64), "top": (512, 256)},
    ),
    ModelEntry(
        name="dlrm",
        title="DLRM, MLPerf (Criteo 1TB)",
        family="recommender",
        parameters=24_036_595_969,
        source=(
            "Naumov et al. 2019; MLPerf Training v0.7 to v2.1, rows capped at 40M: 187,767,399 rows of 128, "
            "published as 24 billion parameters; count of this implementation"
        ),
        unit="samples",
        build="dlrm:dlrm",
        aliases=("dlrm-mlperf", "dlrm-terabyte"),
    ),
)
