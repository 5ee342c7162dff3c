"""Paceline: how fast will this network train there, and what is in the way?

    import paceline as pl

    prediction = pl.predict("resnet50", "h200", batch=128, precision="amp_bf16")
    prediction.step_s, prediction.step_s_low, prediction.step_s_high      # seconds, with a 90 % interval

    pl.predict("llama3-70b", plan="dp=fsdp tp=8 mbs=1 gbs=1024", cluster="32xdgx-h100")

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
    from paceline.api import capture, plan, predict
    from paceline.catalog import clusters, devices, frameworks, models
    from paceline.spec.cluster import Cluster
    from paceline.spec.device import Device
    from paceline.spec.plan import Plan
    from paceline.spec.prediction import DistributedPrediction, Prediction
    from paceline.spec.workload import Workload

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "Device",
    "DistributedPrediction",
    "Plan",
    "Prediction",
    "Workload",
    "capture",
    "clusters",
    "devices",
    "frameworks",
    "models",
    "plan",
    "predict",
]

#: name -> where it is: a module, or a module and an attribute of it
_EXPORTS = {
    "Cluster": "paceline.spec.cluster:Cluster",
    "Device": "paceline.spec.device:Device",
    "DistributedPrediction": "paceline.spec.prediction:DistributedPrediction",
    "Plan": "paceline.spec.plan:Plan",
    "Prediction": "paceline.spec.prediction:Prediction",
    "Workload": "paceline.spec.workload:Workload",
    "capture": "paceline.capture",
    "clusters": "paceline.catalog.clusters",
    "devices": "paceline.catalog.devices",
    "frameworks": "paceline.catalog.frameworks",
    "models": "paceline.catalog.models",
    "plan": "paceline.plan",
    "predict": "paceline.predict",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _EXPORTS[name].partition(":")
    value = import_module(module)
    return getattr(value, attribute) if attribute else value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Function(ModuleType):
    """A package of ours that is also, to a user, the function of its name in `paceline.api`."""

    @property
    def __wrapped__(self) -> Any:
        return getattr(import_module("paceline.api"), self.__name__.rpartition(".")[2])

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.__wrapped__(*args, **options)


class _Package(ModuleType):
    """Makes `capture`, `plan` and `predict` callable as the import system attaches them, whoever imports them
    first.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("capture", "plan", "predict"):
            value.__class__ = _Function
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
