"""Each example of examples/extend works as the package's own parts do; a file runs only where it is named."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline as pl
from paceline import cli, extend, sync
from paceline.catalog import clusters, transformers
from paceline.cost.compression import model_bytes
from paceline.errors import PlanError, SpecError
from paceline.plan import emit
from paceline.plan.bound import bounds
from paceline.plan.space import Limits, Space
from paceline.plan.table import Table
from paceline.predict.distributed import TransformerStep
from paceline.predict.simulated import predict_step
from paceline.sched import ClusterShape, Job, ScaledSpeed, policies
from paceline.sched.live import Daemon, DaemonSettings
from paceline.sched.simulate import simulate
from paceline.sim.schedules import in_flight, in_order
from paceline.spec import compression, schedules
from paceline.spec.plan import Plan
from paceline.spec.synchronisation import AVERAGES
from paceline.train import strategies
from paceline.train.launch import run
from paceline.whatif.compare import compare
from paceline.whatif.subject import Subject

EXAMPLES = Path(__file__).parents[1] / "examples" / "extend"
REGISTRIES = (
    policies.POLICIES,
    emit.EMITTERS,
    schedules.SCHEDULES,
    compression.SCHEMES,
    sync.WAYS,
    strategies.STRATEGIES,
)
#: ranks import their functions from here, and the package that is tested
HERE = {"PYTHONPATH": os.pathsep.join(map(str, (Path(__file__).parent, Path(pl.__file__).parents[1])))}


@contextmanager
def forgotten():
    """Whatever is registered within is gone after it."""
    before, modules = [dict(registry) for registry in REGISTRIES], set(sys.modules)
    averages = list(AVERAGES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extend, "_files", [])
        try:
            yield
        finally:
            for registry, kept in zip(REGISTRIES, before, strict=True):
                registry.clear()
                registry.update(kept)
            AVERAGES[:] = averages
            for name in set(sys.modules) - modules:
                if str(getattr(sys.modules[name], "__file__", "")).startswith(str(EXAMPLES)):
                    del sys.modules[name]


@pytest.fixture
def unchanged():
    with forgotten():
        yield


@pytest.fixture
def load(unchanged):
    return lambda name: extend.load(EXAMPLES / f"{name}.py")


@pytest.fixture
def call(unchanged, capsys):
    """Runs the command line in this process: (exit code, stdout, stderr)."""

    def run(*words):
        code = 0
        try:
            cli.main([str(word) for word in words])
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()

    return run


def ranks(function, **arguments):
    """What two ranks return."""
    return run(f"extend_workers:{function}", world=2, arguments=arguments, environment=HERE, timeout_s=250)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 80 and max(map(len, lines)) <= 110


# -- loading ---------------------------------------------------------------------------------------


REGISTER = "from paceline.sched.policies import register\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("json.py", "", "there is a module called 'json' already; give the file another name"),
        ("mine.txt", "", "expected a Python file, FILE.py"),
        ("wrong.py", "1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
        (
            "taken.py",
            f"{REGISTER}register(dict, name='fifo')",
            "'fifo' is registered already, by .*ranked.py",
        ),
        ("nameless.py", f"{REGISTER}register(dict)", "a policy is registered by its name"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_one_line(call, tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    code, out, err = call("--extend", tmp_path / name, "devices")
    assert code == 2 and not out and err.count("\n") == 1 and name in err
    with pytest.raises(SpecError, match=message):
        extend.load(tmp_path / name)


def test_a_file_is_named_before_the_command_or_among_its_options(call):
    absent = ["--extend", "absent.py"]
    for words in ([*absent, "devices"], ["predict", "gpt2", *absent, "--device", "h200"]):
        code, _, err = call(*words)
        assert code == 2 and "--extend absent.py: no file" in err, words
    for words in (("--help",), ("predict", "--help")):
        assert "--extend" in call(*words)[1], words


def test_nothing_runs_that_nobody_names(tmp_path):
    for name in ("policy.py", "paceline_policy.py", "sitecustomize_.py"):
        (tmp_path / name).write_text("raise SystemExit('it ran')")
    words = [sys.executable, "-m", "paceline.cli", "simulate", "--jobs", "3", "--policy", "fifo", "--json"]
    variables = {**HERE, "PYTHONSAFEPATH": "1", "PACELINE_EXTEND": str(tmp_path / "policy.py")}
    done = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["policies"][0]["policy"] == "fifo"


def test_a_file_runs_once_and_may_import_its_neighbours(unchanged, tmp_path):
    (tmp_path / "beside.py").write_text("NAME = 'patient'\n")
    file = tmp_path / "extension_of_a_test.py"
    file.write_text(
        f"import beside\n{REGISTER}from paceline.sched.policies.ranked import Fifo\n"
        "register(lambda **options: Fifo(**options), name=beside.NAME, title='as fifo')\n"
    )
    try:
        assert extend.load(file) is extend.load(file)
        assert extend.loaded() == (str(file),) and extend.taken([*extend.words(), "left"]) == ["left"]
        assert policies.POLICIES["patient"][1] == "as fifo" and str(tmp_path) not in sys.path
    finally:
        for name in ("beside", file.stem):
            sys.modules.pop(name, None)


# -- policy ----------------------------------------------------------------------------------------


def test_policy_decides(load):
    load("policy")
    jobs = [
        Job(name="large", work=100.0, devices=4, speed=ScaledSpeed(1.0), submit_s=0.0),
        Job(name="next", work=100.0, devices=4, speed=ScaledSpeed(1.0), submit_s=1.0),
        *(
            Job(name=f"s{i}", work=100.0, devices=1, speed=ScaledSpeed(1.0), submit_s=2.0 + i)
            for i in range(8)
        ),
    ]

    def starts(policy):
        done = simulate(jobs, ClusterShape.parse("1x4xv100"), policies.get(policy)).done
        return [one.name for one in sorted(done, key=lambda one: one.start_s)]

    assert starts("smallest")[-1] == "next"
    assert starts("smallest(patience_s=0)")[1] == "next"


def test_policy_on_the_command_line_and_in_other_processes(call):
    words = ["simulate", "--policy", "smallest(patience_s=60),fifo", "--jobs", "40", "--json"]
    found = []
    for more in ((), ("--processes", "2")):
        code, out, err = call("--extend", EXAMPLES / "policy.py", *words, *more)
        assert code == 0, err
        rows = json.loads(out)["policies"]
        found.append([{key: row[key] for key in ("policy", "avg_jct_s", "jobs")} for row in rows])
    assert found[0] == found[1] and found[0][0]["policy"] == "smallest(patience_s=60)"


def test_policy_drives_the_live_scheduler(load, tmp_path):
    mine = load("policy").Smallest
    setup = DaemonSettings(state=tmp_path, nodes="2x1", policy="smallest(patience_s=9)")
    daemon = Daemon(setup, say=lambda text: None)
    try:
        policy = daemon.ledger.machine.state.policy
        assert isinstance(policy, mine) and policy.patience_s == 9
    finally:
        daemon.close()


# -- emitter ---------------------------------------------------------------------------------------


def test_emitter(load, call, tmp_path):
    load("emitter")
    words = ["fsdp", "tp=1", "pp=1", "cp=1", "offload=none", "recompute=none", "mbs=1"]
    planned = pl.plan("llama3-8b", "2xdgx-h100", gbs=64, seq=2048, fix=words, most=2)
    written = emit.emit(planned, ["skypilot", "torchrun"], tmp_path / "run")
    assert "task.yaml" in {path.name for path in written}
    text = (tmp_path / "run" / "task.yaml").read_text()
    assert "num_nodes: 2" in text and "accelerators: H100:8" in text and str(planned.best.plan) in text
    asked = "plan llama3-8b --cluster 2xdgx-h100 --gbs 64 --seq 2048 --most 2 --json".split()
    output = ["--emit", "skypilot", "--output", tmp_path / "cli"]
    code, _, err = call("--extend", EXAMPLES / "emitter.py", *asked, *output, "--fix", *words)
    assert code == 0, err
    assert (tmp_path / "cli" / "task.yaml").read_text() == text


def test_emitter_refuses_what_its_tool_lacks(load, tmp_path):
    load("emitter")
    planned = pl.plan("gpt3-1.3b", "1xdgx-h100", gbs=8, seq=2048, fix=["pp=8", "mbs=1", "gpipe"], most=2)
    with pytest.raises(PlanError, match="--emit skypilot: it has no pp=8"):
        emit.emit(planned, ["skypilot"], tmp_path)


# -- schedule --------------------------------------------------------------------------------------

#: transfers over this network take about as long as a stage's passes
SLOW = "4x1xh100-sxm@10Gb/s"


@given(pp=st.integers(2, 8), count=st.integers(1, 40))
def test_schedule_can_run_and_holds_what_it_says(pp, count):
    with forgotten():
        extend.load(EXAMPLES / "schedule.py")
        order = schedules.get("eager-1f1b")
        orders = [list(order.actions(rank, pp, count)) for rank in range(pp)]
        assert len(list(in_order(orders, pp))) == 2 * pp * count
        for rank in range(pp):
            held = accumulate({"F": 1, "B": -1}[action.kind] for action in orders[rank])
            assert order.in_flight(rank, pp, count, 1) == max(held)


def test_schedule_is_predicted(load):
    load("schedule")
    words = "pp=4 mbs=1 gbs=32 framework=torch-compile"
    usual, eager = (
        pl.predict("gpt3-1.3b", plan=f"{words} {name}", cluster=SLOW) for name in ("1f1b", "eager-1f1b")
    )
    assert eager.step_s < 0.9 * usual.step_s and eager.peak_bytes > usual.peak_bytes
    module = pl.predict("resnet50", plan="pp=4 mbs=8 gbs=64 eager-1f1b", cluster="1xdgx-a100")
    assert module.step_s > 0


def test_schedule_is_planned_with_a_certificate(load):
    load("schedule")
    fixed = ["pp=4", "tp=1", "mbs=1", "framework=torch-compile"]
    found = pl.plan("gpt3-1.3b", SLOW, gbs=32, fix=[*fixed, "eager-1f1b"])
    assert found.best.plan.schedule == "eager-1f1b" and found.gap_pct == 0 and found.undecided == 0
    free = pl.plan("gpt3-1.3b", SLOW, gbs=32, fix=fixed)
    assert free.space > found.space and free.best.value <= found.best.value


@pytest.mark.parametrize("cluster", [SLOW, "16x1xh100-sxm@100Gb/s", "2xdgx-h100"])
@pytest.mark.parametrize("gbs", [32, 256])
def test_schedule_has_a_lower_bound(load, cluster, gbs):
    load("schedule")
    model, where = transformers.get("gpt3-1.3b"), clusters.get(cluster)
    words = ["eager-1f1b", "tp=1", "cp=1", "offload=none", "recompute=none", "framework=torch-compile"]
    limits = Limits.of(fix=words)
    space, table = Space(model, (where,), gbs, 2048, limits), Table(model, where)
    blocks = [block for block in space.blocks if block.mesh.pp > 1 and block.micro_batches <= 64]
    assert {block.mesh.pp for block in blocks} >= {2, 4}
    for block in blocks:
        low = bounds(block, table).ravel()
        for index in range(0, len(block), 5):
            step = TransformerStep.of(model, where, block.plan(index), None, None)
            assert low[index] <= predict_step(step).step_s * (1 + 1e-9), str(step.plan)


def test_memory_without_a_formula_is_counted(unchanged):
    class Late(schedules.Schedule):
        name = "late"

        def actions(self, rank, pp, micro_batches, vpp=1):
            return schedules.get("gpipe").actions(rank, pp, micro_batches)

    schedules.register(Late())
    assert in_flight("late", 0, 4, 300) == 300
    words = "pp=4 mbs=1 gbs=256"
    found, usual = (
        pl.predict("resnet50", plan=f"{words} {name}", cluster="1xdgx-1-v100") for name in ("late", "gpipe")
    )
    assert found.peak_bytes == usual.peak_bytes


def test_schedule_is_trained(load):
    load("schedule")
    plans = [f"pp=2 mbs=2 gbs=8 {name} fp32" for name in ("1f1b", "eager-1f1b")]
    _, last = ranks("piped", plans=plans)
    assert last[0] == pytest.approx(last[1], rel=1e-5) and last[1][-1] < last[1][0]


def test_torchtitan_refuses_a_schedule_that_torch_lacks(load, tmp_path):
    load("schedule")
    planned = pl.plan("gpt3-1.3b", "1xdgx-h100", gbs=8, fix=["pp=8", "mbs=1", "eager-1f1b"], most=2)
    with pytest.raises(PlanError, match="torchtitan: it has no schedule=eager-1f1b"):
        emit.emit(planned, ["torchtitan"], tmp_path)


# -- compressor ------------------------------------------------------------------------------------

ETHERNET = "4x1xp100-sxm@10Gb/s"


def test_compressor_is_predicted_and_compared(load):
    load("compressor")
    workload = pl.capture("resnet18", batch=4, image=64, optimizer="sgd")
    plain, small = (
        pl.predict(workload, plan=f"{name} mbs=4", cluster=ETHERNET) for name in ("ddp", "linear8")
    )
    assert small.step_s < plain.step_s and small.accuracy.source.startswith("Dettmers")
    table = compare(Subject.of(workload, ETHERNET, "mbs=4"), ["ddp", "linear8"])
    assert [row.prediction.step_s for row in table.rows] == [plain.step_s, small.step_s]
    assert str(Plan.parse("linear8 mbs=4")) == str(Plan.parse("compress=linear8 mbs=4"))


def test_compressor_is_planned(load):
    load("compressor")
    workload = pl.capture("resnet18", batch=4, image=64, optimizer="sgd")
    found = pl.plan(workload, ETHERNET, gbs=16, fix=["mbs=4"], allow=["compress"], top=99)
    [mine] = [ranked for ranked in found.top if ranked.plan.relax.compress == "linear8"]
    assert mine.lossy == "compress" and found.gap_pct == 0
    assert {ranked.plan.relax.compress for ranked in found.top} >= set(compression.SCHEMES) - {"fp32"}


def test_compressor_is_trained(load):
    load("compressor")
    first, second = ranks("compressed", plan="linear8")
    assert first["digest"] == second["digest"]
    assert sum(first["losses"][-5:]) < 0.5 * sum(first["losses"][:5])
    shapes = [("0.weight", (64, 20)), ("0.bias", (64,)), ("2.weight", (10, 64)), ("2.bias", (10,))]
    assert first["wire_bytes"] == model_bytes(compression.parse("linear8"), shapes)


def test_compressor_makes_the_bytes_that_it_says(load):
    import torch

    load("compressor")
    from paceline.train.compress import lockstep, make

    every = [make("linear8:min_elements=0", rank=rank, world=3) for rank in range(3)]
    gradients = [torch.randn(40, 30, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    request = next(every[0].exchange("w", gradients[0], torch.empty(40, 30)))
    assert request.bytes == every[0].wire_bytes((40, 30)) == 40 * 30 + 4
    out = lockstep(every, "w", gradients)
    exact = sum(gradients) / 3
    assert (out[0] - exact).abs().max() <= max(g.abs().max() for g in gradients) / 127
    gradients[1][0, 0] = torch.inf
    assert all(one.isnan().all() for one in lockstep(every, "w", gradients))


# -- synchronisation -------------------------------------------------------------------------------


def test_synchronisation_is_predicted_and_compared(load):
    load("synchronisation")
    workload = pl.capture("resnet18", batch=4, image=64, optimizer="sgd")
    plain, turns = (
        pl.predict(workload, plan=f"{name} mbs=4", cluster=ETHERNET) for name in ("ddp", "alternate")
    )
    assert 0.4 * plain.step_s < turns.step_s < plain.step_s
    assert turns.accuracy.what.startswith("not measured") and turns.peak_bytes > plain.peak_bytes
    table = compare(Subject.of(workload, ETHERNET, "mbs=4"), ["ddp", "alternate"])
    assert [row.prediction.step_s for row in table.rows] == [plain.step_s, turns.step_s]
    sized = [
        pl.predict("gpt3-1.3b", plan=f"{name} framework=torch-compile", cluster=SLOW)
        for name in ("ddp", "alternate")
    ]
    assert sized[1].step_s < sized[0].step_s


def test_synchronisation_is_a_word_of_plans_and_refused_where_it_does_not_go(load, call):
    with pytest.raises(PlanError, match="unknown 'alternate'"):
        Plan.parse("alternate")
    load("synchronisation")
    assert str(Plan.parse("alternate mbs=4")) == str(Plan.parse("average=alternate mbs=4"))
    with pytest.raises(PlanError, match="alternate averages whole replicas, but fsdp shards them"):
        pl.predict("gpt3-1.3b", plan="fsdp alternate", cluster=SLOW)
    code, _, err = call("--extend", EXAMPLES / "synchronisation.py", "train", "--strategy", "fsdp alternate")
    assert code == 2 and "alternate goes with whole replicas" in err


def test_synchronisation_is_planned(load):
    load("synchronisation")
    workload = pl.capture("resnet18", batch=4, image=64, optimizer="sgd")
    found = pl.plan(workload, ETHERNET, gbs=16, fix=["mbs=4", "alternate"])
    assert found.best.plan.relax.average == "alternate" and found.gap_pct == 0


def test_synchronisation_is_trained(load):
    load("synchronisation")
    first, second = ranks("turns", plan="alternate")
    assert first["digests"] == second["digests"]
    assert first["gradients"] != second["gradients"]
    assert sum(first["losses"][-5:]) < 0.5 * sum(first["losses"][:5])
    # a step changes the layers whose turn it is, and no others
    assert first["changed"][:4] == [["0"], ["2"], ["0"], ["2"]]
    again, _ = ranks("turns", plan="ddp alternate fp32")
    assert again["digests"] == first["digests"]
