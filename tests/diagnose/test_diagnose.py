"""What a diagnosis says of traces whose story is known."""

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from paceline.cli import main
from paceline.diagnose import host
from paceline.diagnose.activity import Activity
from paceline.diagnose.diagnosis import diagnose
from paceline.diagnose.groups import by_kernel, by_operator
from paceline.diagnose.intervals import Union
from paceline.readers import kineto

DATA = os.environ.get("PACELINE_DATA")
MEASURED = sorted(Path(DATA, "kineto").glob("*.json.gz")) if DATA else []


def run(words):
    """The command line, to its good end."""
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert not stopped.value.code


@pytest.fixture
def diagnosed(tmp_path):
    """Diagnosis of made traces, one per rank."""

    def run(*traces):
        return diagnose(*(trace.save(tmp_path / f"{i}.json") for i, trace in enumerate(traces)))

    return run


@pytest.fixture
def activity(tmp_path):
    """A step of a made trace."""

    def run(trace, step):
        return Activity.of(kineto.read(trace.save(tmp_path / "trace.json")), step)

    return run


def seconds(found, group):
    return next((share.seconds for share in found.shares if share.group == group), 0.0)


def finding(found, kind):
    return next((one for one in found.findings if one.kind == kind), None)


def whole(found):
    return sum(share.seconds for share in found.shares) + sum(found.idle.values())


def test_a_step_is_accounted_for(made_traces, diagnosed):
    found = diagnosed(made_traces.training(4))
    assert found.steps == 4 and found.found_by.startswith("Optimizer.step")
    # from the end of the last kernel of a step to that of the next
    assert found.step_s == pytest.approx(630e-6)
    assert whole(found) == pytest.approx(found.step_s)
    assert seconds(found, "gemm") == pytest.approx(400e-6)
    assert seconds(found, "elementwise") == pytest.approx(100e-6)
    assert seconds(found, "optimizer") == pytest.approx(50e-6)
    assert found.accounted == 1.0


def test_communication_counts_as_far_as_nothing_hides_it(made_traces, diagnosed):
    found = diagnosed(made_traces.training(ranks=2))
    exposed = finding(found, "exposed-communication")
    assert exposed.saves_s == pytest.approx(100e-6) == seconds(found, "communication")
    assert "allreduce of 2 ranks (default_pg): 1 calls" in exposed.evidence[0]
    busy = next(share.busy_s for share in found.shares if share.group == "communication")
    assert busy == pytest.approx(200e-6)
    assert "1 of 2 ranks were read" in " ".join(found.notes)


def test_a_slow_rank_is_named(made_traces, diagnosed):
    slow = made_traces.training(rank=2, ranks=3, slow=1.5)
    others = [made_traces.training(rank=rank, ranks=3, late=200.0) for rank in (0, 1)]
    found = diagnosed(*others, slow)
    one = finding(found, "straggler")
    assert one.title == "the other ranks wait for rank 2"
    assert one.saves_s == pytest.approx(200e-6)
    assert [time.waits_s for time in found.ranks] == pytest.approx([200e-6, 200e-6, 0.0])
    even = diagnosed(*(made_traces.training(rank=rank, ranks=3) for rank in range(3)))
    assert finding(even, "straggler") is None


def launched(made_traces, wait):
    """Ten kernels of 10 us, each issued `wait` after the one before began."""
    trace = made_traces.MadeTrace()
    for step in range(2):
        for i in range(10):
            at = 1000.0 + 2000 * step + (10 + wait) * i
            trace.kernel("elementwise_kernel", at, at + 4, 10, trace.op("aten::mul", at - 3, 8 + wait))
        trace.region("Optimizer.step#SGD.step", 1900 + 2000 * step, 50)
    return trace


