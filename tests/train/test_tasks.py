"""Ready-made tasks: the course of a run, its samples, its comparison with others, its record."""

import gzip
import json
import math
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.errors import DataError, SpecError, UnknownName
from paceline.sim.timeline import Span, Timeline
from paceline.train.check import check
from paceline.train.launch import run
from paceline.train.record import Record
from paceline.train.tasks import Task, get
from paceline.train.tasks.compare import Runs, compare
from paceline.train.tasks.course import batches, course

HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}


def tiny(samples=100, batch=10):
    x, y = torch.zeros(samples, 2), torch.zeros(samples, dtype=torch.int64)
    return Task(
        name="tiny",
        model=lambda: torch.nn.Linear(2, 2),
        train=(x, y),
        test=(x, y),
        batch=batch,
        epochs=4,
        lr=0.1,
        momentum=0.9,
        warmup=0.1,
        target=0.5,
    )


def test_the_rate_rises_and_falls_to_nothing():
    steps = course(tiny())
    assert len(steps) == 40 and {step.batch for step in steps} == {10}
    rates = [step.rate for step in steps]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0]) and rates[4] == 1.0
    assert all(a > b for a, b in pairwise(rates[4:])) and 0 < rates[-1] < 0.01


def test_a_batch_that_grows_sees_as_many_samples_in_fewer_steps():
    steps = course(tiny(), growth=4, warmup=2)
    assert sum(step.batch for step in steps) == 400 and len(steps) < 40
    # the last takes what is left of the epochs
    assert [step.batch for step in steps[18:]] == [10, 10, 40, 40, 40, 80]
    assert steps[0].rate == 0.5 and steps[2].rate == 1.0
    assert steps[-1].rate == pytest.approx(100 / 160)  # there are 100 samples: beyond, the rate falls
    with pytest.raises(SpecError, match="1 to that, got 101"):
        course(tiny(), batch=101)


def test_samples_of_a_step_do_not_depend_on_where_a_run_began():
    sizes = [30, 30, 30, 30, 50, 30]
    whole = list(batches(tiny(), sizes, seed=3))
    assert [len(one) for one in whole] == sizes
    assert (
        sorted(torch.cat(whole)[:100].tolist()) == sorted(torch.cat(whole)[100:].tolist()) == list(range(100))
    )
    for start in range(6):
        assert [one.tolist() for one in batches(tiny(), sizes, seed=3, start=start)] == [
            one.tolist() for one in whole[start:]
        ]


def test_differences_are_taken_seed_by_seed():
    base = Runs(strategy="a", accuracies=(0.5, 0.7, 0.9), seconds=(1.0,) * 3, reached_s=(None,) * 3)
    other = Runs(strategy="b", accuracies=(0.49, 0.69, 0.89), seconds=(1.0,) * 3, reached_s=(None,) * 3)
    mean, half = other.against(base)
    assert mean == pytest.approx(-0.01) and half == pytest.approx(0, abs=1e-12) and other.interval > 0.4
    assert math.isnan(Runs(strategy="c", accuracies=(0.5,), seconds=(1.0,), reached_s=(None,)).interval)


def test_runs_side_by_side_are_the_runs_one_after_another():
    pytest.importorskip("sklearn")
    together = compare("digits-cnn", ["ddp", "terngrad"], world=2, seed=3, steps=12, jobs=2)
    apart = compare("digits-cnn", ["ddp", "terngrad"], world=2, seed=3, steps=12)
    assert [row.losses for row in together.rows] == [row.losses for row in apart.rows]
    assert len({loss for row in together.rows for loss in row.losses}) == 2


def test_uneven_shares_give_the_gradient_of_the_whole_batch_and_noise_is_recorded(tmp_path):
    pytest.importorskip("sklearn")
    runs = [
        {
            "task": "digits-cnn",
            "strategy": "allreduce",
            "steps": 5,
            "batch": 64,
            "noise": True,
            "record": str(tmp_path / "three"),
        }
    ]
    deferred = [
        {**runs[0], "strategy": name, "noise": False, "record": None}
        for name in ("overlap", "overlap:fc=factors")
    ]
    three, *others = run(
        "paceline.train.tasks.loop:several", world=3, arguments={"runs": [*runs, *deferred]}, timeout_s=200
    )[0]
    assert [one["final_loss"] for one in others] == pytest.approx([three["final_loss"]] * 2, rel=1e-4)
    two = run(
        "paceline.train.tasks.loop:several",
        world=2,
        arguments={"runs": [{**runs[0], "record": None}]},
        timeout_s=200,
    )[0][0]
    assert three["final_loss"] == pytest.approx(two["final_loss"], rel=1e-4)
    lines = [json.loads(line) for line in (tmp_path / "three" / "record.jsonl").read_text().splitlines()]
    scales = [line["noise_samples"] for line in lines if line["kind"] == "step"]
    assert len(scales) == 5 and all(scale is None or scale > 0 for scale in scales)
    measured = Timeline.load(tmp_path / "three" / "trace.json")
    assert {"compute", "communication (gradients)"} <= {span.stream for span in measured.spans}
    found = check(tmp_path / "three")
    both = Timeline.load(Path(found.trace))
    assert {span.stream for span in both.spans} - {span.stream for span in measured.spans} == {"predicted"}


