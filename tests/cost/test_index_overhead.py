"""Index overhead: closed forms, and codes that are written out."""

import math

import numpy as np
import pytest

from paceline.cost.index_overhead import (
    SparseLayout,
    bitmap,
    csr,
    forms,
    levels,
    run_fillers,
    run_length,
    two_four,
    unit_shape,
)
from paceline.spec.sparsity import Granularity


def layout(**changes):
    return SparseLayout(**{"rows": 64, "columns": 128, "kept": 2048, **changes})


def test_closed_forms():
    one = layout()
    assert one.density == 0.25 and one.dense_bits == 64 * 128 * 16
    assert bitmap(one).index_bits == 64 * 128
    assert csr(one).index_bits == 2048 * 7 + 65 * 12  # 128 columns; offsets from 0 to 2048
    assert two_four(one).index_bits == 2 * 2048
    assert bitmap(one).bits == 64 * 128 + 2048 * 16


def test_a_unit_of_many_values_shares_its_place():
    one = layout(size=8)
    assert bitmap(one).index_bits == 64 * 128 and bitmap(one).values == 2048 * 8
    assert two_four(one).index_bits == 2 * 2048 * 8


@pytest.mark.parametrize(("count", "bits"), [(0, 0), (1, 0), (2, 1), (3, 2), (128, 7), (129, 8)])
def test_levels(count, bits):
    assert levels(count) == bits


def entries(kept, bits):
    """Entries of a run-length code: each says how many units were left out before its own."""
    found, run = 0, 0
    for one in kept:
        if one or run == 2**bits - 1:  # after the longest run, a unit of zeros is stored
            found, run = found + 1, 0
        else:
            run += 1
    return found


@pytest.mark.parametrize("density", [0.5, 0.1, 0.02])
@pytest.mark.parametrize("bits", [1, 3, 5])
def test_fillers_of_random_places(density, bits):
    kept = np.random.default_rng(0).random(400_000) < density
    written = entries(kept, bits) / kept.sum()
    assert math.isclose(1 + run_fillers(density, bits), written, rel_tol=0.02)


def test_nothing_left_out_needs_no_fillers():
    assert run_fillers(1.0, 4) == 0.0


def test_the_best_width_of_runs_is_taken():
    best = run_length(layout(kept=82))
    assert best.bits == min(run_length(layout(kept=82), bits).bits for bits in range(1, 17))
    assert run_length(layout(kept=82)).bits < run_length(layout(kept=82), 1).bits


def test_only_two_four_has_its_own_form():
    assert next(form.form for form in forms(layout(kept=4096), structured=True)) == "2:4"
    assert all(form.form != "2:4" for form in forms(layout()))


@pytest.mark.parametrize(
    ("granularity", "unit"),
    [
        ("element", (1, 1)),
        ("2:4", (1, 1)),
        ("vector", (1, 8)),
        ("kernel", (1, 9)),
        ("block", (8, 8)),
        ("filter", (1, 144)),
    ],
)
def test_units_of_a_convolution(granularity, unit):
    assert unit_shape(Granularity.of(granularity), 32, 144, 9) == unit


def test_units_are_no_larger_than_the_layer():
    assert unit_shape(Granularity.VECTOR, 4, 5, 1) == (1, 5)
    assert unit_shape(Granularity.BLOCK, 4, 5, 1) == (4, 5)
