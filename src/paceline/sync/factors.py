"""Fully connected layers exchange input activations and output errors in place of weight gradients.

The gradient of a weight (n_out x n_in) is E' X with the errors E (b x n_out) and inputs X (b x n_in) of a
batch, so that ranks can send these factors and multiply afterwards. Bytes that one of P ranks sends, b
samples on each, 4 bytes an element:

    gradient    2 (P-1)/P n_in n_out
                reduce-scatter and all-gather
    rows        (P-1) b n_in + (P-1)/P b n_out + (P-1)/P n_in n_out
                gather X, each rank gets the columns of E for the rows of the weight that it updates,
                all-gather of the updated weight
    factors     (P-1) b (n_in + n_out)
                gather both; every rank multiplies and updates everything

`rows` is how Lee et al. (MLHPC 2018) treat fully connected layers (they share out columns; the sum of both
exchanges is the same to a factor of at most P). `factors` is the sufficient factor broadcasting of Xie et al.
(UAI 2016); it multiplies P times as much.
"""

from __future__ import annotations

from dataclasses import dataclass

MODES = ("gradient", "rows", "factors")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """A fully connected layer in a step of one rank."""

    n_in: int
    n_out: int
    rows: int

    @property
    def product_flops(self) -> float:
        """Of the gradient of the weight, from one rank's rows."""
        return 2.0 * self.rows * self.n_in * self.n_out

    def exchanges(self, mode: str, world: int) -> list[tuple[str, float]]:
        """Collectives of a step, with the elements that all ranks together put in or get out of each."""
        weight, inputs, errors = self.n_in * self.n_out, self.rows * self.n_in, self.rows * self.n_out
        by_mode: dict[str, list[tuple[str, float]]] = {
            "gradient": [("reduce_scatter", weight), ("all_gather", weight)],
            "rows": [("all_gather", world * inputs), ("all_to_all", errors), ("all_gather", weight)],
            "factors": [("all_gather", world * inputs), ("all_gather", world * errors)],
        }
        return by_mode[mode]

    def sent_bytes(self, mode: str, world: int) -> float:
        """What one rank sends, float32."""
        return 4.0 * (world - 1) / world * sum(elements for _, elements in self.exchanges(mode, world))

    def extra_flops(self, mode: str, world: int) -> float:
        """Multiplications and additions beyond the local weight gradient, whose product all modes need
        once.
        """
        return self.product_flops * (world - 1) if mode == "factors" else 0.0

    def choose(self, world: int, link_Bps: float, flops: float) -> str:
        """The mode of least time on the wire and in products, for a link of `link_Bps` and a device of
        `flops` per second.
        """
        allowed = [mode for mode in MODES if mode != "rows" or self.n_out % world == 0]
        return min(
            allowed,
            key=lambda mode: self.sent_bytes(mode, world) / link_Bps + self.extra_flops(mode, world) / flops,
        )
