"""LSTM language models (Zaremba et al. 2014): dropout on the input, between layers and on the output."""

from __future__ import annotations

from torch import Tensor, nn

from .layers import Built, token_ids, token_loss


class LstmLM(nn.Module):
    """Embedding, stacked LSTM of the same width, and an output projection of its own."""

    def __init__(self, *, vocab: int, width: int, depth: int, p: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.drop = nn.Dropout(p)
        self.lstm = nn.LSTM(width, width, num_layers=depth, batch_first=True, dropout=p)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.drop(self.embed(ids)))
        logits: Tensor = self.head(self.drop(hidden))
        return logits


def lstm_lm(
    *, batch: int, seq: int = 35, width: int = 1500, depth: int = 2, vocab: int = 10_000, p: float = 0.65
) -> Built:
    """LSTM language model over `seq` unrolled steps, from a zero state."""
    ids = token_ids(batch, seq)
    return LstmLM(vocab=vocab, width=width, depth=depth, p=p), (ids,), token_loss(ids)
