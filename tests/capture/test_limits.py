"""Capture is quick and holds no weights: CPU time and memory of a fresh process, torch imported before."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="capture needs torch")

MEASURE = """
import json, resource, sys, time
import torch
import paceline as pl
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
before, start = peak(), time.process_time()
workload = pl.capture(sys.argv[1], precision="amp_bf16")
print(json.dumps([time.process_time() - start, peak() - before, workload.parameter_count]))
"""


@pytest.mark.parametrize(("name", "seconds"), [("resnet50", 2.0), ("llama3-8b", 4.0), ("llama3-70b", 6.0)])
def test_time_and_memory(name, seconds):
    spent, grown, parameters = [], 0, 0
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, name], capture_output=True, text=True, check=True
        )
        used, grown, parameters = json.loads(done.stdout)
        spent.append(used)
        if used < seconds:
            break
    assert min(spent) < seconds
    assert grown < 400e6 and (parameters < 1e9 or grown < parameters / 20)
