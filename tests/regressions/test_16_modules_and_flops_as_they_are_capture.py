"""Configurations that are no stack of layers, fallbacks that are traced, and FLOPs of what is frozen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import paceline as pl
from paceline.catalog import clusters, transformers
from paceline.errors import CaptureError
from paceline.predict.distributed import TransformerStep
from paceline.spec.plan import Plan, resolve
from paceline.spec.workload import Workload

CLUSTER = "1xdgx-h100"
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "vit": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    },
    "t5": {
        "d_model": 64,
        "d_ff": 128,
        "d_kv": 16,
        "num_layers": 4,
        "num_heads": 4,
        "vocab_size": 128,
        "n_positions": 64,
        "is_encoder_decoder": True,
    },
    "whisper": {
        "d_model": 64,
        "encoder_layers": 4,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_layers": 4,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 128,
        "vocab_size": 128,
        "num_mel_bins": 16,
        "max_source_positions": 32,
        "max_target_positions": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "is_encoder_decoder": True,
    },
    "mamba": {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "vocab_size": 128},
}


def write(folder: Path, kind: str) -> str:
    pytest.importorskip("transformers", reason="building the model needs transformers")
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **CONFIGURATIONS[kind]}))
    return f"hf:{folder}"


# -- models that a transformer's sizes do not describe -----------------------------------------------


@pytest.mark.parametrize("kind", ("vit", "t5", "whisper"))
def test_it_is_captured_on_a_cluster(tmp_path: Path, kind: str) -> None:
    model = write(tmp_path, kind)
    alone = pl.predict(model, "h100-sxm", batch=2)
    for plan in ("ddp mbs=2", "fsdp mbs=2", "pp=2 mbs=2"):
        found = pl.predict(model, plan, CLUSTER)
        assert (found.devices, found.parameters, found.precision) == (8, alone.parameters, "bf16")
        assert (found.model, found.unit) == (alone.model, alone.unit)
    assert pl.plan(model, CLUSTER, gbs=32).best.prediction.precision == "bf16"


def test_encoder_decoders_run_both(tmp_path: Path) -> None:
    workload = pl.capture(write(tmp_path, "whisper"))
    modules = {parameter.name.split(".")[1] for parameter in workload.parameters}
    assert {"encoder", "decoder"} <= modules


def test_inputs_that_are_not_known_come_with_a_way_out(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="building the model needs transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "wav2vec2", **sizes}))
    with pytest.raises(CaptureError, match="give a function that builds the module with its inputs"):
        pl.predict(f"hf:{tmp_path}", "ddp", CLUSTER)


# -- fallbacks ----------------------------------------------------------------------------------------


def test_a_sequential_fallback_is_said_in_every_answer(tmp_path: Path) -> None:
    model = write(tmp_path, "mamba")
    workload = pl.capture(model, seq=16)
    workload.save(tmp_path / "mamba.workload.json")
    again = pl.capture(model, seq=16)  # transformers itself says it once per process
    loaded = Workload.load(tmp_path / "mamba.workload.json")
    for captured in (workload, again, loaded):
        for found in (pl.predict(captured, "h200"), pl.predict(captured, "ddp", CLUSTER)):
            said = [entry["what"] for entry in found.to_dict()["provenance"] if entry["kind"] == "warning"]
            assert len(said) == 1
            assert "sequential fallback" in said[0] and "fused kernels would be faster" in said[0]
            console = Console(width=250)
            with console.capture() as shown:
                console.print(found)
            assert said[0] in shown.get()


def test_a_sequential_fallback_is_said_while_it_is_traced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Long sequences take minutes to trace, in which a user should know why."""
    pl.capture(write(tmp_path, "mamba"), seq=16)
    (line,) = (record.getMessage() for record in caplog.records if record.name.startswith("paceline"))
    assert "sequential fallback" in line and "takes minutes to trace" in line


def test_models_without_a_fallback_have_no_warning(tmp_path: Path) -> None:
    assert pl.capture(write(tmp_path, "t5"), seq=16).warnings == ()


def test_files_from_before_there_were_warnings_are_read() -> None:
    data = pl.capture("alexnet").to_dict()
    del data["warnings"]
    assert Workload.from_dict(data).warnings == ()


# -- FLOPs of frozen weights --------------------------------------------------------------------------


def done(plan: str) -> tuple[float, float]:
    """FLOPs of a step's operators, and the model FLOPs of its answer, over all devices."""
    model, cluster = transformers.get("llama3-8b"), clusters.get(CLUSTER)
    step = TransformerStep.of(model, cluster, resolve(Plan.parse(plan), 8, model), None, None)

    def flops(piece: str) -> float:
        return sum(
            float(step.timed.packed.flops[step.timed.place(f"{piece}.{way}")].sum())
            for way in ("forward", "backward")
        )

    return 8 * (model.layers * flops("layer") + flops("head")), pl.predict(model, plan, CLUSTER).flops


def test_share_of_peak_of_adapters_counts_what_is_computed() -> None:
    (trained, answered), (frozen, with_adapters) = done("gbs=8 mbs=1"), done("gbs=8 mbs=1 adapters")
    assert answered == pytest.approx(trained, rel=0.04)
    # the adapters' own products are 3 % of the operators' FLOPs and none of the model's
    assert with_adapters == pytest.approx(frozen, rel=0.04)
    found = pl.predict("llama3-8b", "gbs=8 mbs=1 adapters", CLUSTER)
    peak = clusters.get(CLUSTER).device.peak_flops["bf16"] * 8
    assert found.mfu == pytest.approx(with_adapters / found.step_s / peak)


def test_share_of_peak_of_a_captured_module_counts_what_is_computed() -> None:
    found: list[Any] = []
    for frozen in (False, True):
        module = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
        module[1].requires_grad_(not frozen)
        found.append(pl.predict((module, torch.randn(64, 256)), "h200", batch=64))
    product = 2 * 64 * 256 * 256
    assert found[0].flops - found[1].flops == product
    whole, part = found
    assert part.mfu / whole.mfu == pytest.approx(part.flops / whole.flops * whole.step_s / part.step_s)
