"""Bytes, collectives and work of compressed gradients, without torch."""

import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cost import compression as cost
from paceline.errors import SpecError, UnknownName
from paceline.spec.compression import (
    DGC,
    QSGD,
    SCHEMES,
    PowerSGD,
    RandomK,
    Scheme,
    TernGrad,
    TopK,
    from_dict,
    numel,
    parse,
    register,
)
from paceline.spec.compression.sparse import index_bytes, kept

SHAPES = st.lists(st.integers(1, 300), min_size=1, max_size=3)


@pytest.mark.parametrize(
    ("text", "shape", "expected"),
    [
        ("fp32", 1000, 4000),
        ("fp16", 1001, 2002),
        ("bf16", (7, 3), 42),
        ("terngrad", 1000, 200),
        ("terngrad", 1001, 201),
        ("terngrad:share=false", 1001, 205),
        ("qsgd", 1024, 2 * (4 + 256)),
        ("qsgd", 1025, 2 * (4 + 256) + 4 + 1),
        ("qsgd:bits=2,bucket=64", 65, 4 + 16 + 4 + 1),
        ("signsgd", 1001, 126 + 4),
        ("onebit", 1001, 126 + 8),
        ("randomk", 1000, 40),
        # 1000 of 10^6: 9 low bits each, and a bit for each of them and of the 1,954 values of the rest
        ("dgc", 1_000_000, 4000 + 1125 + math.ceil((1000 + 1954) / 8)),
        ("topk:ratio=0.001,values=fp16", 1_000_000, 2000 + 1125 + 370),
        ("topk:ratio=1", 16, 64 + 0 + 4),
        ("topk", 5, 4 + 1 + 1),
        ("powersgd", (1000, 500), 4 * 4 * 1500),
        ("powersgd:rank=2", (64, 3, 7, 7), 4 * 2 * (64 + 147)),
        ("powersgd", 1000, 4000),
        ("powersgd", (5, 5), 100),
        ("powersgd", (1000,), 4000),
    ],
)
def test_wire_bytes(text, shape, expected):
    assert cost.wire_bytes(parse(text), shape) == expected


@pytest.mark.parametrize("name", SCHEMES)
@given(shape=SHAPES)
def test_exchanges_add_up(name, shape):
    scheme = parse(name)
    found = cost.exchanges(scheme, shape)
    assert sum(e.bytes for e in found if e.op != "max") == cost.wire_bytes(scheme, shape)
    assert sum(e.bytes for e in found if e.op == "max") == scheme.shared_bytes(shape)
    assert found[-1].collective == scheme.collective
    assert cost.sent_bytes(scheme, shape, 1) == 0


@given(n=st.integers(1, 10**7), share=st.floats(1e-4, 1))
def test_indices_take_no_more_than_plain_ones(n, share):
    """About 2 + log2(n / k) bits each, never more than that and a few bytes."""
    k = kept(n, share)
    assert 1 <= k <= n
    assert sum(index_bytes(n, k)) * 8 <= k * (3 + math.log2(n / k)) + 24


def test_gathering_grows_with_the_ranks_and_reducing_does_not():
    gathered, reduced = parse("terngrad"), parse("fp16")
    assert cost.sent_bytes(gathered, 10**6, 16) == pytest.approx(15 * 200_000 + 4 * 2 * 15 / 16)
    assert cost.sent_bytes(reduced, 10**6, 16) == pytest.approx(2 * 15 / 16 * 2_000_000)
    # 1.6 bit gathered against 16 bit reduced: no gain beyond 20 ranks
    assert cost.sent_bytes(gathered, 10**6, 18) < cost.sent_bytes(reduced, 10**6, 18)
    assert cost.sent_bytes(gathered, 10**6, 22) > cost.sent_bytes(reduced, 10**6, 22)


def test_warm_up():
    scheme = DGC(warmup_steps=40)
    assert [round(scheme.ratio_at(step), 4) for step in (0, 10, 20, 30, 40, 10**6)] == [
        0.25,
        0.0629,
        0.0158,
        0.004,
        0.001,
        0.001,
    ]
    assert cost.wire_bytes(scheme, 10**6, step=0) > 100 * cost.wire_bytes(scheme, 10**6)
    assert cost.wire_bytes(scheme, 10**6, step=40) == cost.wire_bytes(DGC(), 10**6)


MODEL = [
    ("conv.weight", (64, 32, 3, 3)),
    ("conv.bias", (64,)),
    ("head.weight", (10, 2000)),
    ("head.bias", (10,)),
]


