"""The options of `paceline analyze --sparsity`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from paceline.cli.options import whole

if TYPE_CHECKING:
    from paceline.capture.zeros import ZerosFound
    from paceline.spec.device import Device
    from paceline.spec.sparsity import PrunedRun, Sparsity
    from paceline.spec.workload import Workload

#: samples of a measured pass at most, on this machine's CPU
MOST_SAMPLES = 4
#: samples of the predicted step where none are given
USUAL_BATCH = 32
#: batches of a task that are measured
TASK_BATCHES = 4
#: updates before that
TASK_STEPS = 100

ShowSparsity = Annotated[
    bool,
    Parameter(
        negative="",
        help="zeros of activations, gradients and weights in a short real run, what storing them costs, and,"
        " with --device, what it gains from them; MODEL may also be a task of `paceline train`",
    ),
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SparsityOptions:
    """What goes with --sparsity alone."""

    after: Annotated[
        int | None,
        Parameter(
            converter=whole,
            help="with --sparsity: updates before zeros are counted; a task takes 100, other models are"
            " counted as they were built",
        ),
    ] = None
    prune: Annotated[
        int | None,
        Parameter(
            converter=whole,
            help="with --sparsity: also prune the task's network by every granularity and train it again,"
            " with so many seeds; --after shortens its training",
        ),
    ] = None

    @property
    def words(self) -> dict[str, object]:
        """The options as they are typed, with their values."""
        return {"--after": self.after, "--prune": self.prune}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """Zeros of a run, and the step that a prediction is made of."""

    zeros: ZerosFound
    samples: int
    steps: int
    workload: Workload
    pruned: tuple[PrunedRun, ...] = ()
    notes: tuple[str, ...] = ()


def analyze_sparsity(
    model: str, device: str | None, options: dict[str, Any], counted: SparsityOptions
) -> Sparsity:
    """The zeros of a network, and what a device gains from them."""
    from paceline.catalog import devices
    from paceline.spec import checks
    from paceline.spec.sparsity import Sparsity
    from paceline.spec.workload import ITEMSIZE
    from paceline.train.tasks import TASKS
    from paceline.whatif.sparsity import device_gains, storage

    for name, value, least in (("after", counted.after, 0), ("prune", counted.prune, 1)):
        if value is not None:
            checks.whole(name, value, least=least)
    _refuse_options(model, options, model in TASKS)
    where = devices.get(device) if device is not None else None
    found = _task(model, options, counted) if model in TASKS else _module(model, options, counted)
    layers, workload = found.zeros.layers, found.workload
    size = ITEMSIZE[workload.precision.removeprefix("amp_")]
    return Sparsity(
        model=workload.name,
        batch=workload.batch,
        samples=found.samples,
        steps=found.steps,
        layers=layers,
        activations=found.zeros.activations,
        storage=tuple(storage(layers, 8 * size)),
        pruned=found.pruned,
        gains=tuple(device_gains(workload, layers, where)) if where is not None else (),
        notes=(*found.notes, _predicted_for(workload, where)),
    )


def _refuse_options(model: str, options: dict[str, Any], task: bool) -> None:
    from paceline.errors import SpecError

    if model.endswith(".json") and not model.startswith("hf:"):
        raise SpecError(f"{model} is a captured workload, which has no values; name the model itself")
    refused = ["compile", "checkpointing", *(("seq", "image") if task else ())]
    given = [name for name in refused if name in options]
    if given:
        raise SpecError(f"--{given[0]} does not go with --sparsity of {model}; leave it out")


def _predicted_for(workload: Workload, device: Device | None) -> str:
    if device is None:
        return "--device names a device to predict gains on, such as h200"
    return f"gains are predicted for batch {workload.batch} in {workload.precision}"


def _task(name: str, options: dict[str, Any], counted: SparsityOptions) -> _Measured:
    """A task after some of its training, on batches of its data."""
    from paceline.capture import capture
    from paceline.capture.zeros import count_zeros
    from paceline.spec import checks
    from paceline.train.tasks import get
    from paceline.train.tasks.pruned import measured_passes, pruned_runs, trained

    chosen, taken = get(name), TASK_STEPS if counted.after is None else counted.after
    network = trained(chosen, 0, taken)
    zeros = count_zeros(network, measured_passes(network, chosen, TASK_BATCHES))
    batch = checks.whole("batch", options.get("batch", chosen.batch))
    samples = chosen.train[0]
    inputs = samples[[place % len(samples) for place in range(batch)]]
    runs = pruned_runs(name, range(counted.prune), counted.after) if counted.prune is not None else []
    captured = capture((chosen.model(), (inputs,)), fold=False, **{**options, "batch": batch})
    return _Measured(
        zeros=zeros,
        samples=TASK_BATCHES * chosen.batch,
        steps=taken,
        workload=replace(captured, name=name),
        pruned=tuple(runs),
    )


def _module(model: str, options: dict[str, Any], counted: SparsityOptions) -> _Measured:
    """Any other model, on the inputs that it was built with."""
    from paceline.capture import capture
    from paceline.errors import SpecError
    from paceline.train.tasks import TASKS

    if counted.prune is not None:
        raise SpecError(f"--prune needs data and accuracy: it takes a task ({', '.join(TASKS)}), not {model}")
    workload = capture(model, fold=False, **{"batch": USUAL_BATCH, **options})

    from paceline.capture import real_step
    from paceline.capture.zeros import count_zeros

    real_step.check_size(workload)
    sizes = {name: options[name] for name in ("seq", "image") if name in options}
    samples = min(workload.batch, MOST_SAMPLES)
    job = real_step.real_step(model, batch=samples, **sizes)
    real_step.take_steps(job, counted.after or 0)
    return _Measured(
        zeros=count_zeros(job.module, real_step.passes(job)),
        samples=samples,
        steps=counted.after or 0,
        workload=workload,
        notes=(_as_built(model),),
    )


def _as_built(model: str) -> str:
    if ":" in model:
        return "counted on the weights and inputs that were built: load trained ones there to see theirs"
    return "counted on random inputs and initial weights: a trained network has other zeros"
