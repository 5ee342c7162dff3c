"""The functions behind `paceline.capture` and `paceline.predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.capture import capture
from paceline.catalog import devices
from paceline.errors import SpecError
from paceline.predict.step import predict as predict_workload
from paceline.spec.device import Device
from paceline.spec.prediction import Prediction
from paceline.spec.workload import Workload

__all__ = ["capture", "predict"]


def predict(model: Any, device: Device | str, **options: Any) -> Prediction:
    """Predict one training step of `model` on `device`.

    `model` is a workload, a file with a saved one (`.json`), or whatever `paceline.capture` takes;
    `options` are those of `paceline.capture`. `device` is a device, a catalog name or a `.toml` file.
    """
    target = devices.get(device) if isinstance(device, str) else device
    if isinstance(model, str) and model.endswith(".json") and not model.startswith("hf:"):
        model = Workload.load(Path(model))
    if not isinstance(model, Workload):
        model = capture(model, **options)
    elif options:
        raise SpecError(f"{model.name} is a captured workload, whose {next(iter(options))} is fixed; capture it again to change it")
    return predict_workload(model, target)
