"""Exchanges of several gradients in step with each other: what they send at the same stage goes in one
message per kind.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.train.comm import Collective, Job
from paceline.train.compress import Round

Exchanging = Generator[Round, Any, None]


def together(exchanges: Sequence[Exchanging], plain: Tensor | None) -> Job:
    """A job: drives exchanges; a `plain` tensor is summed over ranks beside their first messages."""
    asked = {exchange: next(exchange) for exchange in exchanges}
    while plain is not None or asked:
        ops = sorted({request.op for request in asked.values()})
        messages = [_Message(op, {one: sent for one, sent in asked.items() if sent.op == op}) for op in ops]
        reduction = [Collective("sum", [plain])] if plain is not None else []
        plain = None
        came = yield [*reduction, *(message.collective for message in messages)]
        asked = {}
        for message, result in zip(messages, came[len(reduction) :], strict=True):
            for exchange, arrived in message.split(result):
                try:
                    asked[exchange] = exchange.send(arrived)
                except StopIteration:
                    continue


class _Message:
    """Payloads of several exchanges in one tensor per dtype (reductions) or one of bytes (gathers), and the
    way back.
    """

    def __init__(self, op: str, asked: dict[Exchanging, Round]) -> None:
        self._gathers = op == "gather"
        self._payloads = {exchange: list(request.payload) for exchange, request in asked.items()}
        # long elements first: each begins at a multiple of its element then, without padding
        tensors = sorted(
            (tensor for payload in self._payloads.values() for tensor in payload),
            key=lambda tensor: -tensor.element_size(),
        )
        kinds = dict.fromkeys(tensor.dtype for tensor in tensors)
        self._groups = [[one for one in tensors if one.dtype == kind] for kind in kinds]
        if self._gathers:
            self._groups = [tensors]
        self.collective = Collective(op, [torch.cat([*map(self._flat, group)]) for group in self._groups])

    def _flat(self, tensor: Tensor) -> Tensor:
        return _bytes(tensor.contiguous()) if self._gathers else tensor.reshape(-1)

    def split(self, result: Any) -> Iterator[tuple[Exchanging, list[list[Tensor]]]]:
        """What each exchange is sent: a list of tensors per rank, or one list after a reduction."""
        ranks = [self._apart(buffers) for buffers in result]
        for exchange, payload in self._payloads.items():
            yield exchange, [[rank[id(tensor)] for tensor in payload] for rank in ranks]

    def _apart(self, buffers: Sequence[Tensor]) -> dict[int, Tensor]:
        """By id of a tensor that was sent, what came in its place."""
        found = {}
        for group, buffer in zip(self._groups, buffers, strict=True):
            whole = _bytes(buffer.clone() if buffer.data_ptr() % 8 else buffer)
            for tensor, part in zip(group, whole.split([one.nbytes for one in group]), strict=True):
                found[id(tensor)] = part.view(tensor.dtype).view(tensor.shape)
        return found


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
