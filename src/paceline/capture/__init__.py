"""From a real module to a workload, without a GPU and without allocating its weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.errors import MissingExtra
from paceline.spec import checks

if TYPE_CHECKING:
    from paceline.capture.step import TracedStep
    from paceline.spec.recomputation import RecomputePolicy
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
    recompute: RecomputePolicy | None = None,
) -> Workload:
    """Trace one training step of `model` and return it as a workload.

    `model` is a name (catalog, `torchvision:NAME`, `timm:NAME`, `hf:PATH/config.json`,
    `FILE.py:FUNCTION`) or a tuple `(module, inputs)` or `(module, inputs, loss_fn)`. A module that is given
    stays as it is, with its parameters, buffers, hooks and training mode; so do random generators.

    `precision` is fp32 by default, and bf16 for Hugging Face configurations. Their `seq` is 4,096 tokens by
    default, or the most that the model takes if that is less.

    Under `recompute`, the step is the one that `paceline.train.recompute(module, policy)` makes of it.
    """
    options = {
        "precision": precision,
        "optimizer": optimizer,
        "channels_last": channels_last,
        "checkpointing": checkpointing,
        "fused_attention": fused_attention,
        "fold": fold,
        "compile": compile,
        "recompute": recompute,
    }
    return traced(model, batch=batch, seq=seq, image=image, **options).workload


def traced(
    model: Any, *, batch: int = 1, seq: int | None = None, image: int | None = None, **options: Any
) -> TracedStep:
    """The same with the log that the workload was made from; `options` are those of `capture`."""
    batch = checks.whole("batch", batch)
    seq, image = (
        None if size is None else checks.whole(name, size) for name, size in (("seq", seq), ("image", image))
    )
    try:
        import torch  # noqa: F401
    except ImportError:
        raise MissingExtra("torch", "torch", "capturing a model") from None
    from paceline.capture import fallbacks
    from paceline.capture._torch import compiler_loaded, without_compiler
    from paceline.capture.module_state import random_state_kept
    from paceline.capture.resolve import resolve
    from paceline.capture.step import CaptureSettings, trace

    given = {name: value for name, value in options.items() if value is not None}
    given.setdefault("precision", usual_precision(model))
    # settings first: a wrong word should not cost the building of a model
    CaptureSettings(**given)
    if given.get("recompute"):
        compiler_loaded()
    with without_compiler(), random_state_kept():
        job, usual = resolve(model, batch=batch, seq=seq, image=image)
        usually = {"optimizer": usual.optimizer, "channels_last": usual.channels_last}
        with fallbacks.noticed() as messages:
            step = trace(job, CaptureSettings(**{**usually, **given}))
        warnings = fallbacks.warnings([*job.fallbacks, *messages])
        return step._replace(workload=replace(step.workload, warnings=warnings))


def usual_precision(model: Any) -> str:
    """The precision of a capture where none is given: that in which such models are trained."""
    return "bf16" if isinstance(model, str) and model.startswith("hf:") else "fp32"
