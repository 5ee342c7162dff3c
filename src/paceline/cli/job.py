"""What makes a whole job of a step: a budget, and what is known about failures, storage and prices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from paceline.cli.options import print_json, show

if TYPE_CHECKING:
    from paceline.spec.prediction import DistributedPrediction


def _quantity(dimension: str) -> Any:
    """Reads a quantity with its unit."""

    def read(_: Any, tokens: Sequence[Any]) -> float:
        from paceline import units
        from paceline.errors import UnitError

        try:
            value = units.parse(tokens[0].value, dimension)
        except UnitError as error:
            raise ValueError(str(error)) from None
        if value <= 0:
            raise ValueError(f"must be above zero, got {tokens[0].value!r}")
        return value

    return read


Count = Parameter(converter=_quantity("count"))
Seconds = Parameter(converter=_quantity("time"))
Price = Annotated[
    float | None,
    Parameter(
        converter=_quantity("price_rate"),
        help=(
            "USD per device-hour, such as 2.5 (or 2.5USD/h); by default the catalog's, whose date the answer"
            " says"
        ),
    ),
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """A whole job: --tokens or --epochs."""

    tokens: Annotated[
        float | None,
        Count,
        Parameter(help="tokens to train on, such as 15T; adds time to train, goodput, money and energy"),
    ] = None
    epochs: Annotated[
        float | None, Count, Parameter(help="epochs to train for, of ImageNet unless --samples is given")
    ] = None
    samples: Annotated[float | None, Count, Parameter(help="samples per epoch")] = None
    critical_batch: Annotated[
        float | None,
        Count,
        Parameter(help="critical batch (tokens or samples): training needs twice the data"),
    ] = None
    mtbf: Annotated[
        float | None, Seconds, Parameter(help="time between failures of one device, such as 50000h")
    ] = None
    restart: Annotated[
        float | None, Seconds, Parameter(help="time from a failure until training continues, such as 10min")
    ] = None
    storage: Annotated[
        float | None,
        Parameter(
            converter=_quantity("bandwidth"), help="rate at which a node writes checkpoints, such as 2GB/s"
        ),
    ] = None
    price: Price = None

    @property
    def asked(self) -> bool:
        """Whether there is a budget."""
        return self.tokens is not None or self.epochs is not None


def show_job(found: DistributedPrediction, cluster: str, whole: JobOptions, json_: bool) -> None:
    """Prints a step and the job that repeats it."""
    from paceline.catalog import clusters
    from paceline.whatif.job import Budget, job

    names = {
        "tokens": "tokens",
        "epochs": "epochs",
        "samples": "samples",
        "critical_batch": "critical_batch",
        "mtbf": "mtbf_s",
        "restart": "restart_s",
        "storage": "storage_Bps",
        "price": "price_per_s",
    }
    said = {field: value for name, field in names.items() if (value := getattr(whole, name)) is not None}
    answer = job(found, clusters.get(cluster), Budget(**said))
    if json_:
        print_json({**found.to_dict(), "job": answer.to_dict()})
        return
    for thing in (found, "", answer):
        show(thing)
