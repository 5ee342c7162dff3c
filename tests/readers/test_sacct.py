"""Dumps of Slurm's accounting become job lists."""

import pytest

from paceline.cli import main
from paceline.errors import DataError
from paceline.readers import sacct
from paceline.sched import traces

HEAD = "JobID|JobName|User|Submit|Start|End|ElapsedRaw|State|AllocTRES|NNodes|Priority"
ROWS = (
    (
        "101|train|ann|2025-01-01T10:00:00|2025-01-01T10:05:00|2025-01-01T11:05:00|3600|COMPLETED"
        "|billing=8,cpu=8,gres/gpu:a100=4,gres/gpu=4,mem=64G,node=1|1|4294"
    ),
    "101.batch|batch||2025-01-01T10:05:00|2025-01-01T10:05:00|2025-01-01T11:05:00|3600|COMPLETED|cpu=8|1|",
    (
        "102_3|a|b|ben|2025-01-01T09:00:00|2025-01-01T09:00:00|2025-01-02T09:00:00|86400|CANCELLED by 1001"
        "|cpu=64,gres/gpu:h100=16,node=2|2|10"
    ),
    "103|cpu only|ann|2025-01-01T10:00:00|2025-01-01T10:05:00|2025-01-01T10:06:00|60|COMPLETED|cpu=8|1|1",
    "104|waits|ann|2025-01-01T10:00:00|Unknown|Unknown|0|PENDING|gres/gpu=2|1|1",
    "105|never|ann|2025-01-01T10:00:00|None|2025-01-01T10:06:00|0|CANCELLED by 7|gres/gpu=2|1|1",
    "106|oom|cleo|2025-01-01T10:30:00|2025-01-01T10:30:10|2025-01-01T10:31:10|60|OUT_OF_MEMORY|gres/gpu=1|1|1",
)


@pytest.fixture
def dump(tmp_path):
    def save(rows=ROWS, head=HEAD, end="\n"):
        path = tmp_path / "sacct.txt"
        path.write_text("\n".join((head, *rows)) + end)
        return path

    return save


def test_jobs(dump):
    found = sacct.read(dump())
    assert [job.name for job in found.jobs] == ["102_3 a|b", "101 train", "106 oom"]
    first, second, third = found.jobs
    assert (first.devices, first.kind, first.nodes, first.outcome) == (16, "h100", 2, "cancelled")
    assert (second.devices, second.kind, second.submit_s, second.start_s) == (4, "a100", 3600.0, 3900.0)
    assert (second.seconds, second.user, second.outcome, second.priority) == (
        3600.0,
        "ann",
        "completed",
        4294,
    )
    assert third.outcome == "failed"
    assert found.left_out == {
        "steps of jobs": 1,
        "jobs without devices": 1,
        "jobs that are pending": 1,
        "jobs that never ran": 1,
    }


def test_other_columns(dump):
    row = "7|2025-01-01T10:00:00|2025-01-01T10:05:00|1-01:00:30|FAILED|gres/gpu=2|"
    found = sacct.read(dump((row,), "JobID|Submit|Start|Elapsed|State|AllocTRES|"))
    assert found.jobs[0].seconds == 86400 + 3600 + 30
    row = "7|2025-01-01T10:00:00|2025-01-01T10:05:00|2025-01-01T10:06:00|FAILED|gpu:v100:2"
    found = sacct.read(dump((row,), "JobID|Submit|Start|End|State|ReqGRES"))
    assert (found.jobs[0].seconds, found.jobs[0].devices, found.jobs[0].kind) == (60.0, 2, "v100")


@pytest.mark.parametrize(
    ("rows", "head", "said"),
    [
        (ROWS, "name,submit_s", "no column 'JobID'"),
        (ROWS, "JobID|Submit|Start|State|Elapsed", "no column 'AllocTRES'"),
        (ROWS, "JobID|Submit|Start|State|AllocTRES", "no column 'ElapsedRaw'"),
        ((), HEAD, "it is empty"),
        (ROWS[1:2], HEAD, "no job with devices that ran .1 steps of jobs"),
        (("101|train|ann|2025-01",), HEAD, "line 2: 11 columns wanted: was it cut off"),
    ],
)
def test_what_is_wrong_is_one_line(dump, rows, head, said):
    with pytest.raises(DataError, match=said) as raised:
        sacct.read(dump(rows, head))
    assert "\n" not in str(raised.value)


def test_simulated(dump, capsys):
    trace = traces.load(f"slurm:{dump()}")
    assert [(job.devices, job.work, job.outcome, job.tenant) for job in trace.jobs] == [
        (16, 86400.0, "cancelled", "ben"),
        (4, 3600.0, "completed", "ann"),
        (1, 60.0, "failed", "cleo"),
    ]
    with pytest.raises(SystemExit) as stopped:
        main(["simulate", "--trace", f"slurm:{dump()}", "--cluster", "4x8xh100-sxm", "--policy", "fifo"])
    assert not stopped.value.code and "3 jobs" in capsys.readouterr().out
