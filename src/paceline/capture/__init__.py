"""From a real module to a workload, without a GPU and without allocating its weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.errors import MissingExtra
from paceline.spec import checks

if TYPE_CHECKING:
    from paceline.spec.workload import Workload


def capture(
    model: Any,
    *,
    batch: int = 1,
    seq: int | None = None,
    image: int | None = None,
    precision: str | None = None,
    optimizer: str | None = None,
    checkpointing: bool = False,
    channels_last: bool | None = None,
    fused_attention: bool = True,
    fold: bool = True,
    compile: bool = False,
) -> Workload:
    """Trace one training step of `model` and return it as a workload.

    `model` is a name (catalog, `torchvision:NAME`, `timm:NAME`, `hf:PATH/config.json`,
    `FILE.py:FUNCTION`) or a tuple `(module, inputs)` or `(module, inputs, loss_fn)`. A module that is given
    stays as it is, with its parameters, buffers, hooks and training mode; so do random generators.

    `precision` is fp32 by default, and bf16 for Hugging Face configurations. Their `seq` is 4,096 tokens by
    default, or the most that the model takes if that is less.
    """
    batch = checks.whole("batch", batch)
    seq, image = (
        None if size is None else checks.whole(name, size) for name, size in (("seq", seq), ("image", image))
    )
    try:
        import torch  # noqa: F401
    except ImportError:
        raise MissingExtra("torch", "torch", "capturing a model") from None
    from paceline.capture import fallbacks
    from paceline.capture._torch import without_compiler
    from paceline.capture.module_state import random_state_kept
    from paceline.capture.resolve import resolve
    from paceline.capture.step import CaptureSettings, trace

    # settings first: a wrong word should not cost the building of a model
    precision = precision or usual_precision(model)
    CaptureSettings(precision=precision, optimizer=optimizer or "adamw")
    with without_compiler(), random_state_kept():
        job, usual = resolve(model, batch=batch, seq=seq, image=image)
        settings = CaptureSettings(
            precision=precision,
            optimizer=optimizer or usual.optimizer,
            checkpointing=checkpointing,
            channels_last=usual.channels_last if channels_last is None else channels_last,
            fused_attention=fused_attention,
            fold=fold,
            compile=compile,
        )
        with fallbacks.noticed() as messages:
            workload = trace(job, settings)
        return replace(workload, warnings=fallbacks.warnings([*job.fallbacks, *messages]))


def usual_precision(model: Any) -> str:
    """The precision of a capture where none is given: that in which such models are trained."""
    return "bf16" if isinstance(model, str) and model.startswith("hf:") else "fp32"
