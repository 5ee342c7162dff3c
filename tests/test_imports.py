"""Folders stand in the order in which data flows, and light ones stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

ROOT = Path(paceline.__file__).parent
#: each may import itself and what stands before it
ROOMS = [
    "errors",
    "units",
    "extend",
    "on_ray",
    "spec",
    "catalog",
    "readers",
    "capture",
    "cost",
    "sim",
    "queueing",
    "sync",
    "predict",
    "diagnose",
    "report",
    "plan",
    "api",
    "whatif",
    "train",
    "sched",
    "bench",
    "web",
    "cli",
]
#: an answer draws itself and names the timeline it carries in its types, a cluster is looked up by name:
#: imported when asked, not before
LATER = {("spec", "report"), ("spec", "sim"), ("spec", "catalog"), ("diagnose", "report")}
#: what only some rooms may import, wherever in a module they do
HEAVY = {
    "torch": {"capture", "catalog", "train", "bench"},
    "torchvision": {"capture", "bench"},
    "timm": {"capture", "bench"},
    "transformers": {"capture", "bench"},
    "scipy": {"queueing", "sched", "bench"},
    "cyclopts": {"cli"},
    "fastapi": {"web"},
    "starlette": {"web"},
    "uvicorn": {"web"},
    "rich": {"report", "cli", "train", "bench"},
}
MODULES = sorted(ROOT.rglob("*.py"))


def room(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path):
    """(module, whether at the top level and at run time) of each import of a file; relative ones
    written out.
    """
    package = [paceline.__name__, *path.relative_to(ROOT).parent.parts]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top = set(tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
                if node.level
                else node.module
            )
            yield from (
                (f"{base}.{alias.name}" if base == paceline.__name__ else base, node in top)
                for alias in node.names
            )


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_only_what_stands_before(path):
    if path == ROOT / "__init__.py":
        return  # names everything, imports nothing until it is asked for: below
    here = room(path)
    assert here in ROOMS, f"{here} has no place in the order yet"
    for module, at_once in imports(path):
        first, *rest = module.split(".")
        if first == paceline.__name__ and rest and rest[0] in ROOMS:
            allowed = ROOMS.index(rest[0]) <= ROOMS.index(here) or ((here, rest[0]) in LATER and not at_once)
            assert allowed, f"{here} imports {module}, which stands after it"
        assert first not in HEAVY or here in HEAVY[first], f"{here} imports {first}"


def test_every_room_is_listed():
    found = {
        p.name.removesuffix(".py")
        for p in ROOT.iterdir()
        if p.suffix == ".py" or (p / "__init__.py").is_file()
    }
    assert found - {"__init__"} == set(ROOMS)


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import paceline", "torch numpy scipy rich cyclopts"),
        (
            "import paceline; paceline.Device; paceline.Workload; paceline.Prediction",
            "torch numpy scipy rich",
        ),
        ("import paceline; paceline.devices.get('h200')", "torch numpy scipy"),
        ("import paceline; paceline.models.get('gpt2')", "torch numpy scipy"),
        ("import paceline.cli", "torch numpy scipy"),
        ("import paceline.predict.step", "torch scipy rich"),
    ],
)
def test_stays_light(code, absent):
    loaded = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not set(absent.split()) & set(loaded.stdout.split())


def test_contributing_shows_the_same_order():
    table = (
        (Path(__file__).parents[1] / "CONTRIBUTING.md")
        .read_text(encoding="utf-8")
        .partition("| folder of")[2]
        .partition("\n\n")[0]
    )
    shown = [
        line.split("`")[1].rstrip("/").removesuffix(".py")
        for line in table.splitlines()
        if line.startswith("| `")
    ]
    assert shown == ROOMS
