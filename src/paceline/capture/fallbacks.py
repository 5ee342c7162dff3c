"""Notice when transformers runs a slow stand-in for a fused kernel, and say that this is what was traced."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LOG = logging.getLogger(__name__)

#: what transformers logs when a layer with fused kernels (Mamba, gated delta rule) runs plain PyTorch instead
_MESSAGE = re.compile(r"falling back", re.IGNORECASE)
_FUNCTION = re.compile(r"`(\w+)` is falling back", re.IGNORECASE)


@contextmanager
def noticed() -> Iterator[list[str]]:
    """Within it, the list collects the messages with which transformers falls back to plain PyTorch.

    It logs each once per process, and only at its usual verbosity; so its logging function is watched, and
    not the log.
    """
    found: list[str] = []
    log: Any = logging.Logger
    original = getattr(log, "warning_once", None)  # transformers adds it to the class
    if original is None:
        yield found
        return

    def warning_once(self: logging.Logger, message: Any, *args: Any, **kwargs: Any) -> None:
        text = str(message)
        if _MESSAGE.search(text) and text not in found:
            if not found:  # at once: the trace of a long sequence takes minutes
                _LOG.warning(
                    "paceline: transformers' sequential fallback: a long sequence takes minutes to trace"
                )
            found.append(text)
        original(self, message, *args, **kwargs)

    log.warning_once = warning_once
    try:
        yield found
    finally:
        log.warning_once = original


def warnings(messages: list[str]) -> tuple[str, ...]:
    """What an answer says of these messages: nothing, or one line."""
    if not messages:
        return ()
    names = dict.fromkeys(name for message in messages for name in _FUNCTION.findall(message))
    which = f" of {', '.join(names)}" if names else ""
    return (f"transformers' sequential fallback{which} was traced; fused kernels would be faster",)
