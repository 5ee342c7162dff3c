"""A cached kernel library that was cut, changed or left open to others is built again, not loaded."""

import ctypes
import shutil

import pytest

pytest.importorskip("torch", reason="encoders need torch")

from paceline.train.compress import native

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None, reason="this machine has no C compiler, so that nothing is cached"
)


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Where the library lies that was built into an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return native._built("cc")


def cut(path):
    path.write_bytes(path.read_bytes()[:1000])


def changed(path):
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(bytes(content))


def emptied(path):
    path.write_bytes(b"")


def opened(path):
    path.chmod(0o777)


@pytest.mark.parametrize("harm", [cut, changed, emptied, opened], ids=lambda harm: harm.__name__)
def test_a_damaged_library_is_built_again(library, harm):
    whole = len(library.read_bytes())
    harm(library)
    again = native._built("cc")
    assert again == library and len(again.read_bytes()) == whole and not again.stat().st_mode & 0o022
    ctypes.CDLL(str(again)).accumulate  # noqa: B018  (an incomplete library has no such function)


def test_a_sound_library_is_kept(library):
    made = library.stat().st_mtime_ns
    assert native._built("cc").stat().st_mtime_ns == made
