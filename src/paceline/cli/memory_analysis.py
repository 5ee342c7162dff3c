"""The options of `paceline analyze --memory`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

if TYPE_CHECKING:
    from paceline.spec.memory_frontier import MemoryFrontier

Within = Annotated[
    str | None,
    Parameter(
        help="with --memory: choose the fastest policy that needs at most so much, such as 20GB; by default"
        " the memory of the device"
    ),
]
Apply = Annotated[
    Path | None,
    Parameter(help="with --memory: write the chosen policy to a file that paceline.train.recompute takes"),
]


def analyze_memory(
    model: str, device: str | None, options: dict[str, Any], within: str | None, apply: Path | None
) -> tuple[MemoryFrontier, list[str]]:
    """The frontier of a model, and lines about the policy that was chosen."""
    from paceline import units
    from paceline.catalog import devices
    from paceline.errors import SpecError
    from paceline.whatif.memory_frontier import memory_frontier

    if device is None:
        raise SpecError("--memory needs a device: --device h200; `paceline devices` lists them")
    if model.endswith(".json") and not model.startswith("hf:"):
        raise SpecError(
            f"{model} is a captured workload, which no longer knows its modules; name the model itself"
        )
    limit = None if within is None else units.parse(within, "bytes")
    found = memory_frontier(model, devices.get(device), **options)
    if within is None and apply is None:
        return found, []
    chosen = found.within(found.available_bytes if limit is None else limit)
    lines = [f"chosen: {chosen.name}: {chosen.words}"]
    lines += [f"    {span}" for span in chosen.policy.outer]
    if chosen.policy.offload:
        lines.append(f"    to the host: {', '.join(chosen.policy.offload)}")
    if apply is not None:
        chosen.policy.save(apply)
        lines.append(f"written: {apply}; in your program, before parallelize:")
        lines.append(f"    from paceline.train import recompute; recompute(model, {str(apply)!r})")
    return found, lines
