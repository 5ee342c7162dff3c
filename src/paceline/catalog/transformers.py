"""The catalog's language models as `Transformer`s: sizes only, no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.catalog import models
from paceline.errors import SpecError
from paceline.spec.transformer import Transformer, from_hf

#: defaults of the build functions named by a model's entry
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt:gpt": {"vocab": 50_257},
    "bert:bert": {"vocab": 30_522, "context": 512, "causal": False},
    "llama:llama": {"vocab": 32_000, "gated": True, "norm": "rms", "positions": "rotary", "bias": False, "tied": False},
    "moe:mixtral": {
        "vocab": 32_000, "gated": True, "norm": "rms", "positions": "rotary", "bias": False, "tied": False, "width": 4096, "depth": 32, "heads": 32,
        "kv_heads": 8, "inner": 14_336, "experts": 8, "chosen": 2,
    },
}
_FIELDS = {"width": "hidden", "depth": "layers", "inner": "ffn", "chosen": "top_k"}
_NOT_SIZES = ("p", "theta")


def get(name: str) -> Transformer:
    """The transformer called `name`: a catalog name, or `hf:PATH` of a config.json."""
    if name.startswith("hf:"):
        return _read(Path(name[3:]))
    entry = models.get(name)
    if entry.build not in _DEFAULTS:
        raise SpecError(f"{entry.name} is not a stack of equal transformer layers; only data-parallel plans apply to it")
    sizes = {**_DEFAULTS[entry.build], **entry.options}
    fields = {_FIELDS.get(key, key): value for key, value in sizes.items() if key not in _NOT_SIZES}
    fields.setdefault("ffn", 4 * fields["hidden"])
    return Transformer(name=entry.name, seq=entry.seq or 2048, **fields)


def names() -> list[str]:
    """Names that `get` takes."""
    return [name for name in models.names() if models.get(name).build in _DEFAULTS]


def _read(path: Path) -> Transformer:
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise SpecError(f"cannot read {str(path)!r}: {error}") from None
    if not isinstance(config, dict):
        raise SpecError(f"{path}: expected a JSON object, got {type(config).__name__}")
    return from_hf(config, path.parent.name)
