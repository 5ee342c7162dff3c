"""When the messages of a way of synchronising are sent, whatever the model was made from: reduced as
gradients become complete, or after all passes; gathered as the next forward pass needs parameters, or before
it.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.sim.program import Label
from paceline.sim.work import CODING, END, Role, Transfer
from paceline.sync.way import Message


def role(chunks: tuple[int, ...], messages: Sequence[Message], update: Label) -> Role:
    """What the ranks of a stage do besides their passes; places are those of the messages' gradients."""
    gathers, regathers = list[Transfer](), list[Label]()
    for message in messages:
        if message.gather and message.gathers_early:
            first, needed = min(gradient.needed for gradient in message.gradients)
            gathers.append(Transfer(message.gather, needed=needed, chunk=first))
        else:
            regathers += message.gather
    return Role(
        chunks=chunks,
        reduces=tuple(map(reduced, messages)),
        gathers=tuple(sorted(gathers, key=lambda transfer: (transfer.chunk, transfer.needed))),
        update=(*_coding(sum(message.decode_s for message in messages)), update),
        regathers=tuple(regathers),
    )


def reduced(message: Message) -> Transfer:
    """Reduces gradients when the last of them is complete, or all at the end."""
    chunk, _ = message.gradients[-1].ready
    complete = max(gradient.ready for gradient in message.gradients if gradient.ready[0] == chunk)
    release = complete[1] if message.early else END
    return Transfer(message.reduce, release, chunk=chunk, before=_coding(message.encode_s))


def _coding(seconds: float) -> tuple[Label, ...]:
    """What the device does to encode or decode."""
    return (Label(CODING, CODING, seconds),) if seconds else ()