def test_predicted_phases_lie_beside_measured_steps(tmp_path):
    spans = tuple(
        Span(name, "compute", start, end, "compute", {}, 0)
        for name, start, end in (
            ("forward", 0.0, 0.1),
            ("backward", 0.1, 0.4),
            ("update", 0.4, 0.41),
            ("forward", 0.5, 0.6),
            ("backward", 0.6, 0.9),
            ("update", 0.9, 0.91),
        )
    )
    with Record(tmp_path) as log:
        log.write("run", task="t", strategy="s", world=2)
        log.write(
            "predicted",
            compute_backward_s=0.15,
            seconds={"forward": 0.1, "backward": 0.2, "update": 0.01, "step": 0.31},
        )
        for step in range(1, 9):
            log.write("step", step=step, loss=1.0, forward_s=0.1, backward_s=0.3, update_s=0.01, step_s=0.41)
    assert check(tmp_path).trace is None  # a run without a timeline
    Timeline(spans, "t, s, 2 ranks").save(tmp_path / "trace.json")
    found = check(tmp_path)
    assert found.parts.endswith(f"both, step by step: {tmp_path / 'check.json'}")
    predicted = [span for span in Timeline.load(tmp_path / "check.json").spans if span.stream == "predicted"]
    assert [(span.name, round(span.start_s, 3), round(span.end_s, 3)) for span in predicted[:4]] == [
        ("forward", 0.0, 0.1),
        ("backward", 0.1, 0.25),
        ("wait for gradients", 0.25, 0.3),
        ("update", 0.3, 0.31),
    ]
    assert predicted[4].start_s == pytest.approx(0.5)


def test_tasks_are_what_they_say():
    pytest.importorskip("sklearn")
    deep = get("digits-deep")
    assert sum(p.numel() for p in deep.model().parameters()) == pytest.approx(180_000, rel=0.05)
    assert len(deep.train[1]) + len(deep.test[1]) == 1797
    text = get("text-mlp")
    assert (len(text.train[1]), len(text.test[1])) == (60_000, 20_000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"noise": True, "strategies": ["overlap"]}, "the noise scale is measured with ddp or allreduce"),
        ({"seeds": 0}, "count from 1"),
        ({"board": True}, "name one with --record"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    from paceline.errors import PacelineError

    with pytest.raises(PacelineError, match=message):
        compare("digits-cnn", arguments.pop("strategies", ["ddp"]), steps=2, **arguments)


def test_one_process_acts_out_what_ranks_do():
    from paceline.train.tasks import alone

    pytest.importorskip("sklearn")
    names = (
        "ddp",
        "terngrad",
        "dgc:ratio=0.01,warmup_steps=4",
        "dgc:ratio=0.01,momentum=0",
        "onebit",
        "powersgd",
    )
    runs = [
        {"task": "digits-cnn", "strategy": name, "steps": 10, "lr": 0.2, "weight_decay": 0.01}
        for name in names
    ]
    real = run("paceline.train.tasks.loop:several", world=2, arguments={"runs": runs}, timeout_s=200)[0]
    acted = alone.several([{**one, "world": 2} for one in runs])
    assert [one["final_loss"] for one in acted] == pytest.approx(
        [one["final_loss"] for one in real], rel=1e-5
    )
    assert [one["accuracy"] for one in acted] == [one["accuracy"] for one in real]
    with pytest.raises(SpecError, match="one process acts out"):
        alone.train("digits-cnn", "overlap", steps=1)


def test_asynchronous_updates_converge_by_default():
    pytest.importorskip("sklearn")
    found = compare("digits-cnn", ["ps-async"], world=4, steps=150, servers=1, staleness=8)
    assert found.rows[0].accuracy > 0.9


@pytest.mark.parametrize("nesterov", [False, True])
def test_dgc_that_sends_everything_is_sgd(nesterov):
    """Momentum and weight decay act as the optimizer's own, in layers that are compressed and in those that
    are not.
    """
    import torch

    from paceline.train.tasks.alone import Acted

    def trained(strategy):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.Tanh(), torch.nn.Linear(48, 3))
        opt = torch.optim.SGD(
            [{"params": net[0].parameters(), "weight_decay": 0.05}, {"params": net[2].parameters()}],
            lr=0.1,
            momentum=0.9,
            nesterov=nesterov,
        )
        acted = Acted(net, strategy, opt, 2)
        for _ in range(12):
            x = torch.randn(2, 16, 48)
            acted.mean(
                [
                    dict(
                        zip(
                            dict(net.named_parameters()),
                            torch.autograd.grad(net(part).square().mean(), list(net.parameters())),
                            strict=True,
                        )
                    )
                    for part in x
                ]
            )
            opt.step()
        return torch.cat([p.detach().reshape(-1) for p in net.parameters()])

    torch.testing.assert_close(trained("dgc:ratio=1,masking=false"), trained("ddp"))


