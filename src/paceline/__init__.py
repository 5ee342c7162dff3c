"""Paceline: how fast will this network train there, and what is in the way?

    import paceline as pl

    prediction = pl.predict("resnet50", "h200", batch=128, precision="amp_bf16")
    prediction.step_s, prediction.step_s_low, prediction.step_s_high      # seconds, with a 90 % interval

    workload = pl.capture((module, inputs), batch=32)                     # a module of your own
    pl.predict(workload, pl.devices.get("a100-sxm-80gb"))

Importing this package imports neither torch nor numpy: names load what they need on first use.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.catalog import devices, models
    from paceline.spec.device import Device
    from paceline.spec.prediction import Prediction
    from paceline.spec.workload import Workload

__version__ = "0.1.0"

__all__ = ["Device", "Prediction", "Workload", "capture", "devices", "models", "predict"]

#: name -> (module, attribute of it; None for the module itself)
_EXPORTS: dict[str, tuple[str, str | None]] = {
    "Device": ("paceline.spec.device", "Device"),
    "Prediction": ("paceline.spec.prediction", "Prediction"),
    "Workload": ("paceline.spec.workload", "Workload"),
    "capture": ("paceline.capture", None),
    "devices": ("paceline.catalog.devices", None),
    "models": ("paceline.catalog.models", None),
    "predict": ("paceline.predict", None),
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _EXPORTS[name]
    loaded = import_module(module)
    value = getattr(loaded, attribute) if attribute else loaded
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Capture(ModuleType):
    """The package `paceline.capture`, which is also the function of that name."""

    def __call__(
        self, model: Any, *, batch: int = 1, seq: int | None = None, image: int | None = None, precision: str = "fp32", optimizer: str | None = None,
        checkpointing: bool = False, channels_last: bool | None = None, fused_attention: bool = True, fold: bool = True,
    ) -> Workload:
        """Trace one training step of `model` and return it as a workload.

        `model` is a name (catalog, `torchvision:NAME`, `timm:NAME`, `hf:PATH/config.json`,
        `FILE.py:FUNCTION`) or a tuple `(module, inputs)` or `(module, inputs, loss_fn)`.
        """
        workload: Workload = self.capture(
            model, batch=batch, seq=seq, image=image, precision=precision, optimizer=optimizer, checkpointing=checkpointing,
            channels_last=channels_last, fused_attention=fused_attention, fold=fold,
        )
        return workload


class _Predict(ModuleType):
    """The package `paceline.predict`, which is also the function of that name."""

    def __call__(self, model: Any, device: Device | str, **options: Any) -> Prediction:
        """Predict one training step of `model` on `device`.

        `model` is a workload, a file with a saved one (`.json`), or whatever `paceline.capture` takes;
        `options` are those of `paceline.capture`. `device` is a device, a catalog name or a `.toml` file.
        """
        from paceline.catalog import devices
        from paceline.errors import SpecError
        from paceline.predict.step import predict
        from paceline.spec.workload import Workload

        target = devices.get(device) if isinstance(device, str) else device
        if isinstance(model, str) and model.endswith(".json") and not model.startswith("hf:"):
            from pathlib import Path

            model = Workload.load(Path(model))
        if not isinstance(model, Workload):
            from paceline.capture import capture

            return predict(capture(model, **options), target)
        if options:
            raise SpecError(f"{model.name} is a captured workload, whose {next(iter(options))} is fixed; capture it again to change it")
        return predict(model, target)


_CALLABLE: dict[str, type[ModuleType]] = {"capture": _Capture, "predict": _Predict}


class _Package(ModuleType):
    """Makes two packages callable as they are imported: `pl.predict` is a package and, to a user, a function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _CALLABLE and type(value) is ModuleType:
            value.__class__ = _CALLABLE[name]
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

if TYPE_CHECKING:
    capture: _Capture
    predict: _Predict
