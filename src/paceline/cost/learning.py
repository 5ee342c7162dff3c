"""The law of large batches from runs: S(B) = S_min (1 + B_crit / B) steps reach a target at a batch of B
samples.

McCandlish et al., An Empirical Model of Large-Batch Training, 2018, equation 2.11: at batches far below the
critical one, a doubled batch halves the steps; far above it, steps stay at S_min and samples are wasted. The
law holds where the learning rate is tuned for each batch. In samples, E = S B = S_min (B + B_crit).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.errors import DataError

#: where steps fall as fast as the batch grows, S_min is that of a critical batch so many times the largest
_FAR = 1e3


def fitted_law(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """S_min and B_crit from (batch, steps) of runs. Relative errors count: spreads grow with the steps.

    With x = 1 / B the law is the line S = S_min + S_min B_crit x, neither of whose coefficients is negative.

    >>> points = [(64.0, 1100.0), (512.0, 225.0), (4096.0, 115.625)]
    >>> [round(one, 6) for one in fitted_law(points)]
    [100.0, 640.0]
    """
    if len({batch for batch, _ in points}) < 2:
        raise DataError("steps to the target are needed at two batches or more; measure another batch")
    if not all(batch > 0 and steps > 0 for batch, steps in points):
        raise DataError("batches and steps to the target must be above zero")
    batches, steps = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    # so much of each coefficient makes up the whole of a point
    floor, falling = 1 / steps, 1 / (batches * steps)
    scale = float(falling.max() / floor.max())
    rows = np.stack([floor, falling / scale], axis=1)
    (least, scaled), *_ = np.linalg.lstsq(rows, np.ones(len(points)), rcond=None)
    slope = scaled / scale
    if slope < 0:
        least, slope = floor.sum() / (floor @ floor), 0.0
    elif least <= 0:
        slope = falling.sum() / (falling @ falling)
        least = slope / (_FAR * batches.max())
    return float(least), float(slope / least)
