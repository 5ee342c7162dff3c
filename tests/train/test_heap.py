"""Memory that a step frees is there for the next one."""

import subprocess
import sys

import pytest

from paceline.train import heap

CODE = """
import resource
import torch
from paceline.train.heap import keep

def step():
    blocks = [torch.ones(1 << 20) for _ in range(16)]  # 4 MB each, freed together

kept = keep()
faults = []
for _ in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(kept, min(faults[2:]))
"""


def pages(**environment):
    kept, faults = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True
    ).stdout.split()
    return kept == "True", int(faults)


@pytest.mark.skipif(heap.platform.libc_ver()[0] != "glibc", reason="another C library than glibc")
def test_what_is_freed_is_kept_unless_the_user_says_otherwise():
    assert pages() == (True, 0)
    kept, faults = pages(MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072")
    assert not kept and faults > 16  # 64 MB, in pages of 4 KB or, where the system has them, of 2 MB
