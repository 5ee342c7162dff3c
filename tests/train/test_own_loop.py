"""A user's own loop: the lines of docs/training.md as they stand, models with every oddity under every
strategy, and mistakes.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.train.launch import run

HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
DOCUMENT = Path(__file__).parents[2] / "docs" / "training.md"
BEFORE = """
import torch
from torch.nn.functional import cross_entropy as loss
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = [(torch.randn(8, 20), torch.randint(0, 10, (8,))) for _ in range(5)]
"""
AFTER = """
print("through", sum(float(p.detach().sum()) for p in model.parameters()))
"""
NAMES = [
    "ddp",
    "allreduce",
    "overlap",
    "priority",
    "lazy",
    "terngrad",
    "dgc",
    "powersgd",
    "qsgd",
    "signsgd",
    "onebit",
    "topk",
    "randomk",
    "fp16",
    "bf16",
    "local",
    "post-local",
    "diloco",
    "auto",
]
#: averaged before the last of six steps
OPTIONS = {"local": {"period": 3}, "diloco": {"period": 3}, "post-local": {"period": 2, "after": 4}}


def launched(script, world):
    """What a script prints under torchrun."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(world),
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
        str(script),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=250)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(("world", "plan"), [(2, "terngrad"), (2, "overlap"), (1, "overlap")])
def test_the_lines_of_the_document_run_as_they_stand(tmp_path, world, plan):
    lines = DOCUMENT.read_text().partition("```python\n")[2].partition("```")[0]
    assert 'plan="terngrad"' in lines
    script = tmp_path / "train.py"
    script.write_text(BEFORE + lines.replace('plan="terngrad"', f'plan="{plan}"') + AFTER)
    code, said = launched(script, world)
    assert code == 0, said
    assert said.count("through") == world and "Traceback" not in said


def test_oddities_of_models_and_loops_under_every_strategy():
    runs = [("odd", {"strategy": name, "options": OPTIONS.get(name, {})}) for name in NAMES]
    both = run(
        "workers_own_loop:parallel_all", world=2, arguments={"runs": runs}, environment=HERE, timeout_s=250
    )
    found = dict(zip(NAMES, both[0], strict=True))
    for name, one in found.items():
        assert one["same"], name
        assert one["frozen"] and one["tied"], name
    for name in ("overlap", "priority", "post-local"):
        assert found[name]["losses"][:4] == pytest.approx(found["allreduce"]["losses"][:4], rel=1e-4), name
    alone = run(
        "workers_own_loop:parallel_all", world=1, arguments={"runs": runs}, environment=HERE, timeout_s=250
    )[0]
    for name, one in zip(NAMES, alone, strict=True):
        assert one["same"], name


def test_half_precision_passes_under_overlap_are_those_under_all_reduce():
    runs = [
        ("odd", {"strategy": f"ddp {average} bf16", "options": options})
        for average, options in (
            ("allreduce", {"find_unused_parameters": True}),  # torch's DDP wants to know
            ("overlap", {"most_bytes": 20000}),
        )
    ]
    plain, over = run(
        "workers_own_loop:parallel_all", world=2, arguments={"runs": runs}, environment=HERE, timeout_s=250
    )[0]
    assert over["losses"] == pytest.approx(plain["losses"], rel=0.02)


def test_mistakes_are_one_line_on_all_ranks():
    asked = [
        ("overlap", {"grad_scaler": True}, ""),
        ("lazy", {"grad_scaler": True}, "RunError: lazy adds gradients"),
        ("dgc", {"scaler": True}, "SpecError: dgc keeps part of the gradients"),
        ("allreduce", {"twice": True}, "RunError: this model is kept the same by 'averaging' already"),
        ("terngrad", {"options": {"speed": 1}}, "UnknownName: unknown option of strategy 'terngrad' 'speed'"),
        ("ddp", {"options": {"speed": 1}}, "UnknownName: unknown option of strategy 'ddp' 'speed'"),
        (3, {}, "SpecError: plan is a name, a plan or a strategy; got 3"),
        (
            "overlap",
            {"parameters": "half"},
            "SpecError: parameter '2.weight' needs a gradient but is not in the optimizer",
        ),
        ("allreduce", {}, ""),
    ]
    runs = [("mistaken", {"plan": plan, **more}) for plan, more, _ in asked]
    for rank in run(
        "workers_own_loop:parallel_all", world=2, arguments={"runs": runs}, environment=HERE, timeout_s=250
    ):
        for (plan, _, message), said in zip(asked, rank, strict=True):
            assert said.startswith(message) and bool(said) == bool(message), (plan, said)
            assert "\n" not in said