def test_tensorboard_reads_what_the_record_says(tmp_path):
    pytest.importorskip("sklearn")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = compare("digits-cnn", ["allreduce"], world=2, steps=6, record=tmp_path, board=True)
    assert found.rows[0].strategy == "allreduce"
    steps = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    steps = [line for line in steps if line["kind"] == "step"]
    events = reader.EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "forward_s", "backward_s", "update_s", "step_s"}
    for name in events.Tags()["scalars"]:
        assert [(event.step, event.value) for event in events.Scalars(name)] == [
            (line["step"], pytest.approx(line[name], rel=1e-6)) for line in steps
        ], name


# -- tasks that ship, and data that users have -----------------------------------------------------


@pytest.mark.parametrize("name", ["digits-shifted", "text-small"])
def test_tasks_for_races_hold_their_validation_data_apart(name):
    found = get(name)
    assert len(found.train[1]) > 4096 and found.validation is not None
    parts = [{tuple(row) for row in x.flatten(1).tolist()} for x, _ in (found.validation, found.test)]
    # of a text, phrases come again
    assert len(parts[0] & parts[1]) < (0.05 * len(parts[0]) if name == "text-small" else 1)
    net = found.model()
    assert net(found.test[0][:2]).shape[1] > int(found.train[1].max())
    again = get(name)
    assert all(torch.equal(a, b) for a, b in zip(found.train, again.train, strict=True))


def test_copies_of_a_digit_are_all_on_one_side():
    """The middle of the nine places of a digit is the digit; without the noise no two sides share one."""
    from paceline.train.tasks import digits

    images, labels, order = digits._digits("digits-shifted")
    moved, named = digits._moved(images, labels, order[:3], 1, 0)
    assert len(moved) == 27 and named.tolist() == labels[order[:3]].repeat(9).tolist()
    apart = (moved[12:15] - images[order[:3]]).abs().mean()
    assert apart < 0.5 < (moved[:3] - images[order[:3]]).abs().mean()


def idx(array):
    """An array as files of MNIST have it."""
    magic = {3: 2051, 1: 2049}[array.ndim]
    return np.array([magic, *array.shape], dtype=">u4").tobytes() + array.astype(np.uint8).tobytes()


def test_mnist_is_read_from_its_files(tmp_path):
    chance = np.random.default_rng(0)
    for part, count in (("train", 40), ("t10k", 10)):
        images, labels = chance.integers(0, 256, (count, 28, 28)), np.arange(count) % 10
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))
    found = get(f"mnist:{tmp_path}")
    assert found.train[0].shape == (36, 1, 28, 28) and len(found.validation[1]) == 4
    assert found.test[1].tolist() == list(range(10))
    assert torch.equal(found.test[0][3, 0], torch.tensor(images[3], dtype=torch.float32) / 127.5 - 1)
    assert found.model()(found.test[0]).shape == (10, 10)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(labels)[:-1])
    with pytest.raises(DataError, match="its head and its length do not agree"):
        get(f"mnist:{tmp_path}")
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="neither t10k-labels-idx1-ubyte nor"):
        get(f"mnist:{tmp_path}")


def test_cifar_is_read_from_its_binary_version(tmp_path):
    chance = np.random.default_rng(0)
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    for name in names:
        records = chance.integers(0, 256, (8, 3073)).astype(np.uint8)
        records[:, 0] = np.arange(8)
        records.tofile(tmp_path / name)
    found = get(f"cifar10:{tmp_path}")
    assert found.train[0].shape == (36, 3, 32, 32) and found.test[1].tolist() == list(range(8))
    plane = torch.tensor(records[2, 1 : 1 + 1024].reshape(32, 32).astype(np.float32)) / 127.5 - 1
    assert torch.equal(found.test[0][2, 0], plane)
    (tmp_path / "test_batch.bin").write_bytes(b"x" * 3000)
    with pytest.raises(DataError, match="no whole number of records"):
        get(f"cifar10:{tmp_path}")
    (tmp_path / "test_batch.bin").unlink()
    with pytest.raises(DataError, match=r"no test_batch\.bin"):
        get(f"cifar10:{tmp_path}")


def test_images_are_read_from_folders_of_classes(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for part, count in (("train", 6), ("val", 2)):
        for label, color in enumerate(((255, 0, 0), (0, 0, 255))):
            folder = tmp_path / part / f"class-{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                image.new("RGB", (40 + number, 30), color).save(folder / f"{number}.png")
    found = get(f"images:{tmp_path}")
    assert found.train[0].shape == (11, 3, 32, 32) and found.test[1].tolist() == [0, 0, 1, 1]
    assert found.test[0][0, :, 0, 0].tolist() == [1.0, -1.0, -1.0]
    with pytest.raises(DataError, match="no folders of classes in train/"):
        get(f"images:{tmp_path / 'val'}")
    with pytest.raises(DataError, match="no such folder"):
        get(f"images:{tmp_path / 'none'}")
    with pytest.raises(UnknownName, match="images:FOLDER"):
        get("image")
