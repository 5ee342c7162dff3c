"""Errors a user can cause, as one tree. Each message is one line: what, what was got, what to do.

    PacelineError               anything raised on purpose; the command line prints it and exits 2
    ├── UnitError               a quantity that cannot be read
    ├── SpecError               a file or object whose content is wrong (file, line and key named)
    │   └── UnknownSizes        a model that a transformer's sizes do not describe; it can be captured
    ├── UnknownName             a device, model or set that does not exist; suggests the nearest
    ├── CaptureError            a module that could not be traced; carries the user's traceback
    ├── PlanError               a parallel plan that contradicts itself, the model or the cluster; suggests
    │   │                       the nearest
    │   └── DoesNotFit          a search whose plans all need more memory than there is; names the leanest
    ├── MissingExtra            a package that an extra would install
    ├── RunError                a run that cannot start or go on: rights, a dead or stalled peer, a broken
    │                           checkpoint
    └── DataError               measurements that are missing or malformed

One plan that does not fit is not an error but a value (`spec.prediction.Fit`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class PacelineError(Exception):
    """Base of every error that Paceline raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process gets the error as it is: its message was made from arguments that are not kept."""
        return _again, (type(self), self.args, self.__dict__)


def _again(kind: type[PacelineError], arguments: tuple[Any, ...], state: dict[str, Any]) -> PacelineError:
    """The error that `__reduce__` described, made without its `__init__`."""
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(state)
    return error


class UnitError(PacelineError, ValueError):
    """A quantity that cannot be read."""


class SpecError(PacelineError, ValueError):
    """A file or object whose content is wrong."""


class UnknownSizes(SpecError):
    """A model that is no stack of equal transformer layers; as a module it can be captured."""


class CaptureError(PacelineError):
    """A module that could not be traced."""


class PlanError(PacelineError, ValueError):
    """A parallel plan that cannot be run as it stands."""


class DoesNotFit(PlanError):
    """A search in which no plan fits into memory."""


class RunError(PacelineError):
    """A run that cannot start or go on: what the machine does not allow, a peer that died or stalled, a
    broken checkpoint.
    """

    #: the signal that killed a process of the run, if one did
    signal: int = 0


class DataError(PacelineError):
    """Measurements that are missing or malformed."""


class MissingExtra(PacelineError, ImportError):
    """A package that is not installed, and the extra that brings it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs {package}, which is not installed; run: pip install 'paceline[{extra}]'"
        )


#: package, by the name it is imported by -> what it is called, and the extra that brings it
EXTRAS = {
    "torch": ("torch", "torch"),
    "sklearn": ("scikit-learn", "train"),
    "pyroute2": ("pyroute2", "emulate"),
    "matplotlib": ("matplotlib", "plots"),
    "ray": ("ray", "ray"),
    "transformers": ("transformers", "hf"),
    "torchvision": ("torchvision", "vision"),
    "timm": ("timm", "vision"),
    "tensorboard": ("tensorboard", "board"),
    "yaml": ("PyYAML", "hf"),
    "fastapi": ("fastapi", "web"),
    "uvicorn": ("uvicorn", "web"),
}


def missing_extra(error: ImportError, purpose: str) -> MissingExtra | None:
    """What to install, where an import failed for lack of an optional package; None where it failed
    otherwise.
    """
    known = EXTRAS.get((error.name or "").partition(".")[0])
    return MissingExtra(*known, purpose) if known is not None else None


class UnknownName(PacelineError, KeyError):
    """A name that is not in a catalog."""

    def __init__(self, kind: str, got: str, allowed: Iterable[str], hint: str = "") -> None:
        self.suggestions = nearest(got, allowed)
        text = f"unknown {kind} {got!r}"
        if self.suggestions:
            text += f"; did you mean {' or '.join(map(repr, self.suggestions))}?"
        between = " " if self.suggestions else "; "
        self.message = text + (between + hint if hint else "")
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message


def nearest(got: object, allowed: Iterable[str], count: int = 3) -> list[str]:
    """The names closest to `got`: by spelling, then by containing it; a value that is no text is close to
    none.
    """
    if not isinstance(got, str):
        return []
    names = list(allowed)
    folded = {name.lower(): name for name in names}
    close = difflib.get_close_matches(got.lower(), folded, n=count, cutoff=0.6)
    inside = (
        sorted((n for n in folded if got.lower() in n or n in got.lower()), key=len) if len(got) > 1 else []
    )
    return [folded[n] for n in dict.fromkeys([*close, *inside])][:count]


def meant(got: str, allowed: Iterable[str]) -> str:
    """What a message says of an unknown word: the nearest that is known, else all of them."""
    names = list(allowed)
    near = nearest(got, names)
    return f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(names)}"
