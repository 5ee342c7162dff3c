"""From a real module to a workload, without a GPU and without allocating its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.errors import MissingExtra
from paceline.spec import checks

if TYPE_CHECKING:
    from paceline.spec.workload import Workload


def capture(
    model: Any, *, batch: int = 1, seq: int | None = None, image: int | None = None, precision: str = "fp32", optimizer: str | None = None,
    checkpointing: bool = False, channels_last: bool | None = None, fused_attention: bool = True, fold: bool = True,
    compile: bool = False,
) -> Workload:
    """Trace one training step of `model` and return it as a workload.

    `model` is a name (catalog, `torchvision:NAME`, `timm:NAME`, `hf:PATH/config.json`,
    `FILE.py:FUNCTION`) or a tuple `(module, inputs)` or `(module, inputs, loss_fn)`.
    """
    batch = checks.whole("batch", batch)
    seq, image = (None if size is None else checks.whole(name, size) for name, size in (("seq", seq), ("image", image)))
    try:
        import torch  # noqa: F401
    except ImportError:
        raise MissingExtra("torch", "torch", "capturing a model") from None
    from paceline.capture._torch import without_compiler
    from paceline.capture.resolve import resolve
    from paceline.capture.step import Settings, trace

    # settings first: a wrong word should not cost the building of a model
    Settings(precision=precision, optimizer=optimizer or "adamw")
    with without_compiler():
        job, usual = resolve(model, batch=batch, seq=seq, image=image)
        settings = Settings(
            precision=precision, optimizer=optimizer or usual.optimizer, checkpointing=checkpointing,
            channels_last=usual.channels_last if channels_last is None else channels_last, fused_attention=fused_attention, fold=fold,
            compile=compile,
        )
        return trace(job, settings)
