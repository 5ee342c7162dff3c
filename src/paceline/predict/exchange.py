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
    gathered = [message for message in messages if message.gather]
    return Role(
        chunks=chunks,
        reduces=tuple(map(reduced, messages)),
        gathers=tuple(sorted((regathered(m) for m in gathered if m.gathers_early), key=_place)),
        update=(*_coding(sum(message.decode_s for message in messages)), update),
        regathers=tuple(label for m in gathered if not m.gathers_early for label in m.gather),
    )


def reduced(message: Message) -> Transfer:
    """Reduces gradients when the last of them is complete, or all at the end."""
    chunk, _ = message.gradients[-1].ready
    place = max(place for number, place in (g.ready for g in message.gradients) if number == chunk)
    release = place if message.early else END
    return Transfer(message.reduce, release, chunk=chunk, before=_coding(message.encode_s))


def regathered(message: Message) -> Transfer:
    """Gathers parameters that the last update left in parts."""
    chunk, place = min(gradient.needed for gradient in message.gradients)
    return Transfer(message.gather, needed=place, chunk=chunk)


def _coding(seconds: float) -> tuple[Label, ...]:
    """What the device does to encode or decode."""
    return (Label(CODING, CODING, seconds),) if seconds else ()


def _place(transfer: Transfer) -> tuple[int, int]:
    return transfer.chunk, transfer.needed
