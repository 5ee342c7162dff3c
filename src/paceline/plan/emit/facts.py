"""What emitters know of a planned answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline import units
from paceline.catalog import frameworks
from paceline.errors import PlanError
from paceline.spec import checks
from paceline.spec.cluster import Cluster
from paceline.spec.framework import Framework
from paceline.spec.plan import Plan, resolve
from paceline.spec.planned import Planned
from paceline.spec.prediction import DistributedPrediction
from paceline.spec.transformer import Transformer
from paceline.spec.vocabulary import Precision


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A plan with every degree filled in, where it runs, and what is predicted for it."""

    model: str
    plan: Plan
    cluster: Cluster
    prediction: DistributedPrediction
    #: sizes of the model, where it is known by them
    sizes: Transformer | None
    #: how a model that is not was captured
    settings: Mapping[str, Any]
    #: tools whose files are written together
    beside: tuple[str, ...] = ()

    @staticmethod
    def of(planned: Planned, beside: Sequence[str] = ()) -> Facts:
        best, sizes = planned.best, planned.sizes
        plan = best.plan if best.plan.dp else resolve(best.plan, best.cluster.device_count, sizes)
        # of a captured module: what autocast is told
        plan = replace(plan, precision=Precision(plan.precision.removeprefix("amp_")))
        return Facts(
            model=checks.name("model name", planned.model),
            plan=plan,
            cluster=best.cluster,
            prediction=best.prediction,
            sizes=sizes,
            settings=planned.settings,
            beside=tuple(beside),
        )

    @property
    def framework(self) -> Framework | None:
        """Whose kernels and overlap a transformer was predicted with; the search names it in every plan of
        one.
        """
        return frameworks.get(self.plan.framework) if self.sizes and self.plan.framework else None

    @property
    def compiled(self) -> bool:
        """Whether the prediction counts on what torch.compile fuses."""
        style = self.framework
        if style is None:
            return bool(self.settings.get("compile") or self.settings.get("compiled"))
        return style.state == "torch" and style.fusion == "compile"

    def head(self, *notes: str) -> str:
        """Comments for the head of a file: the plan, what is predicted for it, and notes."""
        p = self.prediction
        time = f"{p.step_s:.4g} s per step (90 %: {p.step_s_low:.4g} to {p.step_s_high:.4g})"
        lines = (
            f"{self.model} on {self.cluster.name}: {self.plan}",
            f"predicted: {time}, {units.show(p.peak_bytes, 'bytes')} at the peak",
            *notes,
        )
        return "".join(f"# {line}\n" for line in lines)

    def refuse(self, tool: str, **limits: tuple[object, ...]) -> None:
        """Raises where a field of the plan has a value that the tool does not take."""
        for name, allowed in limits.items():
            value = getattr(self.plan, name)
            if value not in allowed:
                words = [str(one) for one in allowed if one != ""]
                raise PlanError(
                    f"--emit {tool}: it has no {name}={value}; it takes {name} {', '.join(words)}: plan with"
                    f" --fix {name}={words[0]}, or leave {tool} out"
                )


def filled(text: str, **values: object) -> list[str]:
    """Lines of a text with values in their places; one that ends in `#if NAME = VALUE` (or `!=`) where that
    is so.
    """
    lines = (line.partition("#if ") for line in text.splitlines())
    return [line.rstrip().format(**values) for line, _, condition in lines if _holds(condition, values)]


def _holds(condition: str, values: Mapping[str, object]) -> bool:
    """Whether a value has the word that is compared with it: `p.precision = fp16`."""
    name, _, word = condition.strip().partition("= ")
    has = f"{{{name.rstrip(' !')}}}".format(**values) if name else ""
    return (has == word) != name.endswith("!")
