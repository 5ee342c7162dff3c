"""Traces of torch.profiler as columns: what is in them is found, what is wrong with them is one line."""

import gzip
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from paceline.cli import main
from paceline.errors import DataError
from paceline.readers import kineto

DATA = os.environ.get("PACELINE_DATA")
MEASURED = sorted(Path(DATA, "kineto").glob("*.json.gz")) if DATA else []


def run(words):
    """The command line, to its good end."""
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert not stopped.value.code


@pytest.fixture
def saved(made_traces, tmp_path):
    def save(trace, name="trace.json"):
        return trace.save(tmp_path / name)

    return save


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_columns(made_traces, saved, name):
    trace = made_traces.MadeTrace(rank=3, ranks=8, record_shapes=1)
    op = trace.op("aten::mm", 110, 50, [[4, 8], [8, 2]], ["float", "float"])
    trace.kernel("gemm", 120, 140, 30, op)
    trace.collective("allreduce", 125, 180, 40, elements=7, size=8)
    trace.region("ProfilerStep#4", 100, 200)
    found = kineto.read(saved(trace, name))
    assert (found.rank, found.ranks, found.device) == (3, 8, "NVIDIA H200")
    assert found.spelled(found.work) == ["gemm", "ncclDevKernel_allreduce_Sum_f32_RING_LL"]
    np.testing.assert_allclose(found.work.start_s, [40e-6, 80e-6])
    np.testing.assert_allclose(found.work.end_s, [70e-6, 120e-6])
    assert found.ops.external[0] == found.work.external[0]
    assert found.inputs[found.ops.detail[0]].dims == ((4, 8), (8, 2))
    assert found.calls[found.work.detail[1]].elements_in == 7
    assert found.calls[found.work.detail[1]].group_size == 8
    assert found.recorded == ("shapes",)
    assert not found.left_out


def test_what_is_not_understood_is_named(made_traces, saved):
    trace = made_traces.training()
    trace.span("hpu_op", "something", 10, 5)
    trace.span("cpu_op", "backwards in time", 10, -5)
    assert kineto.read(saved(trace)).left_out == {"hpu_op": 1, "events without a finite time": 1}


def test_a_bare_list_of_events(made_traces, tmp_path):
    path = tmp_path / "list.json"
    path.write_text(json.dumps(made_traces.training().events))
    assert len(kineto.read(path).work) == 3 * 13


def test_ranks_of_a_folder(made_traces, tmp_path):
    for rank in (2, 0):
        made_traces.training(rank=rank, ranks=4).save(tmp_path / f"worker{rank}.pt.trace.json.gz")
    assert [trace.rank for trace in kineto.read_job([tmp_path])] == [0, 2]
    made_traces.training(rank=2, ranks=4).save(tmp_path / "again.json")
    with pytest.raises(DataError, match="both of rank 2"):
        kineto.read_job([tmp_path])


def text(made_traces):
    return made_traces.training().text().encode()


WRONG = {
    "cut off": lambda t: text(t)[:-200],
    "cut off within a name": lambda t: text(t)[:-170],
    "cut off, compressed": lambda t: gzip.compress(text(t))[:-40],
    "damaged, compressed": lambda t: gzip.compress(text(t))[:200] + b"\xff" * 50,
    "empty": lambda t: b"",
    "nothing": lambda t: b"{}",
    "no events": lambda t: b'{"traceEvents": []}',
    "only text": lambda t: b"step 1: loss 2.5\n",
    "an image": lambda t: b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
    "nested": lambda t: b'{"traceEvents": [' + b"[" * 1_000_000,
    "a list of numbers": lambda t: b"[1, 2, 3]",
    "no time": lambda t: b'[{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "dur": 3}]',
    "words for times": lambda t: b'[{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":"a","dur":3}]',
    "a list for a name": lambda t: b'[{"ph":"X","cat":"kernel","name":[],"pid":0,"tid":7,"ts":1,"dur":3}]',
    "a number of 10,000 digits": lambda t: b'[{"ph": "X", "ts": 1' + b"0" * 10_000 + b"}]",
    "a Hugging Face configuration": lambda t: b'{"model_type": "llama", "layers": [1, 2]}',
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_trace_is_one_line(made_traces, tmp_path, capsys, wrong):
    path = tmp_path / "trace.json"
    path.write_bytes(WRONG[wrong](made_traces))
    with pytest.raises(SystemExit) as stopped:
        main(["diagnose", str(path)])
    printed = capsys.readouterr().err
    assert stopped.value.code == 2
    assert printed.count("\n") == 1 and "trace.json" in printed and len(printed) < 400


def test_names_cannot_command_a_terminal(made_traces, saved, capsys):
    trace = made_traces.training()
    trace.kernel("evil\x1b[2J\nkernel", 990, 995, 3, trace.op("my::op", 989, 5))
    assert "evil [2J kernel" in kineto.read(saved(trace)).names
    run(["diagnose", str(saved(trace))])
    assert "\x1b[2J" not in capsys.readouterr().out


def test_a_large_trace_takes_memory_for_its_columns_only(made_traces, tmp_path):
    """40 MB of text in less than that: 1 GB then takes well below 4 GB."""
    path = tmp_path / "large.json"
    events = made_traces.training(200).events
    block = ",\n".join(json.dumps(event) for event in events)
    with path.open("w") as file:
        file.write('{"traceEvents": [\n')
        while file.tell() < 40_000_000:
            file.write(block + ",\n")
        file.write(json.dumps(events[0]) + "]}")
    before = _peak("pass")
    after = _peak(f"kineto.read({str(path)!r})")
    assert after - before < 0.9 * path.stat().st_size


def _peak(code):
    """Peak memory in bytes of a process that runs something with the reader."""
    line = "import resource; print(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    words = [sys.executable, "-c", f"from paceline.readers import kineto; {code}; {line}"]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def test_a_trace_recorded_here(recorded_trace):
    found = kineto.read(recorded_trace)
    assert not found.device and not len(found.work) and not found.left_out
    assert found.spelled(found.ops).count("aten::addmm") == 6
    place = found.spelled(found.ops).index("aten::addmm")
    assert found.inputs[found.ops.detail[place]].dims[1:3] == ((128, 64), (64, 64))


@pytest.mark.skipif(not MEASURED, reason="PACELINE_DATA names no folder with kineto/")
@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.name)
def test_traces_of_an_h200(path):
    began = time.monotonic()
    found = kineto.read(path)
    assert time.monotonic() - began < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 1e6
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    lasted = sum(event["dur"] for event in events if event.get("cat") in kineto.DEVICE) * 1e-6
    assert float((found.work.end_s - found.work.start_s).sum()) == pytest.approx(lasted, rel=1e-6)
    assert found.device == "NVIDIA H200" and not found.left_out
