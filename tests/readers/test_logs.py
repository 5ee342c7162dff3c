"""Logs of training programs and of nccl-tests, in the forms that their sources print."""

import gzip
import json

import pytest

from paceline.errors import DataError
from paceline.readers import nccl_tests, training_logs

TITAN = "[titan] 2025-05-01 12:00:{} - root - INFO - {}\n".format
TORCHTITAN = "".join(
    (
        TITAN(
            "00,000",
            "starts at step 1, with local batch size 8, global batch size 64, sequence length 8192,"
            " total steps",
        ),
        TITAN(
            "10,500", "\x1b[31mstep:  1  loss: 12.2  memory: 40.12GiB(50.7%)  tps: 812  tflops: 42.1  mfu: 4%"
        ),
        TITAN(
            "31,500", "step: 10  loss:  9.8  grad_norm:  1.2  memory: 60.50GiB(76.5%)  tps: 5,762  mfu: 30%"
        ),
        "some other line, tps: many\n",
        TITAN(
            "51,500", "step: 20  loss:  7.8  memory: 60.50GiB(76.5%)  tps: 5,800  tflops: 302.25  mfu: 30.56%"
        ),
    )
)
MEGATRON = """\
------------------------ arguments ------------------------
  global_batch_size ............................... 512
  micro_batch_size ................................ 2
  seq_length ...................................... 2048
  world_size ...................................... 64
 [2025-05-01 12:00:00] iteration      100/  500000 | consumed samples:       51200 | elapsed time per \
iteration (ms): 2010.5 | throughput per GPU (TFLOP/s/GPU): 210.4 | global batch size:   512 | lm loss: 5.1 |
[Rank 0] (after 100 iterations) memory (MB) | allocated: 20000.5 | max allocated: 40000.0 | reserved: \
45000.0 | max reserved: 46000.0
 iteration      200/  500000 | consumed samples:      102400 | elapsed time per iteration (ms): 1990.5 | \
learning rate: 1.0E-04 | global batch size:   512 | lm loss: 4.1E+00 |
"""
DEEPSPEED = """\
[2025-05-01 12:00:00,000] [INFO] [config.py:1007:print]   train_batch_size ............. 256
[2025-05-01 12:00:00,000] [INFO] [config.py:1007:print]   train_micro_batch_size_per_gpu  4
[2025-05-01 12:00:00,000] [INFO] [config.py:1007:print]   world_size ................... 16
[2025-05-01 12:01:00,000] [INFO] [timer.py:264:stop] epoch=0/micro_step=40/global_step=10, \
RunningAvgSamplesPerSec=120.0, CurrSamplesPerSec=128.0, MemAllocated=2.34GB, MaxMemAllocated=8.5GB
"""
TRAINER = """\
***** Running training *****
  Num examples = 6,400
  Instantaneous batch size per device = 8
  Total train batch size (w. parallel, distributed & accumulation) = 64
  Total optimization steps = 100
{'loss': 1.234, 'grad_norm': 0.5, 'learning_rate': 5e-05, 'epoch': 0.5}
{'train_runtime': 50.0, 'train_samples_per_second': 128.0, 'train_steps_per_second': 2.0, 'train_loss': 1.1, \
'epoch': 1.0}
"""
RECORD = "\n".join(
    json.dumps(entry)
    for entry in (
        {"kind": "run", "task": "digits", "strategy": "ddp", "world": 2, "batch": 128},
        {"kind": "step", "step": 1, "loss": 2.0, "batch": 128, "forward_s": 0.1, "step_s": 0.5},
        {"kind": "step", "step": 2, "loss": 1.0, "batch": 128, "forward_s": 0.1, "step_s": 0.25},
        {"kind": "step", "step": 3, "loss": 1.0, "batch": 128, "forward_s": 0.1, "step_s": 0.25},
    )
)


def read(tmp_path, text, name="train.log"):
    path = tmp_path / name
    path.write_text(text)
    return training_logs.read(path)


