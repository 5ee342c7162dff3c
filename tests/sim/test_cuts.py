"""Places to cut a module at: where one activation passes, in any module; and chunks of like weight."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline as pl
from paceline.predict.layout import Layout
from paceline.sim.cuts import backward_places, balanced, places, written_out

torch = pytest.importorskip("torch", reason="capture needs torch")


class Skip(torch.nn.Module):
    """Three layers, the second and third of which a skip connection spans."""

    def __init__(self):
        super().__init__()
        self.first, self.left, self.right, self.last = (torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        return self.last(x + self.right(torch.relu(self.left(x))))


def test_a_skip_connection_is_not_cut():
    workload = pl.capture((Skip(), (torch.zeros(4, 8),)), batch=4)
    ops = written_out(workload)
    assert [(ops[place.operator][1].module, place.bytes) for place in places(workload)][:2] == [
        ("left", 4 * 8 * 4),
        ("last", 4 * 8 * 4),
    ]


@pytest.mark.parametrize(
    ("model", "options", "least"),
    [
        ("resnet18", {"batch": 2, "image": 64}, 8),
        ("gpt2-124m", {"batch": 1, "seq": 32}, 12),
        ("vgg11", {"batch": 1, "image": 64}, 10),
        ("gpt2-124m", {"batch": 1, "seq": 32, "checkpointing": True}, 12),
        ("resnet18", {"batch": 2, "image": 64, "compile": True}, 8),
    ],
)
def test_every_operator_has_its_chunk(model, options, least):
    """Forward chunks rise, backward chunks fall, and both visit all of them."""
    workload = pl.capture(model, **options)
    found = places(workload)
    assert len(found) >= least and all(place.bytes > 0 for place in found)
    middle = [place.operator for place in found][:: max(1, len(found) // 4)]
    chunk = backward_places(workload, middle, Layout(workload).visits)
    phases = np.array([op.phase for _, op in written_out(workload)])
    forward, backward = chunk[phases == "forward"], chunk[(phases == "backward") | (phases == "recompute")]
    assert (np.diff(forward) >= 0).all() and (np.diff(backward) <= 0).all()
    assert (
        set(forward) == set(backward) == set(range(len(middle) + 1))
        and (chunk[phases == "optimizer"] == -1).all()
    )


@given(st.lists(st.integers(1, 20), min_size=2, max_size=9), st.data())
def test_the_heaviest_chunk_is_as_light_as_can_be(weights, data):
    cuts = data.draw(st.integers(1, len(weights) - 1))

    def heaviest(chosen):
        return max(part.sum() for part in np.split(np.array(weights), [c + 1 for c in chosen]))

    found = balanced(np.array(weights, dtype=float), cuts)
    assert len(found) == cuts and sorted(set(found)) == found and found[-1] < len(weights) - 1
    assert heaviest(found) == min(heaviest(chosen) for chosen in combinations(range(len(weights) - 1), cuts))