def test_launch_bound_stretches(made_traces, diagnosed):
    found = diagnosed(launched(made_traces, 30.0))
    one = finding(found, "launch-bound")
    # nine gaps of 30 us, less the 2 us from the end of the call to the start of its kernel
    assert one.saves_s == pytest.approx(9 * 28e-6 + found.step_s - 370e-6 - found.idle["outside"] - 2e-6)
    assert finding(found, "launch-gaps").saves_s == pytest.approx(10 * 2e-6)
    assert any("9 kernels" in place.what or "10 kernels" in place.what for place in one.places)


def test_waiting_for_data(made_traces, activity):
    trace = made_traces.training(2)
    second = max(event["ts"] + event["dur"] for event in trace.events)
    trace.region("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", second, 5000)
    trace.kernel("gemm", second + 5005, second + 5010, 100, trace.op("aten::mm", second + 5002, 10))
    trace.op("autograd::engine::evaluate_function: MmBackward0", second + 5020, 20)
    trace.region("Optimizer.step#AdamW.step", second + 5050, 10)
    assert activity(trace, 2).idle["data"] == pytest.approx(5000e-6)


def test_read_backs_name_their_operator(made_traces, activity):
    trace = made_traces.training(3)
    last = max(event["ts"] for event in trace.events if event["cat"] == "user_annotation")
    trace.op("aten::_local_scalar_dense", last + 20, 6)
    trace.span("cuda_runtime", "cudaStreamSynchronize", last + 21, 4)
    one = next(one for one in host.findings(activity(trace, 2)) if one.kind == "read-back")
    assert one.evidence == ("1 x in aten::_local_scalar_dense",)


def test_unfused_optimizer(made_traces, diagnosed):
    found = diagnosed(made_traces.training())
    one = finding(found, "unfused-optimizer")
    assert "10 separate operators" in one.title and 0 < one.saves_s < found.step_s
    fused = made_traces.training()
    for event in fused.events:
        event["name"] = event["name"].replace("addcdiv_", "_fused_adamw_")
    assert finding(diagnosed(fused), "unfused-optimizer") is None


def test_casts_are_copies_between_types(made_traces, activity):
    trace = made_traces.training()
    for i, types in enumerate((["c10::BFloat16", "float"], ["float", "float"])):
        at = 1000.0 + 10 * i
        op = trace.op("aten::copy_", at, 5, [[64], [64]], types)
        trace.kernel("copy_kernel", at, at + 20000, 8, op)
    counts = {share.group: share.count for share in activity(trace, 0).shares}
    assert counts["cast"] == 1 and counts["copy"] == 1


def test_roofline_of_products(made_traces, diagnosed):
    one = finding(diagnosed(made_traces.training(slow=3.0)), "matrix-products")
    flops = 2 * 2048**3
    assert f"{flops / 1200e-6 / 1e12:.1f}"[:3] in one.evidence[0]
    assert "2048 x 2048 x 2048 in bf16, 1 times: 1.2 ms" in one.evidence[1]
    unknown = diagnosed(made_traces.training(device="A chip of tomorrow"))
    assert finding(unknown, "matrix-products") is None and not unknown.peaks_of
    assert "A chip of tomorrow is not in the catalog" in " ".join(unknown.notes)


def test_recompiles(made_traces, activity):
    trace = made_traces.training(3)
    trace.region("Torch-Compiled Region: 0/0", 990, 5)
    trace.region("Torch-Compiled Region: 0/1", 1900, 5)
    end = max(event["ts"] + event["dur"] for event in trace.events if event["cat"] == "kernel")
    trace.region("_compile.compile_inner (dynamo_timed)", end + 20, 3000)
    trace.kernel("gemm", end + 3030, end + 3035, 5, trace.op("aten::mm", end + 3025, 20))
    trace.op("autograd::engine::evaluate_function: MmBackward0", end + 3050, 20)
    trace.region("Optimizer.step#AdamW.step", end + 3080, 10)
    one = next(one for one in host.findings(activity(trace, 3)) if one.kind == "recompile")
    assert one.saves_s == pytest.approx(3000e-6)
    assert "Torch-Compiled Region: 0/1" in one.evidence[0] and "0/0" not in one.evidence[0]


