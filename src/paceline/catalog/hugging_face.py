"""Configurations of Hugging Face models: reading the file, and the name that a model goes by. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import SpecError, UnknownSizes
from paceline.spec.transformer import from_hf


def read(path: Path) -> dict[str, Any]:
    """The configuration at `path`, a `config.json` or the folder that holds one."""
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_hook=_special_float)
    except OSError as error:
        raise SpecError(f"cannot read {str(path)!r}: {error.strerror}; give hf:PATH/config.json") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"cannot read {str(path)!r}: not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise SpecError(f"{path}: not valid JSON: {place}: {error.msg}") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise SpecError(f"{path}: no model_type; expected the config.json of a transformers model")
    return config


def _special_float(value: dict[str, Any]) -> Any:
    """Numbers that JSON has no word for, as transformers writes them: {"__float__": "Infinity"}."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def name(config: Mapping[str, Any], parameters: int = 0) -> str:
    """The name of a configuration's model: its own (`_name_or_path`), else its type and size, as `llama-8B`.

    `parameters` is the size of a built module, for models that a transformer's sizes do not describe.
    """
    own = str(config.get("_name_or_path") or "").rstrip("/")
    if own and own.isprintable():
        on_the_hub = own.count("/") <= 1 and own[0] not in "./~"
        return own if on_the_hub else own.rpartition("/")[2]
    try:
        count = from_hf(config).parameters
    except UnknownSizes:
        count = parameters
    return f"{config['model_type']}-{_rounded(count)}" if count else str(config["model_type"])


def _rounded(parameters: int) -> str:
    """Two digits or three, as people name models: 8B, 1.5B, 405B, 494M."""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= unit:
            count = parameters / unit
            return (f"{count:.0f}" if count >= 10 else f"{count:.1f}".removesuffix(".0")) + letter
    return str(parameters)
