"""Names of jobs reach folders, scripts and terminals: control characters are refused, the rest is quoted."""

import json
import os
import shutil
import subprocess

import pytest

from paceline.cli import main
from paceline.errors import PacelineError, SpecError
from paceline.sched import traces
from paceline.sched.live import Attempt, JobSpec, read
from paceline.sched.live.run import AttemptFolder
from paceline.sched.live.slurm import SlurmDriver
from paceline.spec.names import checked_name, file_name

BAD = ["a\n", "a\nb", "a\r", "a\tb", "\x1b[31mred", "a\x00b", "a\u2028b", "a\u202eb", "\ud800"]


@pytest.mark.parametrize("name", BAD)
def test_control_characters_are_refused(name):
    with pytest.raises(SpecError, match="cluster name .* holds the control character") as error:
        checked_name("cluster", name)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "must not be empty"),
        ("  ", "must not be empty"),
        ("x" * 201, "at most 200 characters, got 201"),
        (7, "must be a string, got 7"),
    ],
)
def test_other_names_that_are_refused(name, message):
    with pytest.raises(SpecError, match=message):
        checked_name("plan", name)


@pytest.mark.parametrize("name", ["digits-2", "Gruppe A", "réseau", "网络", "x" * 200, "a\u00a0b"])
def test_names_that_people_give(name):
    assert checked_name("job", name) == name


@pytest.mark.parametrize("name", [*BAD, "a b", "../../x", ".", "..", "-rf", "", "a;b", '"""', "a/b"])
def test_a_file_name_is_one_plain_word(name):
    found = file_name(name)
    assert found not in ("", ".", "..") and set(found) <= set(
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"
    )
    assert not found.startswith((".", "-"))
    assert file_name("digits-2.1_x") == "digits-2.1_x"


@pytest.mark.parametrize("name", BAD)
def test_a_job_file_is_refused_with_one_line(tmp_path, capsys, name):
    with pytest.raises(SpecError, match="job name .* holds the control character") as error:
        JobSpec.of({"name": name, "command": "true", "seconds": 5}, tmp_path, "jobs.toml")
    assert str(error.value).isprintable() and str(error.value).startswith("jobs.toml: ")
    if name == "\ud800":  # no file can hold it
        return
    path = tmp_path / "jobs.toml"
    path.write_text(f"name = {json.dumps(name)}\ncommand = 'true'\nseconds = 5\n")
    with pytest.raises(SpecError):
        read(path)
    with pytest.raises(SystemExit) as left:
        main(["schedule", str(path), "--state", str(tmp_path / "state")])
    said = capsys.readouterr().err.strip()
    assert left.value.code == 2 and "\n" not in said and "control character" in said
    assert not (tmp_path / "state").exists()


def test_tenants_too(tmp_path):
    with pytest.raises(SpecError, match="tenant name .* holds the control character"):
        JobSpec.of({"name": "a", "command": "true", "seconds": 5, "tenant": "x\ny"}, tmp_path)


@pytest.mark.parametrize("row", ['"a\nb",0,1,60,x', 'a,0,1,60,"x\ny"'])
def test_a_job_list_is_refused_with_one_line(tmp_path, row):
    path = tmp_path / "jobs.csv"
    path.write_text(f"name,submit_s,devices,seconds,tenant\n{row}\n")
    with pytest.raises(
        PacelineError, match=r"jobs.csv: (job|tenant) name .* holds the control character"
    ) as error:
        traces.load(str(path))
    assert "\n" not in str(error.value)


@pytest.fixture
def slurm(monkeypatch, tmp_path):
    """The driver without a Slurm: what it would hand in."""
    asked = []

    def ask(self, *words, given=None):
        asked.append((words, given))
        return ""

    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(SlurmDriver, "_ask", ask)
    return asked


@pytest.mark.parametrize("name", ["a", "a\ntouch pwned", "$(touch pwned)", "a,b"])
def test_what_slurm_gets_holds_no_commands_of_a_name(slurm, monkeypatch, tmp_path, name):
    """The script is run, with a stand-in for srun that prints its words; the state folder's name is odd."""
    state = tmp_path / "it's %j $(touch pwned) `touch pwned`"
    run = Attempt(job=name, attempt=1, allocation=((0, 1),))
    driver = SlurmDriver(state)
    driver.launch(run, AttemptFolder(driver.state, run), ["node1"])
    words, script = slurm[-1]
    given = dict(word.split("=", 1) for word in words if "=" in word)
    assert set(given["--job-name"]) <= set("abcdefghijklmnopqrstuvwxyz0123456789._-")
    assert given["--output"].count("%%j") == 1 and given["--output"].endswith("/slurm.out")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/srun").write_text("#!/bin/sh\nfor word; do printf '%s\\0' \"$word\"; done\n")
    (tmp_path / "bin/srun").chmod(0o755)
    here = tmp_path / "here"
    here.mkdir()
    found = subprocess.run(
        ["/bin/sh"],
        input=script,
        cwd=here,
        env={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    parts = found.stdout.split("\0")
    assert parts[-3:] == [str(AttemptFolder(driver.state, run).path), "slurm", ""]
    assert not list(here.iterdir()) and not found.stderr
