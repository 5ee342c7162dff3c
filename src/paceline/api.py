"""The functions behind `paceline.capture`, `paceline.predict` and `paceline.plan`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from paceline import units
from paceline.capture import capture
from paceline.catalog import clusters, devices, frameworks, transformers
from paceline.cost.curves import Curves
from paceline.errors import DoesNotFit, PacelineError, SpecError, UnknownName, UnknownSizes, nearest
from paceline.predict import simulated
from paceline.predict.step import Conditions
from paceline.predict.step import predict as predict_workload
from paceline.spec import checks
from paceline.spec.cluster import Cluster
from paceline.spec.device import Device
from paceline.spec.framework import Framework
from paceline.spec.learning import named
from paceline.spec.plan import Plan
from paceline.spec.prediction import DistributedPrediction, Prediction
from paceline.spec.transformer import Transformer
from paceline.spec.vocabulary import PLAN_PRECISIONS, Recompute
from paceline.spec.workload import Workload

if TYPE_CHECKING:
    from paceline.spec.planned import Answer, Planned, Question, Study

__all__ = ["capture", "plan", "predict", "study"]


@overload
def predict(
    model: Any,
    device: Device | str,
    *,
    framework: Framework | str | None = ...,
    curves: Curves | None = ...,
    trace: bool = ...,
    **options: Any,
) -> Prediction: ...
@overload
def predict(
    model: Any,
    device: Plan | str,
    cluster: Cluster | str,
    *,
    framework: Framework | str | None = ...,
    curves: Curves | None = ...,
    trace: bool = ...,
    **options: Any,
) -> DistributedPrediction: ...
@overload
def predict(
    model: Any,
    *,
    cluster: Cluster | str,
    plan: Plan | str = ...,
    framework: Framework | str | None = ...,
    curves: Curves | None = ...,
    trace: bool = ...,
    **options: Any,
) -> DistributedPrediction: ...


def predict(
    model: Any,
    device: Device | Plan | str | None = None,
    cluster: Cluster | str | None = None,
    *,
    plan: Plan | str | None = None,
    framework: Framework | str | None = None,
    curves: Curves | None = None,
    trace: bool = False,
    **options: Any,
) -> Prediction | DistributedPrediction:
    """Predict one training step of `model` on a device, or on a cluster under a plan (the second argument, or
    by name).

        predict(model, "h200")
        predict(model, plan="dp=fsdp tp=8 gbs=1024", cluster="32xdgx-h100")
        predict(model, Plan(tp=8, gbs=1024), "32xdgx-h100")

    `model` is a workload, a file with a saved one (`.json`), or whatever `paceline.capture` takes; `options`
    are those of `paceline.capture`. On a cluster, a transformer of the catalog (or a `Transformer`, or an
    `hf:PATH` that its sizes describe) takes every plan, and the plan says batch, sequence and precision;
    anything else is captured with the plan's micro-batch and takes data parallel, sharded and pipelined
    plans. With `trace`, the answer carries its timeline.

    `framework` is who runs the step: a name of `paceline.catalog.frameworks`, a `.toml` file, or a
    `Framework`; the word `framework=` of a plan says the same. `curves` are operator constants other than the
    device's own.
    """
    if cluster is None:
        if device is None or isinstance(device, Plan) or plan is not None:
            raise SpecError("give a device for one device, or a cluster (and a plan) for many")
        target = device if isinstance(device, Device) else devices.get(device)
        style = _framework(framework or frameworks.USUAL, "modules")
        return predict_workload(
            _workload(model, options), target, Conditions(framework=style, curves=curves), trace=trace
        )
    if device is not None and (plan is not None or isinstance(device, Device)):
        raise SpecError("give a device for one device, or a cluster (and a plan) for many, not both")
    words = "" if device is None else device
    if plan is not None:
        words = plan
    chosen = words if isinstance(words, Plan) else Plan.parse(str(words))
    where = cluster if isinstance(cluster, Cluster) else clusters.get(cluster)
    if framework is not None and chosen.framework:
        raise SpecError(
            f"the plan names framework {chosen.framework}; give it there or as an argument, not both"
        )
    sized = sizes(model)
    if sized is None:
        captured = _workload(
            model,
            (
                options
                if isinstance(model, Workload) or _saved(model)
                else settings(chosen, str(words), options)
            ),
        )
        style = _framework(framework or chosen.framework or frameworks.USUAL, "modules")
        conditions = Conditions(framework=style, curves=curves)
        return simulated.predict(captured, where, chosen, conditions, trace=trace)
    named = framework or chosen.framework
    runs = _framework(named, "transformers") if named else None
    asked = worded(chosen, str(words), options)
    conditions = Conditions(framework=runs, curves=curves)
    return simulated.predict(sized, where, asked, conditions, trace=trace)


def _framework(framework: Framework | str, runs: str) -> Framework:
    return framework if isinstance(framework, Framework) else frameworks.running(framework, runs)


def plan(
    model: Any,
    cluster: Cluster | str | None = None,
    *,
    gpus: str | None = None,
    device: str | None = None,
    gbs: int | None = None,
    seq: int | None = None,
    objective: str = "time",
    fix: Sequence[str] = (),
    forbid: Sequence[str] = (),
    allow: Sequence[str] = (),
    tokens: float | None = None,
    deadline_s: float | None = None,
    top: int = 10,
    pareto: Sequence[str] = (),
    most: int | None = None,
    price_per_s: float | str | None = None,
    processes: int | None = None,
    progress: Any = None,
    **options: Any,
) -> Planned:
    """The best plan of `model` on a cluster, or on so many devices (`gpus="64..4096", device="h100-sxm"`),
    with a certificate.

    `fix`, `forbid` and `allow` are words as a plan has them. A transformer known by its sizes gets the whole
    space of plans, of which at most `most` (256) are simulated; anything else is captured with `options` and
    shares its work by data, and all its plans are simulated unless `most` says less. `price_per_s` is USD per
    second of a device, or a text such as "2.5USD/h"; by default the catalog's.
    """
    from paceline.plan.general import plan_module
    from paceline.plan.request import Request, silent
    from paceline.plan.run import plan_transformer

    gbs, seq, most, processes = (
        None if size is None else checks.whole(name, size)
        for name, size in (("gbs", gbs), ("seq", seq), ("most", most), ("processes", processes))
    )
    top = checks.whole("top", top)
    tokens = checks.above_zero("tokens", tokens, "count")
    deadline_s = checks.above_zero("deadline_s", deadline_s, "time")
    fix, forbid, allow, pareto = (_split(words) for words in (fix, forbid, allow, pareto))
    where = _clusters(cluster, gpus, device)
    if price_per_s is not None:
        rate = price_per_s
        if isinstance(rate, str):  # a text without a unit is per hour, a number per second
            rate = units.parse(rate, "price_rate")
        where = tuple(one.priced(rate) for one in where)
    asked = Request(
        where=where,
        gbs=gbs,
        seq=seq,
        objective=objective,
        fix=fix,
        forbid=forbid,
        allow=allow,
        tokens=tokens,
        deadline_s=deadline_s,
        top=top,
        pareto=pareto,
        most=most,
        processes=processes,
        progress=progress or silent,
    )
    sized = sizes(model)
    if sized is not None:
        if options:
            raise SpecError(_not_captured(next(iter(options)), sized.name))
        return plan_transformer(sized, asked)
    if tokens or deadline_s:
        raise SpecError(f"tokens and a deadline are for models known by their sizes, not for {model}")
    return plan_module(Workload.load(Path(model)) if _saved(model) else model, asked, options)


def _split(words: Sequence[str] | str) -> list[str]:
    """Words that are given one by one, or several in a text."""
    if isinstance(words, str):
        return words.replace(",", " ").split()
    if not isinstance(words, Iterable):
        raise SpecError(f"words are given in a text or in a list, got {words!r}")
    return [checks.text("a word of a plan", word) for word in words]


def _not_captured(option: str, model: str) -> str:
    """Why an option does not go with a transformer known by its sizes."""
    own = inspect.signature(plan).parameters
    if close := nearest(option, [name for name in own if name != "options"], 1):
        return f"plan: unknown option {option!r}; did you mean {close[0]!r}?"
    if option == "precision":
        return f"precision is for captured models; for {model} it is a word of --fix, such as --fix bf16"
    return f"{option} is for captured models, and {model} is known by its sizes; leave it out"


def study(
    asked: Sequence[Question], *, engine: str = "local", progress: Any = None, learning: str | None = None
) -> Study:
    """Many questions planned in one go (`paceline.plan.study.questions`); a question without a plan is
    answered with the reason. With `learning`, a record as `paceline.spec.learning.named` reads it, answers
    have the time to its target, and the batch that is there first is known.

    `engine="ray"` fans them out over an existing Ray cluster, with the same answers.
    """
    from paceline.plan.study import study as run

    found = run(asked, _answer if engine == "local" else _answer_alone, engine=engine, progress=progress)
    if learning is None:
        return found
    record, curve = named(learning)
    answers = (
        answer
        if answer.planned is None
        else replace(answer, to_target=record.time(answer.planned.best.prediction, curve))
        for answer in found.answers
    )
    return replace(found, answers=tuple(answers))


def _answer(question: Question, processes: int | None = None) -> Answer:
    from paceline.spec.planned import Answer

    q = question
    try:
        found = plan(
            q.model,
            q.cluster,
            gpus=q.gpus,
            device=q.device,
            gbs=q.gbs,
            seq=q.seq,
            processes=processes,
            **q.options,
        )
    except PacelineError as error:
        return Answer(question=question, error=str(error), fits=not isinstance(error, DoesNotFit))
    return Answer(question=question, planned=found)


def _answer_alone(question: Question) -> Answer:
    """With one process: other questions have the other cores."""
    return _answer(question, processes=1)


def _clusters(cluster: Cluster | str | None, gpus: str | None, device: str | None) -> tuple[Cluster, ...]:
    """The clusters to choose from."""
    from paceline.plan.run import sizes as of_sizes

    if (cluster is None) == (gpus is None) or (gpus is None) != (device is None):
        raise SpecError(
            "give a cluster, or a number of GPUs and their device (--gpus 64..4096 --device h100-sxm)"
        )
    if cluster is not None:
        return (cluster if isinstance(cluster, Cluster) else clusters.get(cluster),)
    low, _, high = str(gpus).partition("..")
    if not low.isdigit() or (high and not high.isdigit()) or int(low) < 1 or int(high or low) < int(low):
        raise SpecError(f"--gpus takes a number or a range such as 64..4096, got {gpus!r}")
    return of_sizes(devices.get(str(device)).name, int(low), int(high or low))


def sizes(model: Any) -> Transformer | None:
    """The transformer where a model is known by its sizes, so that all plans apply; any other is captured."""
    if isinstance(model, Transformer):
        return model
    if not isinstance(model, str) or _saved(model):
        return None
    try:
        return transformers.get(model)
    except UnknownSizes:
        return None
    except PacelineError:
        if model.startswith("hf:"):
            raise
        return None


def settings(plan: Plan, text: str, options: dict[str, Any]) -> dict[str, Any]:
    """How to capture a model for a plan: as the options say, else as the plan does (`mbs`, `seq`, a
    precision, `recompute=full`).
    """
    said = plan.precision != Plan.precision or Plan.precision in text
    found = {
        "batch": plan.mbs or None,
        "seq": plan.seq or None,
        "precision": plan.precision if said else None,
        "checkpointing": True if plan.recompute is Recompute.FULL else None,
    }
    return {**{name: value for name, value in found.items() if value is not None}, **options}


def worded(plan: Plan, text: str, options: dict[str, Any]) -> Plan:
    """The plan of a transformer known by its sizes, with the options that a plan has: `seq` and `precision`.

    `text` is the plan as the user wrote it. An option that contradicts it is refused, as are options that
    only captures have.
    """
    for name, value in options.items():
        if name not in ("seq", "precision"):
            words = "batch, sequence, precision and recomputation are words of the plan"
            raise SpecError(f"{name} does not go with a cluster; {words}")
        if name == "precision" and value not in PLAN_PRECISIONS:
            raise SpecError(
                f"precision {value!r} is for captured models; a plan takes {', '.join(PLAN_PRECISIONS)}"
            )
        planned = getattr(plan, name)
        said = planned != getattr(Plan, name) or (name == "precision" and planned in text)
        if said and planned != value:
            raise SpecError(f"{name} is given twice: {value}, and {planned} in the plan; leave one out")
    return replace(plan, **options)


def _saved(model: Any) -> bool:
    return isinstance(model, str) and model.endswith(".json") and not model.startswith("hf:")


def _workload(model: Any, options: dict[str, Any]) -> Workload:
    """A captured workload as it is, anything else captured."""
    if not isinstance(model, Workload) and not _saved(model):
        known = list(inspect.signature(capture).parameters)[1:]
        for option in options:
            if option not in known:
                raise UnknownName("option", option, known, f"options of a capture are {', '.join(known)}")
        return capture(model, **options)
    saved = model if isinstance(model, Workload) else Workload.load(Path(model))
    compiled = options.pop("compile", False)
    if options:
        name = model.name if isinstance(model, Workload) else model
        raise SpecError(
            f"{name} is a captured workload, whose {next(iter(options)).replace('_', '-')} is fixed; capture"
            " it again to change it"
        )
    if not compiled:
        return saved
    from paceline.capture.fuse import fuse

    return fuse(saved)
