"""From what a user calls a model to a module with inputs: catalog, file, torchvision, timm, transformers."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.capture import _torch, fallbacks
from paceline.capture.build import BuildMode
from paceline.capture.step import StepInputs, _user_code
from paceline.catalog import hugging_face, models
from paceline.errors import CaptureError, MissingExtra, SpecError, UnknownName, nearest
from paceline.spec import checks
from paceline.spec.transformer import usual_seq


@dataclass(frozen=True, slots=True)
class UsualSettings:
    """How a model is usually run, where the user does not say."""

    optimizer: str = "adamw"
    channels_last: bool = False


def resolve(
    model: Any, *, batch: int, seq: int | None, image: int | None, real: bool = False
) -> tuple[StepInputs, UsualSettings]:
    """The job that `model` describes, and its usual settings; `real`: with the weights that it starts with,
    rather than large tensors without memory.
    """
    for label, size in (("batch", batch), ("seq", seq), ("image", image)):
        if size is not None:
            checks.whole(label, size)
    if not isinstance(model, str):
        return _from_tuple(model, "module", batch, seq), UsualSettings()
    scheme, _, rest = model.partition(":")
    if scheme == "torchvision":
        return _vision(model, _torchvision(rest), batch, image, real=real), UsualSettings("sgd", True)
    if scheme == "timm":
        return _timm(rest, batch, image, real), UsualSettings("sgd", True)
    if scheme == "hf":
        return _huggingface(Path(rest), batch, seq, real), UsualSettings()
    if scheme.endswith(".py"):
        return _file(Path(scheme), rest, batch, seq, real), UsualSettings()
    entry = models.get(model)
    with _building(real):
        device = "cpu" if real else "meta"
        module, inputs, loss = models.build(entry, batch=batch, seq=seq, image=image, device=device)
    seq = entry.seq if seq is None else seq
    per_sample = seq if entry.unit == "tokens" and seq else 1
    job = StepInputs(
        name=entry.name,
        module=module,
        args=inputs,
        loss=loss,
        batch=batch,
        seq=seq,
        unit=entry.unit,
        units_per_step=batch * per_sample,
    )
    return job, UsualSettings(entry.optimizer, entry.family == "cnn")


def _building(real: bool) -> AbstractContextManager[Any]:
    return contextlib.nullcontext() if real else BuildMode()


def _from_tuple(value: Any, name: str, batch: int, seq: int | None) -> StepInputs:
    if not isinstance(value, tuple) or not 2 <= len(value) <= 3 or not isinstance(value[0], nn.Module):
        raise SpecError(f"{name}: expected (module, inputs) or (module, inputs, loss_fn), got {_kind(value)}")
    module, inputs, *rest = value
    loss: Callable[[Any], torch.Tensor] | None = rest[0] if rest else None
    if isinstance(inputs, dict):
        return StepInputs(
            name=name, module=module, kwargs=inputs, loss=loss, batch=batch, seq=seq, units_per_step=batch
        )
    args = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    return StepInputs(
        name=name, module=module, args=args, loss=loss, batch=batch, seq=seq, units_per_step=batch
    )


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(v).__name__ for v in value) or 'nothing'}"
    return type(value).__name__


def _file(path: Path, function: str, batch: int, seq: int | None, real: bool) -> StepInputs:
    if not path.is_file():
        raise SpecError(f"no file {str(path)!r}; give FILE.py:FUNCTION with a path from here")
    if not function:
        raise SpecError(f"{path}: name the function that builds the model, as in {path}:build")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        with _torch.torchvision_importable(), _user_code(str(path), "import"):
            spec.loader.exec_module(loaded)
        make = getattr(loaded, function, None)
        if not callable(make):
            functions = [
                n
                for n, v in vars(loaded).items()
                if inspect.isfunction(v) and v.__module__ == loaded.__name__
            ]
            raise UnknownName(
                f"function in {path}", function, functions, f"it has: {', '.join(functions) or 'none'}"
            )
        accepted = inspect.signature(make).parameters
        every = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        offered = {"batch": batch, **({"seq": seq} if seq is not None else {})}
        with _torch.torchvision_importable(), _building(real), _user_code(f"{path}:{function}", "build"):
            built = make(**{k: v for k, v in offered.items() if every or k in accepted})
    finally:
        sys.path.remove(str(path.resolve().parent))
    return _from_tuple(built, f"{path}:{function}", batch, seq)


def _vision(
    name: str,
    make: Callable[[], nn.Module],
    batch: int,
    image: int | None,
    channels: int = 3,
    real: bool = False,
) -> StepInputs:
    with _building(real), _user_code(name, "build"):
        module = make()
        side = image or 224
        return StepInputs(
            name=name,
            module=module,
            args=(torch.randn(batch, channels, side, side),),
            batch=batch,
            unit="images",
            units_per_step=batch,
        )


def _torchvision(name: str) -> Callable[[], nn.Module]:
    try:
        vision = _torch.import_torchvision()
    except ImportError:
        raise MissingExtra("torchvision", "vision", f"torchvision:{name}") from None
    if name not in vision.models.list_models():
        raise UnknownName("torchvision model", name, vision.models.list_models())
    # auxiliary heads are for the original training recipe; throughput tables leave them out
    plain = {"aux_logits": False, "init_weights": False} if name in ("googlenet", "inception_v3") else {}
    return lambda: vision.models.get_model(name, weights=None, **plain)


def _timm(name: str, batch: int, image: int | None, real: bool) -> StepInputs:
    try:
        _torch.import_torchvision()
        timm = importlib.import_module("timm")
    except ImportError:
        raise MissingExtra("timm", "vision", f"timm:{name}") from None
    if not timm.is_model(name.partition(".")[0]):
        raise UnknownName("timm model", name, timm.list_models())
    with _building(real), _user_code(f"timm:{name}", "build"), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # old names for a model are welcome here
        fixed = image is not None and "img_size" in str(
            inspect.signature(timm.model_entrypoint(name.partition(".")[0]))
        )
        try:
            module = timm.create_model(name, pretrained=False, **({"img_size": image} if fixed else {}))
        except TypeError:
            module = timm.create_model(name, pretrained=False)
        channels, side, _ = module.default_cfg.get("input_size", (3, 224, 224))
        side = image or side
        x = torch.randn(batch, channels, side, side)
    return StepInputs(
        name=f"timm:{name}", module=module, args=(x,), batch=batch, unit="images", units_per_step=batch
    )


def transformers() -> Any:
    """The transformers package; torchvision, which it may import, is made importable first."""
    with contextlib.suppress(ImportError):
        _torch.import_torchvision()
    try:
        package = importlib.import_module("transformers")
    except ImportError:
        raise MissingExtra("transformers", "hf", "a Hugging Face configuration") from None
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        # its advice is about weights and losses, of which there are none
        package.logging.set_verbosity_error()
    return package


def _huggingface(path: Path, batch: int, seq: int | None, real: bool) -> StepInputs:
    config = hugging_face.read(path)
    job = huggingface(config, batch=batch, seq=seq, name=f"hf:{path}", real=real)
    parameters = sum(parameter.numel() for parameter in job.module.parameters())
    return replace(job, name=hugging_face.name(config, parameters))


def huggingface(
    config: dict[str, Any],
    *,
    batch: int,
    seq: int | None,
    name: str,
    head: str | None = None,
    attention: str | None = None,
    dropout: bool = True,
    real: bool = False,
) -> StepInputs:
    """A transformers model from its configuration (with `model_type`), with labels so that it computes its
    own loss.
    """
    library = transformers()
    settings = {
        k: v
        for k, v in config.items()
        if k not in ("model_type", "architectures", "transformers_version", "torch_dtype", "dtype")
    }
    try:
        made = library.AutoConfig.for_model(config["model_type"], **settings)
    except Exception as error:
        known = list(library.CONFIG_MAPPING.keys()) if hasattr(library, "CONFIG_MAPPING") else []
        if config["model_type"] in known:
            raise SpecError(f"{name}: transformers refuses it: {' '.join(str(error).split())}") from error
        near = nearest(str(config["model_type"]), known)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise SpecError(f"{name}: unknown model_type {config['model_type']!r}{hint}") from error
    made.use_cache = False
    if not dropout:
        for key, value in made.to_dict().items():
            if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, float):
                setattr(made, key, 0.0)
    usual = _HEADS_OF_PAIRS + _HEADS if made.is_encoder_decoder else _HEADS
    heads = [head] if head else [*(config.get("architectures") or ()), *usual]
    with fallbacks.noticed() as slow, _building(real), _user_code(name, "build"):
        module = None
        for candidate in heads:
            cls = getattr(library, candidate, None)
            if cls is None:
                continue
            options = {"attn_implementation": attention} if attention else {}
            try:
                module = (
                    cls.from_config(made, **options)
                    if candidate.startswith("AutoModel")
                    else cls._from_config(made, **options)
                )
                break
            except ValueError:  # this configuration has no such head
                continue
    if module is None:
        raise CaptureError(f"{name}: no model class of transformers fits model_type {config['model_type']!r}")
    kwargs, length = _huggingface_inputs(module, batch, seq, name)
    unit = "tokens" if length else "images"
    return StepInputs(
        name=name,
        module=module,
        kwargs=kwargs,
        batch=batch,
        seq=length,
        unit=unit,
        units_per_step=batch * (length or 1),
        fallbacks=slow,
    )


#: heads to try where a configuration names no architecture; for encoder-decoders, those that run both first
_HEADS_OF_PAIRS = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")
_HEADS = (
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForImageClassification",
    "AutoModelForSequenceClassification",
    "AutoModel",
)


def _huggingface_inputs(
    module: Any, batch: int, seq: int | None, name: str
) -> tuple[dict[str, Any], int | None]:
    """Inputs with labels, and the tokens of a sample; None for models that take images."""
    config, takes = module.config, module.main_input_name
    if takes == "pixel_values":
        if seq is not None:
            raise SpecError(f"{name} takes no seq; got seq={seq}, leave it out")
        side, channels = getattr(config, "image_size", 224), getattr(config, "num_channels", 3)
        labels = torch.zeros(batch, dtype=torch.int64)
        return {takes: torch.empty(batch, channels, side, side, device="meta"), "labels": labels}, None
    length = seq or usual_seq(config.get_text_config(decoder=True).to_dict())
    ids = torch.zeros(batch, length, dtype=torch.int64)
    if takes == "input_features" and hasattr(config, "max_source_positions"):
        # the encoder's first layers halve the number of frames
        frames = 2 * config.max_source_positions
        return {takes: torch.empty(batch, config.num_mel_bins, frames, device="meta"), "labels": ids}, length
    if takes != "input_ids":
        hint = "give a function that builds the module with its inputs: FILE.py:FUNCTION"
        raise CaptureError(f"{name}: inputs for models that take {takes!r} are not known; {hint}")
    kwargs: dict[str, Any] = {"input_ids": ids}
    accepted = inspect.signature(module.forward).parameters
    if (
        getattr(config, "is_encoder_decoder", False)
        and getattr(config, "decoder_start_token_id", None) is None
    ):
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    if "decoder_attention_mask" in accepted:  # some decoders make one themselves and ask for its values
        kwargs["decoder_attention_mask"] = torch.ones(batch, length, dtype=torch.int64)
    if "labels" in accepted:
        per_sample = type(module).__name__.endswith(
            ("ForSequenceClassification", "ForNextSentencePrediction")
        )
        kwargs["labels"] = torch.zeros(batch, dtype=torch.int64) if per_sample else ids
    return kwargs, length
