"""Joules per FLOP that bring published training steps and predictions together (`cost/power.py`).

    python -m paceline.bench.fit.power --data DIR

prints, for each architecture, the number with the least median error of its rows, and what it leaves by
device and precision: one number has to do for all of them.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

from paceline.bench.validate.sets import SETS
from paceline.catalog import architectures, devices
from paceline.errors import PacelineError

#: sets of dense models whose steps products dominate
USED = (
    "megatron_gpt",
    "torchtitan_llama",
    "llmfoundry_mpt_throughput",
    "dgxc_benchmarking_llm",
    "nemo_megatron_bridge",
    "simumax_b200_measured",
)
GRID_PJ = np.arange(0.7, 1.95, 0.05)


def errors(data: Path) -> dict[str, dict[str, list[float]]]:
    """Logarithms of predicted over measured time by architecture, then by device and precision."""
    out: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name in USED:
        for case in SETS[name](data, False) or ():
            if case.predict is None or "step_s" not in case.measured or "MoE" in case.name:
                continue
            try:
                answer = case.predict()["step_s"].value
            except PacelineError:
                continue
            narrow = any(word in case.name.lower() for word in ("fp8", "float8", "precision", "quantization"))
            kind = f"{case.device} {'fp8' if narrow else '16-bit'}"
            out[devices.get(case.device).architecture][kind].append(
                float(np.log(answer / case.measured["step_s"]))
            )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    data = parser.parse_args().data
    tried: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    fitted = {name: one for name, one in architectures.known().items() if one.product_J is not None}
    for joules in GRID_PJ:
        for name, one in fitted.items():
            architectures.known()[name] = replace(one, product_J=joules * 1e-12)
        for architecture, found in errors(data).items():
            everything = np.abs(np.concatenate([np.asarray(logs) for logs in found.values()]))
            shown = ", ".join(
                f"{kind} {100 * np.median(logs):+.0f} % of {len(logs)}" for kind, logs in found.items()
            )
            tried[architecture].append((float(np.median(everything)), float(joules), shown))
    for architecture, rows in sorted(tried.items()):
        error, best, shown = min(rows)
        print(f"{architecture:10} {best:.2f} pJ/FLOP: median error {100 * error:.1f} % ({shown})")


if __name__ == "__main__":
    main()
