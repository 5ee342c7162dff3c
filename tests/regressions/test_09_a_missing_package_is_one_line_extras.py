"""A command whose optional package is not installed says in one line what to install, and exits with 2."""

import os
import subprocess
import sys

import pytest

#: makes packages absent for a process: Python runs `sitecustomize` before anything else
BLOCKER = """
import os, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == os.environ["ABSENT"]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""
COMMANDS = [
    ("torch", "train --task digits-cnn --strategy ddp", "paceline[torch]"),
    ("torch", "bench strategies --hosts 2 --link 1Gbit/s --model cnn", "paceline[torch]"),
    ("torch", "bench collectives --hosts 2 --link 1Gbit/s", "paceline[torch]"),
    ("torch", "bench throughput --hosts 2", "paceline[torch]"),
    ("torch", "profile train.py --workers 2 -o job.json", "paceline[torch]"),
    ("torch", "calibrate -o here.toml", "paceline[torch]"),
    ("torch", "capture resnet18 -o step.json", "paceline[torch]"),
    ("torch", "predict resnet18 --device h200", "paceline[torch]"),
    ("torch", "validate h200_steps", "paceline[torch]"),
    ("sklearn", "train --task digits-cnn --strategy ddp", "paceline[train]"),
    ("pyroute2", "bench strategies --hosts 2 --link 1Gbit/s --model cnn", "paceline[emulate]"),
    (
        "matplotlib",
        "whatif gpt2-124m --cluster 1xdgx-h100 --sweep nodes=1..2 --plot scaling.png",
        "paceline[plots]",
    ),
    (
        "ray",
        "simulate --trace philly-like --jobs 5 --cluster 2x4xv100 --policy srtf --engine ray",
        "paceline[ray]",
    ),
]


@pytest.mark.parametrize(
    ("package", "command", "extra"), COMMANDS, ids=[f"{package}: {text}" for package, text, _ in COMMANDS]
)
def test_a_missing_package_is_one_line(tmp_path, package, command, extra):
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    (tmp_path / "train.py").write_text("")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "ABSENT": package}
    arguments = [sys.executable, "-m", "paceline.cli", *command.split()]
    done = subprocess.run(
        arguments, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert f"which is not installed; run: pip install '{extra}'" in done.stderr
