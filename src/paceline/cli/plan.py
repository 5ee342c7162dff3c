"""`paceline plan`: the best way to run a model on a cluster, with a certificate."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from cyclopts import Parameter

from paceline.cli.job import Price
from paceline.cli.options import (
    Image,
    Json,
    LearningFile,
    Optimizer,
    Precision,
    RequireFit,
    end,
    print_json,
    show,
    whole,
)

if TYPE_CHECKING:
    from paceline.plan.request import Progress
    from paceline.spec.planned import Question

Words = Annotated[list[str] | None, Parameter(consume_multiple=True)]


def plan(
    model: str,
    /,
    *,
    cluster: Annotated[
        str | None,
        Parameter(help="a cluster such as 32xdgx-h100, or several with commas; or use --gpus and --device"),
    ] = None,
    gpus: Annotated[
        str | None, Parameter(help="numbers of devices to choose from, such as 64..4096; needs --device")
    ] = None,
    device: Annotated[str | None, Parameter(name=["--device", "-d"], help="the device of --gpus")] = None,
    gbs: Annotated[str | None, Parameter(help="global batch size in samples; several with commas")] = None,
    seq: Annotated[
        str | None, Parameter(help="tokens per sample, for text models; several with commas")
    ] = None,
    image: Image = None,
    precision: Precision | None = None,
    optimizer: Optimizer = None,
    objective: Annotated[str | None, Parameter(help="time (the default), cost or energy")] = None,
    tokens: Annotated[
        str | None, Parameter(help="tokens of the whole job, such as 300B; adds its time and cost")
    ] = None,
    deadline: Annotated[
        str | None, Parameter(help="longest time of the job, such as 30d; needs --tokens")
    ] = None,
    price: Price = None,
    fix: Annotated[Words, Parameter(help="words that every plan must have, such as tp=8")] = None,
    forbid: Annotated[
        Words, Parameter(help="words or fields that no plan may have, such as offload or zb-v")
    ] = None,
    allow: Annotated[
        Words,
        Parameter(help="may change training results: fp8; for captured models compress, staleness, batch"),
    ] = None,
    top: Annotated[
        int | None,
        Parameter(converter=whole, help="number of plans to list; default 10, in a study 1 per question"),
    ] = None,
    pareto: Annotated[
        str | None, Parameter(help="also list the Pareto front over some of time,cost,energy,memory,gpus")
    ] = None,
    most: Annotated[
        int | None,
        Parameter(converter=whole, help="most plans to simulate; default 256, for a captured model all"),
    ] = None,
    engine: Annotated[
        str,
        Parameter(help="where to run a study of several questions: local, or ray (an existing Ray cluster)"),
    ] = "local",
    measure: Annotated[
        int | None,
        Parameter(
            converter=whole,
            help="number of best plans to run on this machine; their times correct the ranking",
        ),
    ] = None,
    learning: LearningFile = None,
    emit: Annotated[
        str | None,
        Parameter(
            help=(
                "write configurations for: torchrun,fsdp2,megatron,deepspeed,accelerate,torchtitan,slurm, or"
                " your own"
            )
        ),
    ] = None,
    output: Annotated[
        Path | None, Parameter(name=["--output", "-o"], help="folder for --emit; default run")
    ] = None,
    html: Annotated[Path | None, Parameter(help="also write the answer as an HTML page")] = None,
    require_fit: RequireFit = False,
    json_: Json = False,
) -> None:
    """Find the best plan: degrees, batch split, schedule, sharding, recomputation; proven within a gap, with
    the runners-up and why they lost.

    Parameters
    ----------
    model
        a transformer of the catalog or hf:PATH, for the whole space of plans; any other model is captured and
        gets data-parallel plans. Several models with commas, or a study's .toml file, are planned in one run;
        flags are defaults of the file
    """
    from paceline import units
    from paceline.errors import DoesNotFit, SpecError
    from paceline.plan.study import questions, read

    if output is not None and not emit:
        raise SpecError("--output is the folder of --emit; say what to write, such as --emit torchrun")
    words = {
        "fix": _split(fix),
        "forbid": _split(forbid),
        "allow": _split(allow),
        "pareto": _split([pareto] if pareto else None),
    }
    numbers = {
        "tokens": units.parse(tokens, "count") if tokens else None,
        "deadline_s": units.parse(deadline, "time") if deadline else None,
    }
    said: dict[str, Any] = {
        **words,
        **numbers,
        "objective": objective,
        "top": top,
        "most": most,
        "image": image,
        "precision": precision,
        "optimizer": optimizer,
        "gpus": gpus,
        "device": device,
        "price_per_s": price,
    }
    options = {name: value for name, value in said.items() if value not in (None, [])}
    batches = _numbers("--gbs", gbs)
    if learning is not None:
        batches = _batches(learning, batches, words["allow"], objective)
    axes: dict[str, Any] = {"clusters": _list(cluster), "gbs": batches, "seq": _numbers("--seq", seq)}
    if model.endswith(".toml"):
        asked = read(Path(model), {name: value for name, value in {**axes, **options}.items() if value})
    else:
        asked = questions(_list(model), **axes, **options)
    try:
        if len(asked) > 1 or model.endswith(".toml") or engine != "local" or learning is not None:
            fits = _study(asked, engine, html, json_, {"--emit": emit, "--measure": measure}, learning)
        else:
            _single(asked[0], measure, _split([emit]) if emit else [], output or Path("run"), html, json_)
            fits = True  # a plan that does not fit is never the best
    except DoesNotFit as error:
        if not require_fit:
            raise
        print(f"paceline: {error}", file=sys.stderr)
        fits = False
    end(fits, require_fit)


def _single(
    question: Question, measure: int | None, emit: list[str], output: Path, html: Path | None, json_: bool
) -> None:
    from paceline import units
    from paceline.api import plan as run

    q = question
    with _progress(json_) as progress:
        if measure is None:
            found = run(
                q.model,
                q.cluster,
                gpus=q.gpus,
                device=q.device,
                gbs=q.gbs,
                seq=q.seq,
                progress=progress,
                **q.options,
            )
        else:
            from paceline.bench.tune import tune

            found = tune(q, measure, progress=progress)
    if html is not None:
        from paceline.report import page
        from paceline.report.plan import planned_html

        page.write(html, planned_html(found))
    written = []
    if emit:
        from paceline.plan.emit import emit as write

        written = write(found, emit, output)
    if json_:
        print_json(found.to_dict())
    else:
        show(found)
        for path in written:
            print(f"wrote {path}")
    if found.interrupted:
        _stop(
            f"the best so far is {found.best.plan}, {units.show(found.best.prediction.step_s, 'time')} per"
            " step"
        )


def _study(
    asked: Sequence[Question],
    engine: str,
    html: Path | None,
    json_: bool,
    single: dict[str, object],
    learning: str | None,
) -> bool:
    """Prints the answers; returns whether each question has a plan that fits."""
    from paceline.api import study
    from paceline.errors import SpecError

    wrong = next((name for name, value in single.items() if value is not None), None)
    if wrong:
        raise SpecError(
            f"{wrong} is for one question, and this is a study of {len(asked)}; ask for one model, cluster"
            " and batch"
        )
    with _progress(json_) as progress:

        def tell(done: int, total: int) -> None:
            if progress:
                progress("planning", done, total, 0.0)

        found = study(asked, engine=engine, progress=tell, learning=learning)
    if html is not None:
        from paceline.report import page
        from paceline.report.plan import study_html

        page.write(html, study_html(found))
    if json_:
        print_json(found.to_dict())
    else:
        show(found)
    if found.interrupted:
        _stop(f"{len(found.answers)} of {len(asked)} questions have answers")
    return all(answer.planned is not None for answer in found.answers)


def _batches(learning: str, said: list[int], allow: list[str], objective: str | None) -> list[int]:
    """The batches to choose from by time to the target: as said, or those round the critical batch."""
    from paceline.errors import SpecError
    from paceline.spec.learning import named
    from paceline.spec.synchronisation import PLAIN

    if allow:
        raise SpecError(
            f"--learning chooses the batch of plans that learn alike; --allow {','.join(allow)} changes what"
            " they learn: leave one of them out"
        )
    if objective not in (None, "time"):
        raise SpecError(f"--learning chooses by time, not by {objective}; leave --objective out")
    record, name = named(learning)
    return said or list(record.curve(PLAIN, name).candidates())


def _stop(reached: str) -> NoReturn:
    """Ends with the exit code of Ctrl-C, after printing the best plan so far."""
    raise KeyboardInterrupt(reached)


def _list(text: str | None) -> list[str]:
    """The parts of a comma-separated list."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _numbers(name: str, text: str | None) -> list[int]:
    from paceline.errors import SpecError

    wrong = next((word for word in _list(text) if not word.isdigit() or not int(word)), None)
    if wrong is not None:
        raise SpecError(f"{name} takes whole numbers above zero, such as 512 or 256,512; got {wrong!r}")
    return [int(word) for word in _list(text)]


def _split(words: list[str] | None) -> list[str]:
    return [word for text in words or () for word in text.replace(",", " ").split()]


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress | None]:
    """A progress bar on stderr if that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bars

    with Bars(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("planning", total=None)
        yield lambda what, done, total, best: bars.update(task, description=what, completed=done, total=total)