def test_torchtitan(tmp_path):
    found = read(tmp_path, TORCHTITAN)
    assert found.program == "torchtitan"
    assert [step.number for step in found.steps] == [1, 10, 20]
    assert [step.seconds for step in found.steps] == [None, pytest.approx(21 / 9), pytest.approx(2.0)]
    assert found.steps[1].tokens_per_s_per_device == 5762
    assert found.steps[2].flops_per_device == 302.25e12 and found.steps[1].flops_per_device is None
    assert found.memory_bytes == {"reserved": round(60.5 * 2**30)}
    assert (found.micro_batch, found.global_batch, found.seq) == (8, 64, 8192)


def test_megatron(tmp_path):
    found = read(tmp_path, MEGATRON)
    assert found.program == "megatron" and found.step_s == pytest.approx(2.0005)
    assert found.steps[0].flops_per_device == 210.4e12
    assert found.memory_bytes == {"allocated": 40000 * 2**20, "reserved": 46000 * 2**20}
    assert (found.devices, found.global_batch, found.micro_batch, found.seq) == (64, 512, 2, 2048)
    assert found.tokens_per_s == pytest.approx(512 * 2048 / 2.0005)


def test_deepspeed(tmp_path):
    found = read(tmp_path, DEEPSPEED)
    assert found.program == "deepspeed" and found.step_s == pytest.approx(2.0)
    assert found.steps[0].number == 10 and found.memory_bytes == {"allocated": round(8.5 * 2**30)}
    assert found.devices == 16
    alone = read(tmp_path, DEEPSPEED.splitlines()[-1])
    assert alone.step_s is None and "the batch is not in the log" in alone.notes[0]


def test_trainer(tmp_path):
    found = read(tmp_path, TRAINER)
    assert found.program == "transformers" and found.step_s == pytest.approx(0.5)
    assert (found.global_batch, found.micro_batch) == (64, 8)


def test_trainer_state(tmp_path):
    last = {
        "train_runtime": 50.0,
        "train_samples_per_second": 128.0,
        "train_steps_per_second": 2.0,
        "step": 100,
    }
    state = {"global_step": 100, "log_history": [{"loss": 1.0, "step": 50}, last]}
    found = read(tmp_path, json.dumps(state, indent=2), "trainer_state.json")
    assert found.step_s == pytest.approx(0.5) and found.global_batch == 64
    results = {**last, "train_mem_gpu_peaked_delta": 3e9, "init_mem_gpu_alloc_delta": 1e9}
    del results["step"]
    found = read(tmp_path, json.dumps(results), "all_results.json")
    assert found.step_s == pytest.approx(0.5) and found.memory_bytes == {"allocated": 4_000_000_000}


def test_our_record(tmp_path):
    found = read(tmp_path, RECORD + '\n{"kind": "ste', "record.jsonl")
    assert found.program == "paceline" and found.devices == 2 and found.global_batch == 128
    assert found.step_s == 0.25 and found.steps[0].samples_per_s == 256
    assert training_logs.read(tmp_path).steps == found.steps


def test_a_record_that_paceline_wrote(tmp_path):
    from paceline.train.record import Record

    with Record(tmp_path) as log:
        log.write("run", task="digits", world=4, batch=64)
        log.write("step", step=1, loss=1.0, batch=64, step_s=0.125)
    assert training_logs.read(tmp_path).step_s == 0.125


def test_compressed_and_cut_off(tmp_path):
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(MEGATRON.encode()))
    assert training_logs.read(path).program == "megatron"
    path.write_bytes(gzip.compress(MEGATRON.encode())[:-30])
    with pytest.raises(DataError, match="ends too early"):
        training_logs.read(path)


@pytest.mark.parametrize(
    "text", ["", "hello\n", "{", "step: 10 loss: x", "\x00" * 100, "{'train_" + "(" * 9999]
)
def test_what_is_no_log_is_one_line(tmp_path, text):
    with pytest.raises(DataError, match="no step of a training run"):
        read(tmp_path, text)


