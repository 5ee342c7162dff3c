"""Configurations of other frameworks: plans that were emitted come back; others are read as documented."""

import dataclasses
import json

import pytest

import paceline as pl
from paceline.cli import main
from paceline.errors import DataError, PlanError
from paceline.plan.emit import EMITTERS, emit
from paceline.plan.emit.facts import Facts
from paceline.readers import configuration, shell
from paceline.spec.plan import Plan, resolve

#: plans of every kind that the tools take, each on a cluster that it fills
PLANS = (
    "fsdp dp=16 mbs=1 gbs=64 seq=4096 framework=torch-compile",
    "fsdp dp=16 mbs=2 gbs=64 seq=4096 no-reshard recompute=full framework=torch",
    "fsdp dp=16 mbs=1 gbs=16 seq=4096 recompute=selective offload=optimizer prefetch=2 framework=torch",
    "hsdp dp=16 shard=8 mbs=1 gbs=32 seq=4096 framework=torch-compile",
    "zero1 dp=16 mbs=1 gbs=64 seq=2048 bucket=400MB framework=deepspeed",
    "zero2 dp=16 mbs=1 gbs=64 seq=2048 fp16 framework=deepspeed",
    "ddp dp=16 mbs=1 gbs=16 seq=512 framework=torch",
    "fsdp dp=4 tp=4 sp mbs=1 gbs=8 seq=4096 framework=torch-compile",
    "fsdp dp=2 tp=4 cp=2 mbs=1 gbs=8 seq=8192 framework=torch-compile",
    "fsdp dp=4 pp=4 mbs=1 gbs=32 seq=4096 1f1b framework=torch-compile",
    "fsdp dp=2 tp=2 pp=4 vpp=2 sp mbs=1 gbs=32 seq=4096 interleaved framework=torch",
    "zero1 dp=2 tp=4 pp=2 sp mbs=2 gbs=32 seq=4096 recompute=selective framework=megatron-core",
    "zero1 tp=8 pp=2 sp mbs=1 gbs=16 seq=4096 fp8 framework=megatron-core",
    "zero1 dp=4 tp=2 cp=2 mbs=1 gbs=16 seq=8192 all-to-all framework=megatron-core",
)


@pytest.fixture(scope="module")
def emitted():
    """Facts of a small model under a plan, without a search."""
    planned = pl.plan("llama3-8b", "2xdgx-h100", gbs=64, seq=4096, fix=["fsdp", "tp=1", "pp=1"], most=2)

    def of(words):
        plan = resolve(Plan.parse(words), 16, planned.sizes)
        best = dataclasses.replace(planned.best, plan=plan)
        return dataclasses.replace(planned, top=(best,))

    return of


@pytest.mark.parametrize("words", PLANS)
def test_what_was_emitted_is_read_back(emitted, tmp_path, words):
    planned = emitted(words)
    expected = Facts.of(planned).plan
    assert str(Plan.parse(str(expected))) == str(expected)
    read = 0
    for tool in EMITTERS:
        try:
            files = emit(planned, [tool], tmp_path / tool)
        except PlanError:
            continue  # the tool does not take such a plan
        for path in files:
            found = configuration.read(path)
            assert found.plan == expected, path.name
            assert found.model == "llama3-8b" and not found.notes and not found.not_understood, path.name
            read += 1
    assert read >= 2


SELF = {"deepspeed": "deepspeed.json", "accelerate": "accelerate.yaml", "megatron": "megatron.sh"}
SELF["torchtitan"] = "torchtitan.sh"


@pytest.mark.parametrize("words", PLANS)
def test_the_settings_themselves_say_the_plan(emitted, tmp_path, words):
    """Without the line that says what a file came from, what its format can say is the same."""
    planned = emitted(words)
    expected = Facts.of(planned).plan
    for tool, name in SELF.items():
        try:
            emit(planned, [tool], tmp_path / tool)
        except PlanError:
            continue
        text = (tmp_path / tool / name).read_text()
        alone = tmp_path / tool / "alone"
        alone.mkdir()
        kept = [line for line in text.splitlines() if "dgx-h100:" not in line]
        (alone / name).write_text("\n".join(kept))
        found = configuration.read(alone / name)
        assert found.said, name
        for field in found.said:
            assert getattr(found.plan, field) == getattr(expected, field), f"{name}: {field}"
        if tool == "megatron":
            assert found.plan.context == expected.context
        degrees = {
            "deepspeed": {"dp", "mbs", "gbs"},
            "megatron": {"dp", "tp", "pp", "cp", "mbs", "gbs", "seq"},
        }
        assert degrees.get(tool, set()) <= set(found.said)


