"""Every method solves a small least-squares problem, spread over ranks."""

import pytest
import torch

from paceline.train.compress import lockstep, make

WORLD = 4
#: method, learning rate, share of the first loss that may be left after 300 steps
CASES = [
    ("fp32", 0.1, 1e-6),
    ("fp16", 0.1, 1e-6),
    ("bf16", 0.1, 1e-5),
    ("terngrad:min_elements=0", 0.05, 1e-3),
    ("qsgd", 0.1, 1e-5),
    ("signsgd", 0.1, 2e-2),
    ("signsgd:scaled=false", 0.02, 2e-2),
    ("onebit", 0.05, 1e-3),
    ("topk:ratio=0.1", 0.05, 1e-3),
    ("randomk:ratio=0.1", 0.05, 1e-3),
    ("dgc:ratio=0.1,momentum=0.5", 0.05, 1e-3),
    ("powersgd:rank=2", 0.1, 1e-3),
]


def run(text, rate, steps=300, decay=True):
    """Loss before and after: each rank holds its own samples of one linear problem, with a solution that fits
    all.
    """
    draw = torch.Generator().manual_seed(0)
    truth = torch.randn(40, 8, generator=draw)
    inputs = [torch.randn(64, 40, generator=draw) for _ in range(WORLD)]
    weight = torch.zeros(40, 8)
    compressors = [make(text, rank=r, world=WORLD) for r in range(WORLD)]

    def loss():
        return sum(float((x @ (weight - truth)).square().mean()) for x in inputs) / WORLD

    first = loss()
    for t in range(steps):
        grads = [x.T @ (x @ (weight - truth)) / len(x) for x in inputs]
        for compressor in compressors:
            compressor.begin_step()
        outs = lockstep(compressors, "w", grads)
        for compressor in compressors:
            compressor.end_step()
        weight = weight - rate * (1 - t / steps if decay else 1) * outs[0]
    return first, loss()


@pytest.mark.parametrize(("text", "rate", "left"), CASES)
def test_least_squares(text, rate, left):
    first, last = run(text, rate)
    assert last < left * first


def test_error_feedback_is_what_makes_sparse_gradients_work():
    with_memory, without = run("topk:ratio=0.02", 0.05)[1], run("topk:ratio=0.02,feedback=false", 0.05)[1]
    assert with_memory < 0.5 * without
