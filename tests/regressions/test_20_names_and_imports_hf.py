"""`hf:` models: the prefix that was forgotten, one name everywhere, and imports of the user's own files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.cli import main
from paceline.errors import SpecError, UnknownName

CLUSTER = "1xdgx-h100"
SMALL: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}


def write(folder: Path, **more: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**SMALL, **more}))
    return folder / "config.json"


def test_a_configuration_without_the_prefix_suggests_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path)
    monkeypatch.chdir(tmp_path)
    batch = ["--device", "h200", "--batch", "2"]
    for where in (["--device", "h200"], batch, ["--cluster", CLUSTER]):
        with pytest.raises(SystemExit) as stopped:
            main(["predict", "config.json", *where])
        assert stopped.value.code == 2
        assert "a Hugging Face configuration; name it hf:config.json" in capsys.readouterr().err
    with pytest.raises(SpecError, match=f"name it hf:{path}"):
        pl.plan(str(path), CLUSTER)
    with pytest.raises(SpecError, match=f"name it hf:{path}"):
        pl.predict(str(path), "h200", batch=2)
    with pytest.raises(UnknownName, match=f"a Hugging Face configuration is named hf:{path}"):
        pl.capture(str(path), batch=2)
    with pytest.raises(UnknownName, match=f"a Hugging Face configuration is named hf:{tmp_path}"):
        pl.predict(str(tmp_path), "h200")


@pytest.mark.parametrize(
    ("own", "name"),
    (
        ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
        ("gpt2-finetuned", "gpt2-finetuned"),
        ("/models/mine/", "mine"),
        ("./out/mine", "mine"),
        ("", "llama-90K"),
        (None, "llama-90K"),
        ("two\nlines", "llama-90K"),
    ),
)
def test_a_model_has_the_same_name_everywhere(tmp_path: Path, own: str | None, name: str) -> None:
    pytest.importorskip("transformers", reason="building the model needs transformers")
    folder = tmp_path / "folder"
    folder.mkdir()
    path = write(folder, _name_or_path=own)
    for spelling in (f"hf:{path}", f"hf:{folder}"):
        assert pl.predict(spelling, "h200").model == name
        assert pl.predict(spelling, "ddp", CLUSTER).model == name


def test_a_model_that_its_sizes_do_not_describe_has_one_name_too(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="building the model needs transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "image_size": 32, **sizes}))
    model = f"hf:{tmp_path}"
    names = {pl.predict(model, "h200").model, pl.predict(model, "ddp", CLUSTER).model}
    assert len(names) == 1 and names.pop().startswith("vit-")


def test_a_file_may_import_transformers(tmp_path: Path) -> None:
    """In a process of its own: torchvision must not have been imported before."""
    pytest.importorskip("transformers", reason="the file imports transformers")
    write(tmp_path)
    (tmp_path / "my_net.py").write_text(
        "import torch\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "def build(batch):\n"
        "    config = LlamaConfig.from_json_file('config.json')\n"
        "    ids = torch.zeros(batch, 16, dtype=torch.int64)\n"
        "    return LlamaForCausalLM(config), {'input_ids': ids, 'labels': ids}\n"
    )
    script = "import paceline as pl; print(pl.capture('my_net.py:build', batch=2).parameter_count)"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
