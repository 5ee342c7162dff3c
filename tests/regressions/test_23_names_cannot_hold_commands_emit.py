"""Names of clusters, devices, models, workloads and plans are text on one line, and emitted files quote
them.
"""

import ast
import dataclasses
import json
import re
import shlex
import subprocess

import pytest

import paceline as pl
from paceline.errors import PacelineError, SpecError
from paceline.plan.emit import EMITTERS, emit, launch
from paceline.plan.request import Request
from paceline.plan.run import plan_transformer
from paceline.spec.transformer import Transformer, from_hf

TINY = Transformer(name="tiny", layers=4, hidden=1024, heads=8, ffn=4096, vocab=32_000, seq=1024)
#: what a shell, Python or sbatch would carry out if it were written as it is
NASTY = '"""; import os; os.abort() #" $(touch owned) `id` \' \\'
TOML = 'like = "dgx-a100"\nname = {name}\n'


@pytest.mark.parametrize("bad", ["a\nb", "a\rb", "a\x1b[2Jb", "a\x00b", "a\u2028b", "a\u202eb", "a\x85b"])
def test_control_characters_are_refused_wherever_names_come_from(bad, tmp_path):
    cluster, workload = pl.clusters.get("1xdgx-a100"), pl.capture("alexnet", batch=1)
    plain = workload.to_dict()
    file = tmp_path / "pod.toml"
    file.write_text(TOML.format(name=json.dumps(bad)))
    made = [
        lambda: pl.clusters.get(str(file)),
        lambda: pl.clusters.get(f"8xh100-sxm@{bad}"),
        lambda: dataclasses.replace(cluster, name=bad),
        lambda: dataclasses.replace(cluster.device, title=bad),
        lambda: dataclasses.replace(TINY, name=bad),
        lambda: from_hf(
            {
                "model_type": bad,
                "num_hidden_layers": 2,
                "hidden_size": 64,
                "num_attention_heads": 2,
                "vocab_size": 100,
            }
        ),
        lambda: pl.Workload.from_dict({**plain, "name": bad}),
        lambda: pl.Plan(framework=bad),
    ]
    for make in made:
        with pytest.raises(PacelineError, match="holds the control character") as error:
            make()
        assert str(error.value).isprintable()


def test_a_file_names_the_line(tmp_path):
    file = tmp_path / "pod.toml"
    file.write_text(TOML.format(name='"a\\nb"'))
    with pytest.raises(
        SpecError, match=r"pod.toml: line 2, name: the text 'a\\nb' holds the control character"
    ):
        pl.clusters.get(str(file))
    file.write_text('like = "dgx-a100"\nnotes = """two\nlines"""\n')
    assert pl.clusters.get(str(file)).notes == "two\nlines"


def test_a_name_of_a_file_counts_too(tmp_path):
    file = tmp_path / "a\nb.toml"
    file.write_text('like = "dgx-a100"\n')
    with pytest.raises(SpecError, match="holds the control character"):
        pl.clusters.get(str(file))


def test_emitted_files_quote_what_they_are_given(tmp_path):
    file = tmp_path / "pod.toml"
    file.write_text(TOML.format(name=json.dumps(NASTY)))
    model = dataclasses.replace(TINY, name=NASTY)
    found = plan_transformer(
        model,
        Request(
            where=(pl.clusters.get(str(file)),),
            gbs=16,
            fix=["fsdp", "tp=1", "pp=1"],
            forbid=["offload"],
            most=8,
        ),
    )
    clean = plan_transformer(
        TINY,
        Request(
            where=(pl.clusters.get("1xdgx-a100"),),
            gbs=16,
            fix=["fsdp", "tp=1", "pp=1"],
            forbid=["offload"],
            most=8,
        ),
    )
    for written, plain in zip(
        emit(found, [*EMITTERS], tmp_path / "run"), emit(clean, [*EMITTERS], tmp_path / "clean"), strict=True
    ):
        text = written.read_text()
        if written.suffix == ".py":
            assert ast.dump(ast.parse(text)) == ast.dump(ast.parse(plain.read_text()))
        elif written.suffix in (".sh", ".sbatch"):
            assert subprocess.run(["bash", "-n", written], check=False).returncode == 0
            assert words(text) == words(plain.read_text())


def words(text):
    """What a shell would run, without comments; the name of the job aside."""
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if not line.startswith("#")]


@pytest.mark.parametrize("name", [NASTY, "meta/llama 3", "../../x", "a;b", "--wrap=id", "模型", ""])
def test_names_of_jobs_are_words(name):
    assert re.fullmatch(r"[A-Za-z0-9._-]+", launch.job_name(name)) and not launch.job_name(name).startswith(
        ("-", ".")
    )