def test_edits_count(emitted, tmp_path):
    emit(emitted(PLANS[11]), ["megatron"], tmp_path)
    path = tmp_path / "megatron.sh"
    path.write_text(path.read_text().replace("--micro-batch-size 2", "--micro-batch-size 4"))
    found = configuration.read(path)
    assert found.plan.mbs == 4
    assert found.notes == ("edited since it was emitted: mbs=4 (emitted with 2)",)


DEEPSPEED = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.9, 0.999]}},
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "reduce_bucket_size": 5e8,
        "stage3_param_persistence_threshold": 1e5,
    },
    "steps_per_print": 10,
    "a_key_of_tomorrow": 1,
}


def save(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return path


def test_deepspeed(tmp_path):
    found = configuration.read(save(tmp_path, "ds.json", DEEPSPEED))
    plan = found.plan
    assert (plan.dp, plan.mbs, plan.gbs) == (8, 4, 256)
    assert plan.sharding == "fsdp" and plan.offload == "optimizer" and plan.precision == "bf16"
    assert plan.bucket_bytes == 1e9 and found.optimizer == "AdamW"
    assert "a_key_of_tomorrow = 1" in found.not_understood
    assert any("stage3_param_persistence_threshold" in line for line in found.not_understood)
    assert not any("steps_per_print" in line or "lr" in line for line in found.not_understood)


def test_deepspeed_with_auto(tmp_path):
    auto = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": 2},
    }
    found = configuration.read(save(tmp_path, "ds.json", auto))
    assert found.plan.sharding == "zero2" and found.plan.gbs == 0 and found.plan.precision == "fp32"
    assert "precision" in found.usual
    assert sum("the training script decides" in line for line in found.not_understood) == 2


ACCELERATE = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: false
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_some_new_option: 3
mixed_precision: bf16
num_machines: 2
num_processes: 16
dynamo_config:
  dynamo_backend: INDUCTOR
"""


def test_accelerate(tmp_path):
    pytest.importorskip("yaml")
    found = configuration.read(save(tmp_path, "accelerate.yaml", ACCELERATE))
    assert found.plan.sharding == "zero2" and found.plan.recompute == "full" and found.plan.dp == 16
    assert found.plan.precision == "bf16" and found.compiled and found.plan.framework == "torch-compile"
    assert found.devices == 16
    assert found.not_understood == ("fsdp_config.fsdp_some_new_option = 3",)


def test_accelerate_with_deepspeed(tmp_path):
    pytest.importorskip("yaml")
    save(tmp_path, "ds.json", DEEPSPEED)
    text = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_config_file: configs/ds.json
  zero3_init_flag: true
num_processes: 8
"""
    found = configuration.read(save(tmp_path, "a.yaml", text))
    assert found.plan.sharding == "fsdp" and found.plan.gbs == 256
    inline = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 2
  offload_optimizer_device: cpu
  gradient_accumulation_steps: 4
mixed_precision: fp16
num_processes: 8
"""
    found = configuration.read(save(tmp_path, "b.yaml", inline))
    assert (
        found.plan.sharding == "zero2"
        and found.plan.offload == "optimizer"
        and found.plan.precision == "fp16"
    )
    assert "gradient_accumulation_steps = 4" in found.notes[0]


TORCHTITAN = """\
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "70B"
[optimizer]
name = "AdamW"
lr = 1.5e-4
[training]
local_batch_size = 8
seq_len = 8192
steps = 1000
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
pipeline_parallel_microbatch_size = 1
enable_async_tensor_parallel = true
[activation_checkpoint]
mode = "selective"
[compile]
enable = true
"""


def test_torchtitan(tmp_path):
    found = configuration.read(save(tmp_path, "llama.toml", TORCHTITAN))
    plan = found.plan
    assert (plan.tp, plan.pp, plan.mbs, plan.seq, plan.dp) == (8, 2, 1, 8192, 0)
    assert plan.sharding == "fsdp" and plan.sp and plan.schedule == "interleaved"
    assert plan.recompute == "selective" and plan.precision == "bf16" and plan.framework == "torch-compile"
    assert found.model == "llama3-70b" and found.optimizer == "AdamW"
    assert found.not_understood == ("parallelism.enable_async_tensor_parallel = True",)


def test_torchtitan_in_python(tmp_path):
    text = """\
from torchtitan.trainer import Trainer

BATCH = 4

def llama3_8b() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("8B"),
        training=TrainingConfig(local_batch_size=BATCH, seq_len=4096, steps=1000),
        parallelism=ParallelismConfig(tensor_parallel_degree=2, data_parallel_shard_degree=4),
        activation_checkpoint=ActivationCheckpointConfig(mode="full"),
    )