def test_small_tensors_and_the_last_layer_go_whole():
    assert [s.name for s in cost.assign(TernGrad(), MODEL).values()] == ["terngrad", "fp32", "fp32", "fp32"]
    assert [s.name for s in cost.assign(TernGrad(keep_last=False), MODEL).values()] == [
        "terngrad",
        "fp32",
        "terngrad",
        "fp32",
    ]
    assert [s.name for s in cost.assign(TernGrad(min_elements=0), MODEL).values()] == [
        "terngrad",
        "terngrad",
        "fp32",
        "fp32",
    ]
    assert cost.model_bytes(TernGrad(), MODEL) == math.ceil(64 * 32 * 9 / 5) + 4 + 4 * (64 + 20_000 + 10)
    assert cost.model_bytes(TernGrad(), MODEL) - cost.model_bytes(TernGrad(), MODEL, shared=False) == 4
    assert cost.last_layer([("bias", (3,))]) == ""


@pytest.mark.parametrize("name", SCHEMES)
def test_work(name):
    scheme = parse(name)
    encode, two, eight = (
        scheme.encode_work((500, 400)),
        scheme.decode_work((500, 400), 2),
        scheme.decode_work((500, 400), 8),
    )
    larger = scheme.encode_work((1000, 400))
    assert larger.flops >= encode.flops >= 0
    assert larger.bytes >= encode.bytes
    assert two.written_bytes >= 4 * 500 * 400
    assert (eight.bytes > two.bytes) == (scheme.collective == "all_gather")
    if name != "fp32":
        assert encode.read_bytes >= 4 * 500 * 400
        assert encode.passes >= 1


def test_evidence_is_given_for_each():
    for kind in SCHEMES.values():
        assert kind.accuracy
        assert kind.evidence
        assert cost.get(kind.name).title


@pytest.mark.parametrize(
    "scheme",
    [
        TernGrad(clip=3.0),
        DGC(ratio=0.01, nesterov=True),
        PowerSGD(rank=2),
        QSGD(bits=8),
        TopK(values="fp16"),
        RandomK(),
    ],
)
def test_text_and_data_round_trip(scheme):
    assert parse(str(scheme)) == scheme
    assert from_dict(scheme.to_dict()) == scheme


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dcg", "did you mean 'dgc'"),
        ("dgc:ration=1", "did you mean 'ratio'"),
        ("dgc:ratio=0", "ratio must be above 0, up to 1; got 0.0"),
        ("qsgd:bits=3", "bits must be 2, 4 or 8; got 3"),
        ("dgc:ratio", "is not setting=value"),
        ("dgc:ratio=big", "must be a number; got 'big'"),
        ("powersgd:rank=1.5", "must be a whole number"),
        ("dgc:nesterov=maybe", "must be true or false"),
        ("topk:values=fp8", "must be fp32 or fp16"),
        ("terngrad:clip=-1", "clip must be 0 or more"),
        ("qsgd:bucket=9", "a multiple of 8"),
        ("powersgd:rank=0", "1 or more; got 0"),
    ],
)
def test_mistakes_are_named(text, message):
    with pytest.raises((SpecError, UnknownName), match=message):
        parse(text)


def test_empty_gradients_are_refused():
    with pytest.raises(SpecError, match="at least one element"):
        cost.wire_bytes(parse("onebit"), 0)


def test_needs_no_torch():
    code = "import paceline.cost.compression, sys; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split() == ["False", "False"]


def test_measured_encoders_are_those_of_the_documentation():
    """Copies of one core, as docs/compression.md shows them, are what predictions use."""
    table = {row[0]: row for row in documented_rows() if len(row) == 7}
    for name, (encode, decode) in cost.copies()["cpu"].items():
        assert (float(table[name][1]), float(table[name][2])) == (encode, decode), name
    for name, (encode, decode) in cost.copies()["gpu"].items():
        assert (float(table[name][3]), float(table[name][4])) == (encode, decode), name


def documented_rows():
    text = (Path(__file__).parents[2] / "docs" / "compression.md").read_text(encoding="utf-8")
    return [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]


def test_a_scheme_of_ones_own_is_known_by_its_name():
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Nibble(Scheme):
        """Four bits an element."""

        name: ClassVar[str] = "nibble"
        title: ClassVar[str] = "four bits"
        accuracy: ClassVar[str] = "unknown"
        evidence: ClassVar[str] = "a test"
        encoder: ClassVar[str] = "nowhere:Nothing"

        def payload_bytes(self, shape, step):
            return numel(shape) // 2

        def encode_work(self, shape):
            return self.per_element(shape, 2, 4, 0, 1)

        def decode_work(self, shape, world):
            return self.added_up(shape, world, 2)

    register(Nibble)
    try:
        assert parse("nibble:min_elements=0").exchanges(1000) == (cost.Exchange("gather", 500),)
        with pytest.raises(SpecError, match="registered already"):
            register(dataclass(frozen=True, slots=True, kw_only=True)(type("Other", (Nibble,), {})))
    finally:
        del SCHEMES["nibble"]