def test_json_and_text(made_traces, tmp_path, capsys):
    path = made_traces.training(ranks=2).save(tmp_path / "trace.json.gz")
    run(["diagnose", str(path), "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["step_s"] == pytest.approx(730e-6) and data["accounted"] == 1.0
    assert {"kind", "title", "saves_s", "basis", "advice", "evidence", "places"} <= set(data["findings"][0])
    run(["diagnose", str(path)])
    shown = capsys.readouterr().out
    assert "730 us per step on NVIDIA H200" in shown and "what to change" in shown


def test_on_a_cpu(recorded_trace):
    found = diagnose(recorded_trace)
    assert found.found_by == "ProfilerStep" and found.steps == 3 and found.device == ""
    assert whole(found) == pytest.approx(found.step_s)
    assert seconds(found, "gemm") > 0 and finding(found, "unfused-optimizer") is not None


def test_unions():
    union = Union.of(np.array([5.0, 0.0, 1.0]), np.array([6.0, 2.0, 3.0]))
    assert union.total_s == 4.0
    np.testing.assert_allclose(union.within(np.array([0.0, 2.5, 3.5]), np.array([10.0, 5.5, 4.5])), [4, 1, 0])
    gaps = union.gaps(-1.0, 7.0)
    np.testing.assert_allclose(gaps.start_s, [-1, 3, 6])
    np.testing.assert_allclose(gaps.end_s, [0, 5, 7])


@pytest.mark.parametrize(
    ("operator", "kernel", "group"),
    [
        ("aten::mm", "nvjet_tst_128x256", "gemm"),
        ("aten::convolution_backward", "sm90_xmma_wgrad", "conv"),
        ("flash_attn::_flash_attn_forward", "flash_fwd_kernel", "attention"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0", "fused"),
        ("aten::some_new_operator", "vectorized_elementwise_kernel", "elementwise"),
        ("mine::op", "my_kernel", "other"),
    ],
)
def test_groups(operator, kernel, group):
    assert by_operator(operator, kernel) == group


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("ncclDevKernel_AllGather_RING_LL", "communication"),
        ("Memcpy HtoD (Pageable -> Device)", "transfer"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("Cijk_Alik_Bljk_BBS_BH", "gemm"),
        ("void at::native::reduce_kernel<512, 1>", "reduce"),
        ("something else", "other"),
    ],
)
def test_kernels_by_their_names(kernel, group):
    assert by_kernel(kernel) == group


@pytest.mark.skipif(not MEASURED, reason="PACELINE_DATA names no folder with kineto/")
@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.name)
def test_groups_of_measured_steps(path):
    """Seconds by group are those of the trace's own kernels between the ends of two optimizer steps."""
    found = diagnose(path)
    with gzip.open(path) as file:
        events = [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]
    updates = sorted(
        e["ts"] + e["dur"] for e in events if e["name"].startswith("Optimizer.step#") and e["tid"] != 7
    )
    calls = {e["args"]["correlation"]: e["ts"] for e in events if e["cat"] in ("cuda_runtime", "cuda_driver")}
    names = {e["args"].get("External id"): e["name"] for e in events if e["cat"] == "cpu_op"}
    kernels = [e for e in events if e["cat"] in kineto.DEVICE]
    step = [e for e in kernels if updates[0] < calls[e["args"]["correlation"]] < updates[1]]
    assert found.steps == 2 and found.accounted > 0.97
    assert found.kernel_s == pytest.approx(sum(e["dur"] for e in step) * 1e-6, rel=0.01)
    products = ("aten::mm", "aten::addmm", "aten::bmm")
    lasted = sum(e["dur"] for e in step if names.get(e["args"]["External id"]) in products) * 1e-6
    assert seconds(found, "gemm") == pytest.approx(lasted, rel=0.01)
    assert whole(found) == pytest.approx(found.step_s, rel=1e-6)
