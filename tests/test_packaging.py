"""What ships, and what must not: versions agree, data files are in the wheel, no path of a machine is in the
text.
"""

import importlib
import itertools
import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
#: joined here, so that this file does not hold what it looks for
MACHINE_PATHS = ["/" + folder + "/" for folder in ("work", "tmp", "root", "home")] + [".." + "/shared"]
TEXT = {".py", ".toml", ".md", ".txt", ".cfg", ".ini", ".yml", ".yaml", ""}


def sources():
    """Files under version control; skips where the sources lie outside of it, as in an unpacked archive."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        pytest.skip("no git here")
    if listed.returncode or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_one_version():
    assert PROJECT["project"]["version"] == paceline.__version__


def test_changelog_names_the_version():
    assert f"## [{paceline.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_setup_pins_what_it_installs_by_name():
    pinned = {
        line.partition("==")[0].lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    wanted += [
        entry for group in PROJECT["dependency-groups"].values() for entry in group if isinstance(entry, str)
    ]
    names = {entry.partition(">")[0].lower() for entry in wanted if not entry.startswith("paceline[")}
    assert names <= pinned


@pytest.mark.parametrize(
    ("package", "folder", "suffixes"),
    [
        ("paceline.catalog.devices", "", {".toml"}),
        ("paceline.cost", "fitted", {".toml"}),
        ("paceline.bench", "data", {".gz", ".md"}),
    ],
)
def test_data_ships(package, folder, suffixes):
    """The wheel takes all of src/paceline; what is read at run time lies inside it and is not ignored
    by git.
    """
    assert PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["src/paceline"]}
    place = Path(str(files(package) / folder))
    assert place.is_relative_to(ROOT / "src" / "paceline")
    data = {path for path in place.rglob("*") if path.suffix in suffixes}
    assert data
    assert data <= set(sources())


def test_no_path_of_a_machine():
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sources()
        if path.suffix in TEXT and path != ROOT / ".ci" / "run"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if any(word in line for word in MACHINE_PATHS)
    ]
    assert not found


# -- names of the package --------------------------------------------------------------------------

IMPORTS = {
    "attributes": "import paceline as pl; pl.predict, pl.capture",
    "submodule": "from paceline.predict.step import predict; from paceline.capture import capture",
    "names": "from paceline import predict, capture, devices, models",
}


@pytest.mark.parametrize("order", list(itertools.permutations(IMPORTS)), ids="-".join)
def test_functions_are_callable_in_any_order_of_imports(order):
    code = "; ".join(
        [
            *(IMPORTS[name] for name in order),
            "import paceline as pl",
            "assert callable(pl.predict) and callable(pl.capture)",
            "assert pl.devices.names() and pl.models.names()",
        ]
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_export_loads():
    assert paceline.__all__ == sorted(paceline.__all__)
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        paceline.nothing  # noqa: B018


def test_predict_takes_what_a_user_has(tmp_path):
    workload = paceline.capture("resnet18", batch=4)
    workload.save(tmp_path / "net.json")
    saved = paceline.predict(str(tmp_path / "net.json"), paceline.devices.get("h200"))
    assert (
        paceline.predict("resnet18", "h200", batch=4).step_s
        == paceline.predict(workload, "h200").step_s
        == saved.step_s
    )
    with pytest.raises(ValueError, match="whose batch is fixed"):
        paceline.predict(workload, "h200", batch=8)


def test_every_module_imports():
    """No module is broken, and none runs anything on import."""
    for path in (ROOT / "src" / "paceline").rglob("*.py"):
        if path.stem not in ("__main__",):
            importlib.import_module(
                ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
            )
