"""How long capturing and predicting take on this machine, in CPU seconds.

    python benchmarks/speed.py

A capture is timed in a process of its own, after torch is imported; a prediction is the median of many from a
workload in memory.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

MODELS = {
    "resnet50": {"batch": 128, "precision": "amp_bf16"},
    "inception-v3": {"batch": 64},
    "gpt2-1.5b": {"batch": 4, "seq": 1024, "precision": "amp_bf16"},
    "llama3-8b": {"batch": 1, "seq": 8192, "precision": "bf16"},
    "llama3-70b": {"batch": 1, "seq": 8192, "precision": "bf16"},
}


def measure(name: str) -> dict[str, float]:
    import torch  # noqa: F401

    import paceline as pl

    start = time.process_time()
    workload = pl.capture(name, **MODELS[name])
    capture_s = time.process_time() - start
    device = pl.devices.get("h200")
    times = []
    for _ in range(100):
        start = time.perf_counter()
        pl.predict(workload, device)
        times.append(time.perf_counter() - start)
    return {
        "capture_s": capture_s,
        "first_ms": 1e3 * times[0],
        "predict_ms": 1e3 * statistics.median(times[1:]),
    }


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
        return
    print(f"{'model':14s} {'capture CPU-s':>14s} {'first predict ms':>17s} {'predict ms':>11s}")
    for name in MODELS:
        out = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, check=True)
        row = json.loads(out.stdout.splitlines()[-1])
        print(f"{name:14s} {row['capture_s']:14.2f} {row['first_ms']:17.1f} {row['predict_ms']:11.2f}")


if __name__ == "__main__":
    main()