"""
    with pytest.raises(
        DataError, match=r"local_batch_size must be a whole number, got 'BATCH \(not literal\)'"
    ):
        configuration.read(save(tmp_path, "config.py", text))
    found = configuration.read(save(tmp_path, "config.py", text.replace("=BATCH", "=4")))
    assert (found.plan.tp, found.plan.dp, found.plan.mbs, found.plan.gbs) == (2, 4, 4, 16)
    assert found.plan.recompute == "full"


MEGATRON = """\
#!/bin/bash
# Runs the "175B" parameter model
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=16
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
CHECKPOINT_PATH=$1 #<Specify path>
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
    --master_port ${MASTER_PORT:-6000}
)
GPT_MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1536
    --rampup-batch-size 16 16 5859375
    --lr 6.0e-5
    --bf16
    --train-iters $STEPS
    --recompute-activations
    --exit-interval $(date +%s)
)
MODEL_PARALLEL_ARGS=(
	--tensor-model-parallel-size 8
	--pipeline-model-parallel-size 16
    --num-layers-per-virtual-pipeline-stage 2
    --sequence-parallel
    --use-distributed-optimizer
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${GPT_MODEL_ARGS[@]} \\
    ${TRAINING_ARGS[@]} \\
    ${MODEL_PARALLEL_ARGS[@]} "$@"
"""


def test_megatron(tmp_path):
    found = configuration.read(save(tmp_path, "train.sh", MEGATRON))
    plan = found.plan
    assert (plan.dp, plan.tp, plan.pp, plan.vpp, plan.mbs, plan.gbs, plan.seq) == (1, 8, 16, 3, 1, 1536, 2048)
    assert plan.sharding == "zero1" and plan.sp and plan.recompute == "selective" and plan.precision == "bf16"
    assert found.devices == 128 and found.model == "gpt3-175b"
    assert found.not_understood == ("rampup-batch-size = 16 16 5859375",)


def test_values_that_a_script_computes_are_named(tmp_path):
    text = "torchrun pretrain_gpt.py --tensor-model-parallel-size $TP --global-batch-size 64 --num-layers 2"
    found = configuration.read(save(tmp_path, "train.sh", text))
    assert found.plan.tp == 1 and "tp" not in found.said
    assert found.not_understood == ("tensor-model-parallel-size = $TP (computed by the script)",)


def test_words_of_scripts():
    text = "A=2; B=${A}4 # note\nX=(\n --one $B\n --two '3 4' \\\n --three\n)\nrun.py --four=5 -v six\n"
    assert shell.options(shell.words(text.replace("; ", "\n"), "x")) == {
        "one": "24",
        "two": "3 4",
        "three": "",
        "four": "5",
    }


WRONG = {
    "ds.json": ["[1, 2]", "{", '{"a": 1}', '{"zero_optimization": {"stage": 7}}', "[" * 100_000, "NaN"],
    "a.yaml": ["a: [", "- 1", "a: &x [1]\nb: *x", "other: 1", "\x00"],
    "t.toml": ["a = ", "a = 1", "[training]\nlocal_batch_size = 'many'", "[training]\nseq_len = -5"],
    "t.py": ["def f(:", "x = 1", "def f():\n    return g(1)", "PLAN = 'tp=many'"],
    "t.sh": ["echo hello", "pretrain_gpt.py", "echo 'torchtitan", "pretrain_ --tensor-model-parallel-size x"],
    "t.txt": ["", "\x89PNG", "a" * (1 << 21)],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in WRONG.items() for text in texts])
def test_what_is_no_configuration_is_one_line(tmp_path, capsys, name, text):
    path = save(tmp_path, name, text)
    with pytest.raises(SystemExit) as stopped:
        main(["predict", "gpt2", "--like", str(path), "--cluster", "1xh200"])
    printed = capsys.readouterr().err
    assert stopped.value.code == 2 and printed.count("\n") == 1 and len(printed) < 500


def test_like(tmp_path, capsys):
    path = save(tmp_path, "llama.toml", TORCHTITAN)
    words = ["predict", "--like", str(path), "--cluster", "4xdgx-h100", "--plan", "gbs=32", "--json"]
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert not stopped.value.code
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["model"] == "llama3-70b" and "tp=8 pp=2" in found["plan"] and "gbs=32" in found["plan"]
    assert "not understood: parallelism.enable_async_tensor_parallel = True" in printed.err
    assert "not said, as usual: " in printed.err


def test_like_needs_a_model_and_a_cluster(tmp_path, capsys):
    path = save(tmp_path, "ds.json", DEEPSPEED)
    for words, said in ((["--cluster", "1xdgx-h100"], "names no model"), ([], "--like goes with --cluster")):
        with pytest.raises(SystemExit) as stopped:
            main(["predict", "--like", str(path), *words])
        assert stopped.value.code == 2 and said in capsys.readouterr().err
