"""The catalog's language models as `Transformer`s: sizes only, no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.catalog import hugging_face, models
from paceline.errors import SpecError
from paceline.spec.transformer import Transformer, from_hf

#: defaults of the build functions named by a model's entry
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt:gpt": {"vocab": 50_257},
    "bert:bert": {"vocab": 30_522, "context": 512, "causal": False},
    "llama:llama": {
        "vocab": 32_000,
        "gated": True,
        "norm": "rms",
        "positions": "rotary",
        "bias": False,
        "tied": False,
    },
    "moe:mixtral": {
        "vocab": 32_000,
        "gated": True,
        "norm": "rms",
        "positions": "rotary",
        "bias": False,
        "tied": False,
        "width": 4096,
        "depth": 32,
        "heads": 32,
        "kv_heads": 8,
        "inner": 14_336,
        "experts": 8,
        "chosen": 2,
    },
}
_FIELDS = {"width": "hidden", "depth": "layers", "inner": "ffn", "chosen": "top_k"}
_NOT_SIZES = ("p", "theta")


_MODERN: dict[str, Any] = {"gated": True, "norm": "rms", "positions": "rotary", "bias": False, "tied": False}
#: models known by their sizes only, from the configurations published with their weights
_SIZES = (
    Transformer(
        name="qwen3-30b-a3b",
        layers=48,
        hidden=2048,
        heads=32,
        kv_heads=4,
        head_dim=128,
        ffn=768,
        vocab=151_936,
        experts=128,
        top_k=8,
        seq=4096,
        **_MODERN,
    ),
    Transformer(
        name="qwen3-235b-a22b",
        layers=94,
        hidden=4096,
        heads=64,
        kv_heads=4,
        head_dim=128,
        ffn=1536,
        vocab=151_936,
        experts=128,
        top_k=8,
        seq=4096,
        **_MODERN,
    ),
    Transformer(
        name="gpt-oss-120b",
        layers=36,
        hidden=2880,
        heads=64,
        kv_heads=8,
        head_dim=64,
        ffn=2880,
        vocab=201_088,
        experts=128,
        top_k=4,
        seq=4096,
        **{**_MODERN, "bias": True},
    ),
    Transformer(
        name="gpt-oss-20b",
        layers=24,
        hidden=2880,
        heads=64,
        kv_heads=8,
        head_dim=64,
        ffn=2880,
        vocab=201_088,
        experts=32,
        top_k=4,
        seq=4096,
        **{**_MODERN, "bias": True},
    ),
    Transformer(
        name="mixtral-8x22b",
        layers=56,
        hidden=6144,
        heads=48,
        kv_heads=8,
        head_dim=128,
        ffn=16_384,
        vocab=32_768,
        experts=8,
        top_k=2,
        seq=4096,
        **_MODERN,
    ),
    Transformer(
        name="dbrx",
        layers=40,
        hidden=6144,
        heads=48,
        kv_heads=8,
        head_dim=128,
        ffn=10_752,
        vocab=100_352,
        experts=16,
        top_k=4,
        seq=4096,
        **{**_MODERN, "norm": "layer"},
    ),
    Transformer(
        name="qwen2-57b-a14b",
        layers=28,
        hidden=3584,
        heads=28,
        kv_heads=4,
        head_dim=128,
        ffn=2560,
        vocab=151_936,
        experts=64,
        top_k=8,
        shared_ffn=20_480,
        seq=4096,
        **_MODERN,
    ),
    Transformer(
        name="olmoe-1b-7b",
        layers=16,
        hidden=2048,
        heads=16,
        ffn=1024,
        vocab=50_304,
        experts=64,
        top_k=8,
        seq=4096,
        **_MODERN,
    ),
    Transformer(
        name="grok-1",
        layers=64,
        hidden=6144,
        heads=48,
        kv_heads=8,
        head_dim=128,
        ffn=32_768,
        vocab=131_072,
        experts=8,
        top_k=2,
        seq=8192,
        **{**_MODERN, "tied": True},
    ),
    # three of its layers have one feed-forward as wide as the nine experts that a token meets in the others:
    # the same work
    Transformer(
        name="deepseek-v3",
        layers=61,
        hidden=7168,
        heads=128,
        head_dim=128,
        ffn=2048,
        vocab=129_280,
        experts=256,
        top_k=8,
        shared_ffn=2048,
        top_groups=4,
        q_rank=1536,
        kv_rank=512,
        rotary_dim=64,
        seq=4096,
        **_MODERN,
    ),
    # of its first layer the same holds
    Transformer(
        name="deepseek-v2",
        layers=60,
        hidden=5120,
        heads=128,
        head_dim=128,
        ffn=1536,
        vocab=102_400,
        experts=160,
        top_k=6,
        shared_ffn=3072,
        top_groups=3,
        q_rank=1536,
        kv_rank=512,
        rotary_dim=64,
        seq=4096,
        **_MODERN,
    ),
    Transformer(
        name="kimi-k2",
        layers=61,
        hidden=7168,
        heads=64,
        head_dim=128,
        ffn=2048,
        vocab=163_840,
        experts=384,
        top_k=8,
        shared_ffn=2048,
        q_rank=1536,
        kv_rank=512,
        rotary_dim=64,
        seq=4096,
        **_MODERN,
    ),
    Transformer(
        name="llama4-maverick",
        layers=48,
        hidden=5120,
        heads=40,
        kv_heads=8,
        head_dim=128,
        ffn=8192,
        vocab=202_048,
        experts=128,
        top_k=1,
        shared_ffn=8192,
        moe_every=2,
        seq=8192,
        **_MODERN,
    ),
    Transformer(
        name="llama4-scout",
        layers=48,
        hidden=5120,
        heads=40,
        kv_heads=8,
        head_dim=128,
        ffn=8192,
        vocab=202_048,
        experts=16,
        top_k=1,
        shared_ffn=8192,
        seq=8192,
        **_MODERN,
    ),
    # Korthikanti et al., 2022 (arXiv:2205.05198), table 3
    *(
        Transformer(
            name=f"megatron-{size}",
            layers=layers,
            hidden=hidden,
            heads=heads,
            ffn=4 * hidden,
            vocab=51_200,
            seq=2048,
        )
        for size, layers, hidden, heads in (
            ("22b", 48, 6144, 64),
            ("530b", 105, 20_480, 128),
            ("1t", 128, 25_600, 160),
        )
    ),
)


def get(name: str) -> Transformer:
    """The transformer called `name`: a catalog name, or `hf:PATH` of a config.json."""
    if name.startswith("hf:"):
        config = hugging_face.read(Path(name[3:]))
        return from_hf(config, hugging_face.name(config))
    sized = next((t for t in _SIZES if models.fold(t.name) == models.fold(name)), None)
    if sized is not None:
        return sized
    entry = models.get(name)
    if entry.build not in _DEFAULTS:
        raise SpecError(
            f"{entry.name} is not a stack of equal transformer layers; only data-parallel plans apply to it"
        )
    sizes = {**_DEFAULTS[entry.build], **entry.options}
    fields = {_FIELDS.get(key, key): value for key, value in sizes.items() if key not in _NOT_SIZES}
    fields.setdefault("ffn", 4 * fields["hidden"])
    return Transformer(name=entry.name, seq=entry.seq or 2048, **fields)


def captured() -> list[str]:
    """Names of those that are modules of the catalog too."""
    return [name for name in models.names() if models.get(name).build in _DEFAULTS]


def names() -> list[str]:
    """Names that `get` takes."""
    return [*captured(), *(t.name for t in _SIZES)]
