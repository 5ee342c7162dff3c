"""`hf:` models by default: 4,096 tokens or their own maximum, and bf16, both in the headline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import paceline as pl
from paceline.cli import main
from paceline.errors import SpecError

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
}


@pytest.fixture
def configuration(tmp_path: Path) -> Any:
    def write(**sizes: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps({**SMALL, **sizes}))
        return f"hf:{tmp_path}"

    return write


def headline(answer: Any) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(answer)
    return capture.get().splitlines()[0]


@pytest.mark.parametrize(("longest", "usual"), ((131_072, 4096), (512, 512)))
def test_on_one_device(configuration: Any, longest: int, usual: int) -> None:
    pytest.importorskip("transformers", reason="building the model needs transformers")
    found = pl.predict(configuration(max_position_embeddings=longest), "h200")
    assert (found.seq, found.precision) == (usual, "bf16")
    assert f"sequence {usual}, bf16" in headline(found)
    assert found.throughput * found.step_s == pytest.approx(usual)


@pytest.mark.parametrize(("longest", "usual"), ((131_072, 4096), (512, 512)))
def test_on_a_cluster(configuration: Any, longest: int, usual: int) -> None:
    found = pl.predict(configuration(max_position_embeddings=longest), "ddp", CLUSTER)
    assert (found.seq, found.precision) == (usual, "bf16")
    assert f"seq={usual}" in headline(found) and "bf16" in headline(found)


def test_in_a_plan_and_in_what_if(configuration: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = configuration(max_position_embeddings=131_072)
    planned = pl.plan(model, CLUSTER, gbs=8, most=8, processes=1)
    assert planned.seq == 4096 and "seq=4096" in headline(planned) and "bf16" in headline(planned)
    for asked in (
        ("whatif", "--set", "nodes=2"),
        ("whatif", "--sweep", "nodes=1,2"),
        ("compare", "--plans", "ddp,fsdp"),
        ("explain",),
    ):
        command, *rest = asked
        with pytest.raises(SystemExit) as stopped:
            main([command, model, "--cluster", CLUSTER, *rest])
        assert stopped.value.code == 0
        shown = capsys.readouterr().out.splitlines()[0]
        assert "seq=4096" in shown and "bf16" in shown


def test_what_the_user_says_wins(configuration: Any) -> None:
    pytest.importorskip("transformers", reason="building the model needs transformers")
    model = configuration(max_position_embeddings=131_072)
    alone = pl.predict(model, "h200", seq=256, precision="fp32")
    assert (alone.seq, alone.precision) == (256, "fp32")
    for found in (
        pl.predict(model, "ddp seq=256 fp32", CLUSTER),
        pl.predict(model, plan="ddp", cluster=CLUSTER, seq=256, precision="fp32"),
    ):
        assert (found.seq, found.precision) == (256, "fp32")
    with pytest.raises(SpecError, match="seq is given twice: 256, and 512 in the plan"):
        pl.predict(model, plan="ddp seq=512", cluster=CLUSTER, seq=256)
    with pytest.raises(SpecError, match="precision is given twice: fp32, and bf16 in the plan"):
        pl.predict(model, plan="ddp bf16", cluster=CLUSTER, precision="fp32")


def test_other_models_stay_in_fp32() -> None:
    assert pl.predict("alexnet", "h200").precision == "fp32"
