"""Fits the constants of 2:4 products to measured gains, and scores them on shapes that were left out.

    python -m paceline.bench.fit.two_four measurements/h200/sparse_products.jsonl.gz           # scores
    python -m paceline.bench.fit.two_four measurements/h200/sparse_products.jsonl.gz --write   # and writes

`benchmarks/sparse_products.py` writes such files. What is fitted is the logarithm of the gain: measured
seconds of the dense product over those of the 2:4 product, against the same ratio of predictions. Each shape
of weights is left out in turn; the spread of those errors is that of predicted gains: their root mean square,
or as much as nine in ten of them need for a 90 % interval, if that is more.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from paceline.catalog import devices
from paceline.cost.chip import chip
from paceline.cost.curves import curves_for
from paceline.cost.make import gemm
from paceline.cost.sparse_products import TwoFourCurve, dense_seconds, two_four_seconds
from paceline.errors import SpecError
from paceline.predict.interval import Z90
from paceline.spec.device import Device
from paceline.spec.workload import Op
from paceline.whatif.sparsity import two_four_rate

Array = NDArray[np.float64]

FILE = Path(__file__).parents[2] / "cost" / "fitted" / "two_four.toml"
#: kind of row that constants are fitted to: the fastest algorithm of the library
KIND = "cusparselt-transposed"
_NAMES = {"bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPair:
    """Seconds of a product on a device, dense and with 2:4 weights."""

    rows: int
    inputs: int
    outputs: int
    dtype: str
    dense_s: float
    sparse_s: float

    @property
    def op(self) -> Op:
        return gemm(1, self.rows, self.outputs, self.inputs, self.dtype)

    @property
    def gain(self) -> float:
        return self.dense_s / self.sparse_s


def read(path: Path, kind: str = KIND) -> tuple[Device, list[MeasuredPair]]:
    """The device of a file of measurements, and its pairs of one kind."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    about = next((row for row in rows if row["kind"] == "about"), None)
    if about is None:
        raise SpecError(f"{path} does not say on which device it was measured: it has no row of kind about")
    return devices.get(about["device"]), list(_pairs(rows, kind))


def _pairs(rows: Iterable[dict[str, Any]], kind: str) -> Iterator[MeasuredPair]:
    """Dense products, each with the one of the kind."""
    found: dict[tuple[int, int, int, str], dict[str, float]] = defaultdict(dict)
    for row in rows:
        if "device_s" in row:
            key = row["rows"], row["inputs"], row["outputs"], _NAMES[row["dtype"]]
            found[key][row["kind"]] = row["device_s"]
    for (rows_, inputs, outputs, dtype), seconds in found.items():
        if kind in seconds:
            sizes = {"rows": rows_, "inputs": inputs, "outputs": outputs}
            yield MeasuredPair(**sizes, dtype=dtype, dense_s=seconds["dense"], sparse_s=seconds[kind])


def predicted_gains(pairs: Sequence[MeasuredPair], device: Device, curve: TwoFourCurve | None) -> Array:
    """Gain of each pair, by the cost model."""
    ops, target, curves = [pair.op for pair in pairs], chip(device), curves_for(device)
    rate = two_four_rate(device)
    if rate is None:
        raise SpecError(f"{device.name} has no units for 2:4 weights")
    dense = dense_seconds(ops, target, curves)
    return np.asarray(dense / two_four_seconds(ops, target, curves, rate, curve))


def log_errors(pairs: Sequence[MeasuredPair], device: Device, curve: TwoFourCurve | None) -> Array:
    """Logarithm of each predicted gain over the measured one."""
    measured = np.array([pair.gain for pair in pairs])
    return np.asarray(np.log(predicted_gains(pairs, device, curve) / measured))


def fit(pairs: Sequence[MeasuredPair], device: Device) -> tuple[float, float]:
    """Efficiency and share of the bandwidth."""

    def errors(logs: Array) -> Array:
        efficiency, memory = np.exp(logs)
        return log_errors(pairs, device, _curve(efficiency, memory))

    found = least_squares(errors, np.log([0.8, 0.5]))
    efficiency, memory = np.exp(found.x)
    return float(efficiency), float(memory)


def _curve(efficiency: float, memory: float, sigma: float = 0.0, device: str = "") -> TwoFourCurve:
    return TwoFourCurve(efficiency=efficiency, memory=memory, sigma=sigma, source="", device=device)


def held_out(pairs: Sequence[MeasuredPair], device: Device) -> tuple[list[MeasuredPair], Array]:
    """Every pair, and its error with constants fitted to the other shapes of weights."""
    shapes = dict.fromkeys((pair.inputs, pair.outputs) for pair in pairs)
    every: list[MeasuredPair] = []
    errors: list[float] = []
    for shape in shapes:
        rest = [pair for pair in pairs if (pair.inputs, pair.outputs) != shape]
        mine = [pair for pair in pairs if (pair.inputs, pair.outputs) == shape]
        every += mine
        errors += list(log_errors(mine, device, _curve(*fit(rest, device))))
    return every, np.array(errors)


def spread(errors: Array) -> float:
    """Standard deviation whose 90 % interval holds nine in ten errors."""
    needed = float(np.quantile(np.abs(errors), 0.9, method="higher")) / Z90
    return max(float(np.sqrt(np.mean(errors**2))), needed)


def _show(tested: Sequence[MeasuredPair], errors: Array, sigma: float) -> None:
    """Each pair beside its prediction, and how far off they are together."""
    print("rows    inputs  outputs  dense us  2:4 us  gain  predicted, shape left out")
    for pair, error in zip(tested, errors, strict=True):
        seconds = f"{1e6 * pair.dense_s:8.1f}  {1e6 * pair.sparse_s:6.1f}"
        gains = f"{pair.gain:.2f}  {pair.gain * np.exp(error):.2f}"
        print(f"{pair.rows:6,}  {pair.inputs:6,}  {pair.outputs:7,}  {seconds}  {gains}")
    measured = np.array([pair.gain for pair in tested])
    inside = np.mean(np.abs(errors) <= Z90 * sigma)
    right = np.mean((measured > 1) == (measured * np.exp(errors) > 1))
    print(f"shapes left out: mean error {100 * np.mean(np.abs(np.expm1(errors))):.1f} %,", end=" ")
    print(f"spread {100 * sigma:.1f} %, {100 * inside:.0f} % in the 90 % interval;", end=" ")
    print(f"faster or slower is right of {100 * right:.0f} %")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--kind", default=KIND)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    device, every = read(args.file, args.kind)
    pairs = [pair for pair in every if pair.dtype == "bf16"]
    efficiency, memory = fit(pairs, device)
    print(f"{device.name}: efficiency {efficiency:.3f}, memory {memory:.3f}")
    tested, errors = held_out(pairs, device)
    sigma = spread(errors)
    _show(tested, errors, sigma)
    if args.write:
        source = f"python -m paceline.bench.fit.two_four: {len(pairs)} products in bf16, shapes left out"
        FILE.write_text(
            f'device = "{device.name}"\nsource = "{source}"\nefficiency = {efficiency:.4g}\n'
            f"memory = {memory:.4g}\nsigma = {sigma:.3g}\n"
        )


if __name__ == "__main__":
    main()
