"""A state folder holds secrets of jobs and the daemon's token: nobody but its owner reads it."""

import os
import stat

import pytest

from paceline.cli import main
from paceline.errors import RunError
from paceline.sched.live import Daemon, DaemonSettings, JobSpec
from paceline.sched.live.store import Store


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def opened(state):
    """What others than the owner could read, were they let into the folder."""
    return [path for path in state.iterdir() if mode(path) & 0o077]


@pytest.fixture
def loose():
    """Files are made for everybody unless somebody says otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


def served(state, **more):
    live = Daemon(DaemonSettings(state=state, nodes="1x1", policy="fifo"), **more)
    live.submit(
        [
            JobSpec.of(
                {
                    "name": "a",
                    "command": "true",
                    "seconds": 5,
                    "environment": {"TOKEN": "secret"},
                    "submit": 1000,
                },
                state,
            )
        ]
    )
    return live


def test_a_new_one(loose, tmp_path):
    live = served(tmp_path / "state")
    assert mode(tmp_path / "state") == 0o700 and not opened(tmp_path / "state")
    live.close()
    assert not opened(tmp_path / "state")


def test_what_a_run_is_told_is_private_too(loose, tmp_path):
    live = served(tmp_path / "state")
    live.submit(
        [
            JobSpec.of(
                {"name": "b", "command": "true", "seconds": 5, "environment": {"TOKEN": "secret"}}, tmp_path
            )
        ]
    )
    live.turn()
    live.turn()
    live.close()
    (told,) = (tmp_path / "state/jobs/b").glob("*/run.json")
    assert "secret" in told.read_text() and mode(told) == 0o600


@pytest.mark.parametrize("rights", [0o755, 0o750, 0o777, 0o701])
def test_one_that_was_open_is_tightened_and_that_is_said(loose, tmp_path, rights):
    state = tmp_path / "state"
    served(state).close()
    state.chmod(rights)
    for path in state.iterdir():
        path.chmod(0o755 if path.is_dir() else 0o644)
    lines = []
    live = served(state, say=lines.append)
    assert mode(state) == 0o700 and not opened(state)
    live.close()
    assert any(
        f"was open to others (mode {rights:o})" in line and "Others may have read" in line for line in lines
    ), lines
    lines.clear()
    served(state, say=lines.append).close()
    assert not lines, "mended once"


def test_an_empty_folder_is_taken(loose, tmp_path):
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    store = Store(state)
    store.close()
    assert mode(state) == 0o700 and not store.notes and not opened(state)


@pytest.mark.parametrize("rights", [0o755, 0o1777])
def test_a_folder_of_other_things_is_left_as_it_is(loose, tmp_path, capsys, rights):
    """Such as a home, a project or /tmp, given by mistake."""
    place = tmp_path / "project"
    place.mkdir()
    (place / "train.py").touch()
    place.chmod(rights)
    with pytest.raises(
        RunError, match="is open to others and holds other things; .* give a folder of its own with --state"
    ):
        Store(place)
    with pytest.raises(SystemExit) as error:
        main(["schedule", "--state", str(place)])
    said = capsys.readouterr().err.strip()
    assert error.value.code == 2 and "\n" not in said and said.startswith("paceline: ")
    assert mode(place) == rights and [path.name for path in place.iterdir()] == ["train.py"]


def test_one_of_somebody_else_is_refused(tmp_path, monkeypatch):
    state = tmp_path / "state"
    Store(state).close()
    before = {path.name for path in state.iterdir()}
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(
        RunError, match=rf"belongs to user {os.getuid()}, and this is user {os.getuid() + 1}; .*--state"
    ) as error:
        Store(state)
    assert "\n" not in str(error.value) and {path.name for path in state.iterdir()} == before


def test_links_are_not_followed(loose, tmp_path):
    state, other = tmp_path / "state", tmp_path / "other"
    Store(state).close()
    other.write_text("not ours to change")
    other.chmod(0o644)
    (state / "link").symlink_to(other)
    state.chmod(0o755)
    Store(state).close()
    assert mode(state) == 0o700 and mode(other) == 0o644