ALL_REDUCE = """\
# nThread 1 nGpus 1 minBytes 8 maxBytes 8589934592 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1
#
# Using devices
#  Rank  0 Group  0 Pid  1234 on     node-1 device  0 [0x1b] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid  1235 on     node-1 device  1 [0x43] NVIDIA H100 80GB HBM3
#  Rank  2 Group  0 Pid  2234 on     node-2 device  0 [0x1b] NVIDIA H100 80GB HBM3
#  Rank  3 Group  0 Pid  2235 on     node-2 device  1 [0x43] NVIDIA H100 80GB HBM3
#
#                                                       out-of-place                  in-place
#       size         count   type   redop  root     time  algbw  busbw #wrong     time  algbw  busbw #wrong
#        (B)    (elements)                          (us) (GB/s) (GB/s)            (us) (GB/s) (GB/s)
           8             2  float     sum    -1    25.10   0.00   0.00      0    24.90   0.00   0.00      0
   536870912     134217728  float     sum    -1   5000.0 107.37 161.06      0   4990.0 107.59 161.38      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 80.6
"""


def timings(tmp_path, text, name="log.txt"):
    path = tmp_path / name
    path.write_text(text)
    return nccl_tests.read(path)


def test_a_table(tmp_path):
    (found,) = timings(tmp_path, ALL_REDUCE)
    assert (found.op, found.ranks, found.nodes) == ("all_reduce", 4, 2)
    assert found.device == "NVIDIA H100 80GB HBM3" and not found.notes
    assert len(found.rows) == 4
    last = found.rows[-1]
    assert (last.size_bytes, last.in_place, last.wrong) == (536870912, True, 0)
    assert last.seconds == pytest.approx(4.99e-3) and last.busbw_Bps == pytest.approx(161.38e9)


def test_prefixes_and_several_tables(tmp_path):
    rows = ALL_REDUCE.splitlines()
    mpi = "\n".join(f"[1,0]<stdout>: {line}" for line in ["mpirun ./build/all_gather_perf -b 8", *rows])
    slurm = "\n".join(f"0: {line}" for line in ["./reduce_scatter_perf -g 1", *rows])
    first, second = timings(tmp_path, f"{mpi}\n{slurm}\n")
    assert (first.op, second.op) == ("all_gather", "reduce_scatter")
    assert first.rows == second.rows


def test_without_reduction_and_in_place(tmp_path):
    text = """\
# Collective test starting: alltoall_perf
#  Rank  0 Group  0 Pid 1 on a device  0 [0000:1b:00] AMD Instinct MI300X
#  Rank  1 Group  0 Pid 1 on a device  1 [0000:2b:00] AMD Instinct MI300X
    33554432    4194304     float    none      -1    300.5  111.66   55.83    N/A
"""
    (found,) = timings(tmp_path, text)
    assert found.op == "all_to_all" and found.device == "AMD Instinct MI300X"
    assert [row.wrong for row in found.rows] == [None] and not found.rows[0].in_place


def test_what_is_not_said_is_noted(tmp_path):
    row = "   536870912     134217728     float     sum      -1   5000.0  107.37  161.06      0\n"
    (found,) = timings(tmp_path, row)
    assert found.op == "" and found.ranks == 0 and len(found.notes) == 2
    (found,) = timings(tmp_path, row, "all_reduce_perf_2x8.log")
    assert found.op == "all_reduce" and found.notes == ("how many ranks there are is not said",)
    wrong = ALL_REDUCE.replace("161.06      0", "161.06     17")
    assert timings(tmp_path, wrong)[0].notes == ("17 values came out wrong",)


def test_what_is_no_table_is_one_line(tmp_path):
    for text in ("", "hello", ALL_REDUCE[:700]):
        with pytest.raises(DataError, match="no table of nccl-tests"):
            timings(tmp_path, text)
