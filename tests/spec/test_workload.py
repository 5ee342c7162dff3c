"""A workload as a file: what is saved is what is loaded, and broken files are named."""

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import SpecError
from paceline.spec.workload import Access, Op, Parameter, Segment, Workload

PRODUCT = Op(
    "aten.mm",
    "gemm",
    "forward",
    "head",
    "bf16",
    2.0 * 8 * 16 * 32,
    (Access(1, 512), Access(2, 1024, 7)),
    (Access(3, 256),),
    (1, 8, 16, 32),
    ("tt", "align8"),
)
RELU = Op(
    "aten.relu", "elementwise", "forward", "", "bf16", 0.0, (Access(3, 256, 0),), (Access(4, 256),), (128,)
)
SEGMENTS = (
    Segment(
        "head", "forward", (PRODUCT, RELU), {"activations": 256}, {"activations": 256, "temporary": 256}, 4, 2
    ),
    Segment("head", "backward", (PRODUCT,), {"activations": -256}, {}, 2),
)


def workload(**changes):
    fields = {
        "name": "tiny",
        "batch": 8,
        "seq": None,
        "unit": "samples",
        "units_per_step": 8,
        "precision": "bf16",
        "optimizer": "sgd",
        "segments": SEGMENTS,
        "order": (0, 0, 0, 1),
        "parameters": (Parameter("head.weight", (16, 32), "bf16", 0), Parameter("scale", (), "fp32")),
        "resident": {"parameters": 1536},
        "options": {"checkpointing": False},
        "captured_with": {"torch": "2.13"},
    }
    return Workload(**{**fields, **changes})


def test_counts():
    one = workload()
    assert one.parameter_count == 16 * 32 + 1 and [p.bytes for p in one.parameters] == [1024, 4]
    assert one.flops == 4 * PRODUCT.flops
    assert (PRODUCT.bytes_read, PRODUCT.bytes_written) == (1536, 256)


@given(
    order=st.lists(st.integers(0, 1), min_size=1, max_size=30),
    batch=st.integers(1, 10**6),
    seq=st.none() | st.integers(1, 10**6),
    name=st.text(max_size=20).filter(str.isprintable),
    flops=st.floats(0, 1e30),
    tags=st.lists(st.text(max_size=5), max_size=3),
)
def test_plain_data_and_back(order, batch, seq, name, flops, tags):
    op = Op(
        name, "gemm", "forward", name, "fp32", flops, PRODUCT.reads, PRODUCT.writes, (batch,), tuple(tags)
    )
    one = workload(
        order=tuple(order),
        batch=batch,
        seq=seq,
        name=name,
        segments=(*SEGMENTS, Segment("", "forward", (op,))),
    )
    back = Workload.from_dict(json.loads(json.dumps(one.to_dict())))
    assert all(getattr(back, field) == getattr(one, field) for field in Workload.__dataclass_fields__)


def test_file_and_back(tmp_path):
    path = tmp_path / "tiny.workload.json"
    workload().save(path)
    back = Workload.load(path)
    assert back.segments == SEGMENTS and back.order == (0, 0, 0, 1) and back.flops == workload().flops
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_file_that_cannot_be_written_is_left_alone(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(SpecError, match="cannot write .*taken"):
        workload().save(tmp_path / "taken")
    with pytest.raises(SpecError, match="cannot write .*absent"):
        workload().save(tmp_path / "absent" / "tiny.json")
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON: line 1 column 2"),
        ("[1]", "expected a JSON object, got list"),
        ("{}", "not a workload of format 1 .got None."),
        ('{"paceline_workload": 99}', "not a workload of format 1 .got 99.*write it again"),
        (None, "cannot read workload .*No such file"),
        (b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_broken_file(tmp_path, text, message):
    path = tmp_path / "w.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SpecError, match=message):
        Workload.load(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("order", [[2, 1]], "order names segment 2 of 2"),
        ("order", [[-1, 1]], "order names segment -1"),
        ("order", [[0, 1, 2]], "broken workload"),
        ("order", [], "order is empty"),
        ("order", None, "broken workload"),
        ("segments", [5], "broken workload"),
        ("parameters", [["w"]], "broken workload"),
        ("op_names", [], "broken workload"),
        ("batch", "many", "batch is 'many'"),
        ("resident", [], "resident is"),
        ("name", None, "name is None"),
    ],
)
def test_broken_content(key, value, message):
    data = {**copy.deepcopy(workload().to_dict()), key: value}
    with pytest.raises(SpecError, match=f"^here: .*{message}"):
        Workload.from_dict(data, "here")
    del data[key]
    with pytest.raises(SpecError, match=f"broken workload: KeyError '{key}'; write it again"):
        Workload.from_dict(data, "here")
