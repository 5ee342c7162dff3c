"""Traces: Chrome trace events as Perfetto and HolisticTraceAnalysis read them."""

import gzip
import json
from itertools import pairwise

import pytest

from paceline.errors import SpecError
from paceline.sim.timeline import Span, Timeline

TIMELINE = Timeline((
    Span("aten.mm", "host", 0.0, 1e-6, "forward", {}), Span("aten.mm", "device", 1e-6, 4e-6, "forward", {"flops": 8.0}),
    Span("aten.relu", "host", 1e-6, 2e-6, "forward", {}), Span("aten.relu", "device", 4e-6, 5e-6, "forward", {"flops": 0.0}),
), "tiny on one device")


def test_events():
    events = list(TIMELINE.events())
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == 4 and {names[e["tid"]] for e in spans} == {"host", "stream 7 (device)"}
    assert [(e["name"], e["cat"], e["ts"], e["dur"]) for e in spans[:2]] == [("aten.mm", "cpu_op", 0, 1), ("aten.mm", "kernel", 1, pytest.approx(3))]
    # a kernel is tied to the call that launched it
    assert [e["args"]["correlation"] for e in spans] == [0, 0, 1, 1]
    assert spans[1]["args"]["flops"] == 8.0 and spans[1]["args"]["stream"] == 7


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_file(tmp_path, name):
    path = tmp_path / name
    TIMELINE.save(path)
    data = json.loads(gzip.decompress(path.read_bytes()) if name.endswith("gz") else path.read_bytes())
    assert data["traceEvents"] == list(TIMELINE.events()) and data["distributedInfo"] == {"rank": 0}
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_file_that_cannot_be_written(tmp_path):
    with pytest.raises(SpecError, match="cannot write trace .*No such file"):
        TIMELINE.save(tmp_path / "absent" / "trace.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("model", "options"), [
    ("resnet18", {"batch": 1, "image": 64}), ("gpt2-124m", {"batch": 16, "seq": 512, "precision": "bf16"}),
])
def test_trace_of_a_prediction(model, options):
    """No span has a negative length, none overlaps another of its stream, no kernel starts before it was issued."""
    pytest.importorskip("torch", reason="capture needs torch")
    import paceline as pl
    from paceline.predict.step import predict

    workload = pl.capture(model, **options)
    prediction = predict(workload, pl.devices.get("h200"), trace=True)
    spans = [e for e in prediction.timeline.events() if e["ph"] == "X"]
    assert len(spans) == 2 * sum(len(workload.segments[i].ops) for i in workload.order)
    for stream in ("cpu_op", "kernel"):
        lane = [e for e in spans if e["cat"] == stream]
        assert all(e["dur"] >= 0 and e["ts"] >= -1e-3 for e in lane)
        assert all(b["ts"] >= a["ts"] + a["dur"] - 1e-3 for a, b in pairwise(lane))
    for call, kernel in zip(spans[::2], spans[1::2], strict=True):
        assert call["args"]["correlation"] == kernel["args"]["correlation"]
        assert kernel["ts"] >= call["ts"] + call["dur"] - 1e-3
