"""What is asked about: a model, a cluster and a plan together, which can be edited and predicted again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline import api
from paceline.capture import capture
from paceline.catalog import clusters
from paceline.cost.curves import Curves, curves_for
from paceline.errors import SpecError
from paceline.predict import simulated
from paceline.predict.step import Conditions
from paceline.spec.cluster import Cluster
from paceline.spec.plan import Plan
from paceline.spec.prediction import DistributedPrediction
from paceline.spec.transformer import Transformer
from paceline.spec.vocabulary import Precision
from paceline.spec.workload import Workload

#: captured once per model and settings in a process: sweeps and comparisons ask again and again
_CAPTURED: dict[tuple[Any, ...], Workload] = {}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model on a cluster under a plan."""

    model: Transformer | Workload
    cluster: Cluster
    plan: Plan
    #: how fast the host issues work, over the usual one
    host_speed: float = 1.0
    #: shares of weights and of activations that are not zero, where declared and where hardware skips the
    #: others
    weight_density: float = 1.0
    activation_density: float = 1.0
    #: the name a module was captured by, and the settings; empty where it cannot be captured again
    source: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(model: Any, cluster: Cluster | str, plan: Plan | str = "", **options: Any) -> Subject:
        """The subject that a user names; `options` are those of `paceline.capture`, for models that are
        captured.
        """
        chosen = plan if isinstance(plan, Plan) else Plan.parse(plan)
        where = clusters.get(cluster) if isinstance(cluster, str) else cluster
        sized = api.sizes(model)
        if sized is not None:
            return Subject(model=sized, cluster=where, plan=api.worded(chosen, str(plan), options))
        if isinstance(model, str) and (model.startswith("hf:") or not model.endswith(".json")):
            settings = api.settings(chosen, str(plan), options)
            return Subject(
                model=_captured(model, settings), cluster=where, plan=chosen, source=model, settings=settings
            )
        if isinstance(model, str):
            model = Workload.load(Path(model))
        workload = model if isinstance(model, Workload) else capture(model, **options)
        return Subject(model=workload, cluster=where, plan=chosen)

    def predict(self, *, trace: bool = False) -> DistributedPrediction:
        """One step; with `trace`, its timeline too."""
        return simulated.predict(self.model, self.cluster, self.plan, self.conditions, trace=trace)

    @property
    def conditions(self) -> Conditions:
        return Conditions(host_speed=self.host_speed, curves=self.curves)

    @property
    def title(self) -> str:
        """Model, cluster and the words of the plan."""
        plan = replace(self.plan, seq=self.plan.seq or self.model.seq or 0)
        if isinstance(self.model, Workload):
            plan = replace(plan, precision=Precision(self.model.precision))
        return f"{self.model.name} on {self.cluster.name}: {plan}"

    @property
    def curves(self) -> Curves | None:
        """The device's, with products that skip declared zeros: of weights forward and for input gradients,
        of activations forward and for weight gradients."""
        w, a = self.weight_density, self.activation_density
        if w == a == 1.0:
            return None
        usual = curves_for(self.cluster.device)
        share = (w * a + w + a) / 3
        return replace(usual, scales=(*usual.scales, {"gemm": share, "conv": share}))

    def captured(self, **changes: Any) -> Subject:
        """The same with the module captured in other settings."""
        if not self.source:
            raise SpecError(
                f"{self.model.name} is a captured workload, whose {next(iter(changes))} is fixed; name the"
                " model instead of the file"
            )
        settings = {**self.settings, **changes}
        return replace(self, model=_captured(self.source, settings), settings=settings)


def _captured(name: str, settings: Mapping[str, Any]) -> Workload:
    key = (name, *sorted(settings.items()))
    if key not in _CAPTURED:
        _CAPTURED[key] = capture(name, **settings)
    return _CAPTURED[key]
