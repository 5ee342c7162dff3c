"""2:4 products and skipped zeros by the cost model, against the dense model and measurements."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.bench.fit import two_four as fitting
from paceline.catalog import devices
from paceline.cost.chip import chip
from paceline.cost.curves import curves_for
from paceline.cost.make import conv, gemm
from paceline.cost.operators import times
from paceline.cost.pack import pack_ops
from paceline.cost.sparse_products import (
    TwoFourCurve,
    ZeroOperand,
    dense_seconds,
    skipping_seconds,
    two_four_curve,
    two_four_seconds,
)
from paceline.errors import SpecError
from paceline.predict.interval import Z90

MEASURED = Path(__file__).parents[2] / "measurements" / "h200" / "sparse_products.jsonl.gz"
H200 = devices.get("h200")
CHIP, CURVES = chip(H200), curves_for(H200)
OPS = [
    gemm(1, 8192, 4096, 4096, "bf16"),
    gemm(1, 16, 768, 3072, "fp16", "tn"),
    conv(8, 64, 128, 1, 56, 3, 1, 1, "bf16", "dgrad", "nhwc"),
]


def test_dense_products_are_those_of_the_cost_model():
    assert np.allclose(dense_seconds(OPS, CHIP, CURVES), times(pack_ops(OPS), CHIP, CURVES).seconds)


def test_none_are_none():
    assert not len(dense_seconds([], CHIP, CURVES)) and not len(two_four_seconds([], CHIP, CURVES, 2.0))


def test_a_large_product_gains_the_rate_times_the_efficiency():
    large = [gemm(1, 65536, 16384, 16384, "bf16")]
    ideal = TwoFourCurve(efficiency=1.0, memory=1.0, sigma=0.0, source="", device="")
    gain = dense_seconds(large, CHIP, CURVES) / two_four_seconds(large, CHIP, CURVES, 2.0, ideal)
    assert 1.9 < gain[0] < 2.0
    fitted = two_four_curve()
    gain = dense_seconds(large, CHIP, CURVES) / two_four_seconds(large, CHIP, CURVES, 2.0)
    assert math.isclose(gain[0], 2 * fitted.efficiency, rel_tol=0.1)


def test_activations_are_read_as_ever():
    """Where all weights together are few bytes, half of them is little."""
    tall, ideal = (
        [gemm(1, 2**20, 64, 64, "bf16")],
        TwoFourCurve(efficiency=1.0, memory=1.0, sigma=0.0, source="", device=""),
    )
    gain = dense_seconds(tall, CHIP, CURVES) / two_four_seconds(tall, CHIP, CURVES, 2.0, ideal)
    assert gain[0] < 1.2


def operand(zeros, skips, size=1e6):
    return ZeroOperand(bytes=size, zeros=zeros, skips=skips)


def test_skipped_zeros_take_no_time():
    large = [gemm(1, 16384, 8192, 8192, "bf16")]
    dense = dense_seconds(large, CHIP, CURVES)
    untouched = skipping_seconds(large, [[operand(0.9, 0.0)]], CHIP, CURVES)
    half = skipping_seconds(large, [[operand(0.5, 1.0)]], CHIP, CURVES)
    both = skipping_seconds(large, [[operand(0.5, 1.0), operand(0.5, 0.5)]], CHIP, CURVES)
    assert np.allclose(untouched, dense)
    assert math.isclose((dense / half)[0], 2, rel_tol=0.05)
    assert math.isclose((dense / both)[0], 1 / (0.5 * 0.75), rel_tol=0.05)


def test_a_bitmap_is_used_where_it_is_smaller():
    assert operand(0.5, 1.0).stored(2) == 1e6 * (0.5 + 1 / 16)
    assert operand(0.01, 1.0).stored(2) == 1e6
    assert operand(0.5, 0.0).stored(2) == 1e6


# -- against measurements --------------------------------------------------------------------------


def test_gains_of_the_h200_are_in_their_interval():
    device, pairs = fitting.read(MEASURED)
    bf16 = [pair for pair in pairs if pair.dtype == "bf16"]
    errors = fitting.log_errors(bf16, device, None)
    assert device.name == two_four_curve().device == "h200" and len(bf16) == 42
    assert np.mean(np.abs(errors) <= Z90 * two_four_curve().sigma) >= 0.9
    large = [abs(error) for pair, error in zip(bf16, errors, strict=True) if pair.rows >= 2048]
    assert np.mean(large) < 0.06


def test_the_constants_are_those_that_the_fit_finds():
    device, pairs = fitting.read(MEASURED)
    bf16 = [pair for pair in pairs if pair.dtype == "bf16"]
    efficiency, memory = fitting.fit(bf16, device)
    shipped = two_four_curve()
    assert math.isclose(efficiency, shipped.efficiency, rel_tol=1e-3)
    assert math.isclose(memory, shipped.memory, rel_tol=1e-3)
    tested, errors = fitting.held_out(bf16, device)
    assert len(tested) == 42 and math.isclose(fitting.spread(errors), shipped.sigma, rel_tol=0.01)


def test_few_rows_gain_nothing_and_the_model_says_so():
    device, pairs = fitting.read(MEASURED)
    few = [pair for pair in pairs if pair.rows == 16]
    gains = fitting.predicted_gains(few, device, None)
    assert len(few) == 7 and all(pair.gain < 1 for pair in few) and (gains < 1).all()


def test_a_file_that_names_no_device(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"kind": "dense", "rows": 1}\n')
    with pytest.raises(SpecError, match="on which device"):
        fitting.read(file)


def test_a_device_without_units_for_two_four():
    with pytest.raises(SpecError, match="no units for 2:4"):
        fitting.predicted_gains([], replace(H200, architecture="volta"), None)
