"""Traces: Chrome trace events as Perfetto and HolisticTraceAnalysis read them."""

import gzip
import json
from itertools import pairwise

import pytest

from paceline.errors import SpecError
from paceline.sim.timeline import Span, Timeline

TIMELINE = Timeline(
    (
        Span("aten.mm", "host", 0.0, 1e-6, "forward", {}),
        Span("aten.mm", "device", 1e-6, 4e-6, "forward", {"flops": 8.0}),
        Span("aten.relu", "host", 1e-6, 2e-6, "forward", {}),
        Span("aten.relu", "device", 4e-6, 5e-6, "forward", {"flops": 0.0}),
    ),
    "tiny on one device",
)


def test_events():
    events = list(TIMELINE.events())
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == 4 and {names[e["tid"]] for e in spans} == {"host", "stream 7 (device)"}
    assert [(e["name"], e["cat"], e["ts"], e["dur"]) for e in spans[:2]] == [
        ("aten.mm", "cpu_op", 0, 1),
        ("aten.mm", "kernel", 1, pytest.approx(3)),
    ]
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


RANKS = Timeline(
    (
        Span("forward", "compute", 0.0, 3e-6, "forward", {}, 0),
        Span("ncclDevKernel_AllReduce", "dp", 2e-6, 4e-6, "reduction", {"bytes": 8.0}, 0),
        Span("forward", "compute", 3e-6, 5e-6, "forward", {}, 1),
        Span("ncclDevKernel_SendRecv", "pp forward", 3e-6, 4e-6, "transfers", {}, 1),
    ),
    "tiny on two",
)


def test_a_file_per_rank(tmp_path):
    """Analysers want one file per rank, which says whose it is and holds nothing of the others."""
    RANKS.save(tmp_path / "traces")
    assert sorted(p.name for p in (tmp_path / "traces").iterdir()) == ["rank-0.json.gz", "rank-1.json.gz"]
    for rank in (0, 1):
        data = json.loads(gzip.decompress((tmp_path / "traces" / f"rank-{rank}.json.gz").read_bytes()))
        assert data["distributedInfo"] == {"rank": rank, "world_size": 2} and {
            e["pid"] for e in data["traceEvents"]
        } == {rank}
        spans = [e for e in data["traceEvents"] if e["ph"] == "X"]
        assert [e["name"] for e in spans].count("forward") == 1 and spans[-1]["name"] == "ProfilerStep#0"
        # what the Chrome trace format asks of complete events
        assert all(
            {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"} <= e.keys() and e["dur"] >= 0
            for e in spans
        )
        assert all({"stream", "correlation"} <= e["args"].keys() for e in spans if e["cat"] == "kernel")
    (tmp_path / "taken").write_text("")
    with pytest.raises(SpecError, match="cannot write traces into"):
        RANKS.save(tmp_path / "taken")


@pytest.mark.filterwarnings("ignore")
def test_holistic_trace_analysis_reads_it(tmp_path):
    hta = pytest.importorskip("hta.trace_analysis", reason="HolisticTraceAnalysis is not installed")
    RANKS.save(tmp_path / "traces")
    found = hta.TraceAnalysis(trace_dir=str(tmp_path / "traces"))
    times = found.get_temporal_breakdown(visualize=False)
    assert sorted(times["rank"]) == [0, 1] and times.loc[times["rank"] == 0, "compute_time(us)"].item() == 3
    overlap = found.get_comm_comp_overlap(visualize=False)
    assert overlap.loc[overlap["rank"] == 0, "comp_comm_overlap_pctg"].item() == pytest.approx(50)


def test_file_that_cannot_be_written(tmp_path):
    with pytest.raises(SpecError, match="cannot write trace .*No such file"):
        TIMELINE.save(tmp_path / "absent" / "trace.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model", "options"),
    [("resnet18", {"batch": 1, "image": 64}), ("gpt2-124m", {"batch": 16, "seq": 512, "precision": "bf16"})],
)
def test_trace_of_a_prediction(model, options):
    """No span has a negative length, none overlaps another of its stream, no kernel starts before it was
    issued.
    """
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
