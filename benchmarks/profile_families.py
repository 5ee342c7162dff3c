"""Profile training steps of families that `profile_steps.py` leaves out, with power and reserved memory.

    python benchmarks/profile_families.py --out families.jsonl.gz --minutes 9 [--resume EARLIER.jsonl.gz]
    python benchmarks/profile_families.py --boundaries boundaries.jsonl --minutes 4
    python benchmarks/profile_families.py --sharded fsdp2.jsonl

The first form writes one line per configuration: what `profile_steps.py` records, the allocator's reserved
peak, and the mean board power and clock while steps run back to back. The second finds for eight models the
largest batch that fits below a cap on memory; the third measures the memory of FSDP2 with one rank. Needs
torch, torchvision and transformers; nothing of Paceline.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from profile_steps import METHOD_VERSION, digest, hf, llama
from torch import nn
from torch.nn import functional as F

Case = dict[str, Any]
DEVICE = "cuda"


class Unet(nn.Module):
    """A diffusion U-Net: residual blocks with group norm, attention at the lowest resolution."""

    def __init__(self, width: int = 128, levels: tuple[int, ...] = (1, 2, 4)) -> None:
        super().__init__()
        widths = [width * m for m in levels]
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(UnetBlock(a, b) for a, b in zip([width, *widths], widths, strict=False))
        self.middle = UnetAttention(widths[-1])
        pairs = zip(widths[::-1], [*widths[-2::-1], width], strict=True)
        self.up = nn.ModuleList(UnetBlock(2 * a, b) for a, b in pairs)
        self.head = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, kept.pop()], 1))
        return self.head(x)


class UnetBlock(nn.Module):
    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(32, wide), nn.SiLU(), nn.Conv2d(wide, out, 3, padding=1))
        self.second = nn.Sequential(nn.GroupNorm(32, out), nn.SiLU(), nn.Conv2d(out, out, 3, padding=1))
        self.skip = nn.Conv2d(wide, out, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) + self.skip(x)


class UnetAttention(nn.Module):
    def __init__(self, width: int, heads: int = 8) -> None:
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(32, width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, width, high, wide = x.shape
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        shape = (batch, high * wide, self.heads, width // self.heads)
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in self.qkv(tokens).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, high * wide, width)
        return x + self.out(mixed).transpose(1, 2).reshape(x.shape)


class VolumeUnet(nn.Module):
    """A 3-D U-Net with instance norm, as medical images are segmented."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(depth)]
        self.down = nn.ModuleList(self.block(a, b) for a, b in zip([4, *widths], widths, strict=False))
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.lift = nn.ModuleList(nn.ConvTranspose3d(a, b, 2, stride=2) for a, b in pairs)
        self.up = nn.ModuleList(self.block(2 * b, b) for _, b in pairs)
        self.head = nn.Conv3d(width, 4, 1)

    @staticmethod
    def block(wide: int, out: int) -> nn.Module:
        layers: list[nn.Module] = []
        for a in (wide, out):
            layers += [
                nn.Conv3d(a, out, 3, padding=1),
                nn.InstanceNorm3d(out, affine=True),
                nn.LeakyReLU(0.01),
            ]
        return nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for i, block in enumerate(self.down):
            x = block(x if i == 0 else F.max_pool3d(x, 2))
            kept.append(x)
        kept.pop()
        for lift, block in zip(self.lift, self.up, strict=True):
            x = block(torch.cat([lift(x), kept.pop()], 1))
        return self.head(x)


class Dlrm(nn.Module):
    """A recommender: embedding bags, two perceptrons and pairwise dot products."""

    def __init__(self, tables: int = 26, rows: int = 200_000, width: int = 64) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = perceptron(13, 512, 256, width)
        pairs = (tables + 1) * tables // 2
        self.top = perceptron(pairs + width, 1024, 1024, 512, 256, 1)

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        low = self.bottom(dense)
        parts = torch.stack([low, *(bag(ids[i]) for i, bag in enumerate(self.bags))], 1)
        rows, columns = torch.tril_indices(parts.shape[1], parts.shape[1], -1, device=parts.device)
        dots = (parts @ parts.transpose(1, 2))[:, rows, columns]
        return self.top(torch.cat([low, dots], 1)).squeeze(1)


class GraphNet(nn.Module):
    """Graph convolutions by gather and index_add."""

    def __init__(self, width: int = 256, layers: int = 4, features: int = 128, classes: int = 40) -> None:
        super().__init__()
        widths = [features, *[width] * (layers - 1), classes]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x: torch.Tensor, edges: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        source, target = edges
        for i, layer in enumerate(self.layers):
            x = layer(x)
            x = torch.zeros_like(x).index_add_(0, target, x[source] * norm[:, None].to(x.dtype))
            if i + 1 < len(self.layers):
                x = F.relu(x)
        return x


class GruTagger(nn.Module):
    def __init__(self, width: int = 1024, layers: int = 3, vocab: int = 30_000) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.gru = nn.GRU(width, width, num_layers=layers, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(self.embed(ids))[0])


class Dit(nn.Module):
    """A diffusion transformer: adaptive norms from a time embedding (Peebles and Xie 2023)."""

    def __init__(self, width: int = 1152, layers: int = 14, heads: int = 16, patch: int = 2) -> None:
        super().__init__()
        self.patch = nn.Conv2d(4, width, patch, stride=patch)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(DitBlock(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, patch * patch * 8)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        condition = self.time(t)
        for block in self.blocks:
            tokens = block(tokens, condition)
        return self.head(tokens)


class DitBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        shift, scale, gate, low, high, keep = self.modulation(condition)[:, None].chunk(6, -1)
        shape = (batch, length, self.heads, width // self.heads)
        inner = self.first(x) * (1 + scale) + shift
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in self.qkv(inner).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + gate * self.out(mixed)
        return x + keep * self.mlp(self.second(x) * (1 + high) + low)


class LowRank(nn.Module):
    """A linear layer that stays as it is, with a trained product of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        like = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.down = nn.Linear(base.in_features, rank, bias=False, **like)
        self.up = nn.Linear(rank, base.out_features, bias=False, **like)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2.0 * self.up(self.down(x))


def perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def add_adapters(model: nn.Module, rank: int) -> None:
    """Low-rank adapters on every linear layer but the head; the rest is frozen, inputs require a gradient."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and "head" not in name:
                setattr(module, name, LowRank(child, rank))
    model.enable_input_require_grads()


MODELS: dict[str, Case] = {
    "qwen3-0.6B": hf(
        "qwen3",
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        intermediate_size=3072,
        head_dim=128,
        tie_word_embeddings=True,
    ),
    "mistral-slice": hf(
        "mistral",
        hidden_size=4096,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
    ),
    "gemma2-slice": hf(
        "gemma2",
        hidden_size=2304,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=9216,
        head_dim=256,
    ),
    "gemma3-slice": hf(
        "gemma3_text",
        hidden_size=1152,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=1,
        intermediate_size=6912,
        head_dim=256,
    ),
    "bloom-560M": hf("bloom", hidden_size=1024, n_layer=24, n_head=16),
    "stablelm-slice": hf(
        "stablelm",
        hidden_size=2048,
        num_hidden_layers=10,
        num_attention_heads=32,
        num_key_value_heads=32,
        intermediate_size=5632,
    ),
    "olmo2-slice": hf(
        "olmo2",
        hidden_size=2048,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=16,
        intermediate_size=8192,
    ),
    "phi3-slice": hf(
        "phi3",
        hidden_size=3072,
        num_hidden_layers=6,
        num_attention_heads=32,
        num_key_value_heads=32,
        intermediate_size=8192,
        pad_token_id=0,
    ),
    "starcoder2-slice": hf(
        "starcoder2",
        hidden_size=3072,
        num_hidden_layers=6,
        num_attention_heads=24,
        num_key_value_heads=2,
        intermediate_size=12288,
    ),
    "llama-3.2-3B-slice": llama(3072, 10, 24, 8, 8192, 128256),
    "llama-8B-slice": llama(4096, 6, 32, 8, 14336, 128256),
    "mixtral-slice": hf(
        "mixtral",
        hidden_size=2048,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        intermediate_size=4096,
        num_local_experts=8,
    ),
    "qwen3-moe-slice": hf(
        "qwen3_moe",
        hidden_size=2048,
        num_hidden_layers=3,
        num_attention_heads=32,
        num_key_value_heads=4,
        moe_intermediate_size=768,
        num_experts=64,
        num_experts_per_tok=8,
        head_dim=128,
    ),
    "olmoe-slice": hf(
        "olmoe",
        hidden_size=2048,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=16,
        intermediate_size=1024,
        num_experts=64,
        num_experts_per_tok=8,
    ),
    "gpt-oss-slice": hf(
        "gpt_oss",
        hidden_size=2880,
        num_hidden_layers=3,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=2880,
        num_local_experts=16,
        num_experts_per_tok=4,
        head_dim=64,
    ),
    "deepseek-v3-slice": hf(
        "deepseek_v3",
        hidden_size=2048,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=16,
        intermediate_size=8192,
        moe_intermediate_size=1024,
        n_routed_experts=32,
        num_experts_per_tok=4,
        q_lora_rank=768,
        kv_lora_rank=512,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
    ),
    "electra-base": hf(
        "electra",
        "AutoModelForMaskedLM",
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=3072,
        embedding_size=768,
    ),
    "deberta-v2": hf(
        "deberta-v2",
        "AutoModelForMaskedLM",
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=3072,
        vocab_size=128100,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=256,
    ),
    "albert-base": hf(
        "albert", "AutoModelForMaskedLM", hidden_size=768, num_attention_heads=12, intermediate_size=3072
    ),
    "bart-base": hf(
        "bart",
        "AutoModelForSeq2SeqLM",
        d_model=768,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
    ),
    "t5-large": hf(
        "t5", "AutoModelForSeq2SeqLM", d_model=1024, num_layers=24, num_heads=16, d_ff=4096, d_kv=64
    ),
    "flan-t5-small": hf(
        "t5",
        "AutoModelForSeq2SeqLM",
        d_model=512,
        num_layers=8,
        num_heads=6,
        d_ff=1024,
        d_kv=64,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    ),
    "whisper-small": {
        **hf(
            "whisper",
            "AutoModelForSpeechSeq2Seq",
            d_model=768,
            encoder_layers=12,
            decoder_layers=12,
            encoder_attention_heads=12,
            decoder_attention_heads=12,
            encoder_ffn_dim=3072,
            decoder_ffn_dim=3072,
        ),
        "inputs": "audio",
    },
    "wav2vec2-base": {**hf("wav2vec2", "AutoModelForAudioClassification"), "inputs": "wave"},
    "mamba-130M": hf("mamba", hidden_size=768, num_hidden_layers=4),
    "dinov2-base": {**hf("dinov2", "AutoModelForImageClassification"), "inputs": "image"},
    "segformer-b2": {
        **hf(
            "segformer",
            "AutoModelForSemanticSegmentation",
            depths=[3, 4, 6, 3],
            hidden_sizes=[64, 128, 320, 512],
            decoder_hidden_size=768,
        ),
        "inputs": "mask",
    },
    "unet-diffusion": {"family": "unet"},
    "unet-3d": {"family": "volume"},
    "dlrm": {"family": "dlrm"},
    "graph-net": {"family": "graph"},
    "gru-tagger": {"family": "gru"},
    "dit": {"family": "dit"},
}
VIDEO = ("r3d_18", "mc3_18", "r2plus1d_18", "s3d", "mvit_v1_b", "swin3d_t")
SEGMENTATION = ("deeplabv3_resnet50", "fcn_resnet50", "lraspp_mobilenet_v3_large")


def case(model: str, batch: int, size: int, precision: str, **more: Any) -> Case:
    return {
        "model": model,
        "batch": batch,
        "size": size,
        "precision": precision,
        "optimizer": "adamw-fused",
        "checkpointing": False,
        "compile": False,
        "rank": 0,
        **more,
    }


def cases() -> Iterator[Case]:
    """All configurations, those that say most first."""
    for model, batch, seq in (("llama-8B-slice", 2, 2048), ("llama-3.2-3B-slice", 2, 2048)):
        yield case(model, batch, seq, "bf16")
        yield case(model, batch, seq, "bf16", rank=16)
        yield case(model, batch, seq, "bf16", rank=16, checkpointing=True)
    for model, batch, seq, precision in (
        ("qwen3-0.6B", 4, 1024, "amp_bf16"), ("mistral-slice", 2, 2048, "bf16"),
        ("gemma2-slice", 2, 1024, "bf16"), ("gemma3-slice", 4, 1024, "amp_bf16"),
        ("bloom-560M", 4, 512, "amp_bf16"), ("mixtral-slice", 2, 1024, "bf16"),
        ("qwen3-moe-slice", 2, 1024, "bf16"), ("olmoe-slice", 2, 1024, "amp_bf16"),
        ("gpt-oss-slice", 1, 1024, "bf16"), ("deepseek-v3-slice", 2, 1024, "bf16"),
        ("deberta-v2", 16, 256, "amp_bf16"), ("electra-base", 32, 128, "amp_bf16"),
        ("t5-large", 8, 512, "bf16"), ("t5-large", 4, 512, "amp_bf16"),
        ("flan-t5-small", 32, 256, "amp_bf16"),
        ("bart-base", 16, 512, "amp_bf16"), ("albert-base", 32, 256, "tf32"),
        ("whisper-small", 8, 448, "amp_bf16"), ("wav2vec2-base", 8, 80_000, "amp_bf16"),
        ("stablelm-slice", 4, 1024, "bf16"), ("olmo2-slice", 4, 1024, "amp_bf16"),
        ("phi3-slice", 2, 2048, "bf16"), ("starcoder2-slice", 2, 2048, "bf16"),
        ("dinov2-base", 32, 224, "amp_bf16"), ("segformer-b2", 8, 512, "amp_bf16"),
        ("unet-diffusion", 16, 64, "amp_bf16"), ("unet-diffusion", 8, 64, "tf32"),
        ("unet-3d", 2, 96, "amp_bf16"), ("unet-3d", 2, 96, "tf32"), ("dlrm", 4096, 1, "tf32"),
        ("dlrm", 32768, 1, "amp_bf16"), ("graph-net", 1, 100_000, "tf32"),
        ("graph-net", 1, 100_000, "amp_bf16"),
        ("gru-tagger", 32, 128, "amp_bf16"), ("dit", 32, 32, "amp_bf16"), ("dit", 16, 64, "bf16"),
    ):  # fmt: skip
        yield case(model, batch, seq, precision)
    for model in VIDEO:
        yield case(
            model,
            8,
            112 if model not in ("mvit_v1_b", "swin3d_t", "s3d") else 224,
            "amp_bf16",
            optimizer="sgd",
        )
    for model in ("r3d_18", "s3d"):
        yield case(model, 8, 112 if model == "r3d_18" else 224, "tf32", optimizer="sgd")
    for model in SEGMENTATION:
        yield case(model, 8, 512, "amp_bf16", optimizer="sgd")
    for model in (
        "efficientnet_v2_m",
        "regnet_y_8gf",
        "resnet152",
        "vit_l_16",
        "convnext_base",
        "mnasnet1_3",
    ):
        yield case(model, 48, 224, "amp_bf16", optimizer="sgd")
    for model in ("efficientnet_b4", "resnext101_32x8d", "mobilenet_v3_small"):
        yield case(model, 48, 224, "tf32", optimizer="sgd")
    for optimizer in ("adamw", "adamw-loop", "adafactor", "sgd", "muon"):
        yield case("llama-3.2-3B-slice", 1, 1024, "bf16", optimizer=optimizer)
    yield case("qwen3-0.6B", 4, 1024, "bf16", checkpointing=True)
    yield case("qwen3-0.6B", 2, 1024, "tf32")
    yield case("mistral-slice", 1, 4096, "amp_bf16")
    yield case("mamba-130M", 2, 256, "bf16")
    yield case("resnet152", 4, 224, "amp_bf16", optimizer="sgd")
    yield case("vit_l_16", 4, 224, "amp_bf16", optimizer="sgd")


def identity(c: Case) -> tuple[Any, ...]:
    return tuple(c[k] for k in sorted(case("", 0, 0, "")))


def built(c: Case) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """The module on the GPU and a function that computes its loss."""
    info = MODELS.get(c["model"], {"family": family_of(c["model"])})
    dtype = torch.bfloat16 if c["precision"] == "bf16" else torch.float32
    torch.set_default_dtype(dtype)
    try:
        with torch.device(DEVICE):
            model, loss = MAKERS[info["family"]](c, info, dtype)
    finally:
        torch.set_default_dtype(torch.float32)
    return model, loss


def family_of(model: str) -> str:
    if model in VIDEO:
        return "video"
    return "segmentation" if model in SEGMENTATION else "cnn"


def of_transformers(c: Case, info: Case, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    import transformers

    config = transformers.AutoConfig.for_model(info["type"], **info["cfg"])
    config.use_cache = False
    if info["type"] == "t5":
        config.decoder_start_token_id = 0
    model = getattr(transformers, info["head"]).from_config(config).cuda().train()
    if c["checkpointing"]:
        model.gradient_checkpointing_enable()
    if c["rank"]:
        add_adapters(model, c["rank"])
    given = INPUTS[info.get("inputs", "tokens")](c, model.config, dtype)
    return model, lambda: model(**given).loss


def tokens(c: Case, config: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, config.vocab_size, (c["batch"], c["size"]))
    return {"input_ids": ids, "labels": ids}


def audio(c: Case, config: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    heard = torch.randn(c["batch"], config.num_mel_bins, 3000, dtype=dtype)
    return {"input_features": heard, "labels": torch.randint(2, config.vocab_size, (c["batch"], c["size"]))}


def wave(c: Case, config: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        "input_values": torch.randn(c["batch"], c["size"], dtype=dtype),
        "labels": torch.zeros(c["batch"], dtype=torch.long),
    }


def image(c: Case, config: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {"pixel_values": pixels(c, dtype), "labels": torch.zeros(c["batch"], dtype=torch.long)}


def mask(c: Case, config: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": pixels(c, dtype),
        "labels": torch.zeros(c["batch"], c["size"], c["size"], dtype=torch.long),
    }


def pixels(c: Case, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(c["batch"], 3, c["size"], c["size"], dtype=dtype)


INPUTS = {"tokens": tokens, "audio": audio, "wave": wave, "image": image, "mask": mask}


def of_torchvision(c: Case, info: Case, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    import torchvision

    more = {"weights_backbone": None} if info["family"] == "segmentation" else {}
    model = torchvision.models.get_model(c["model"], weights=None, **more).cuda().train()
    if info["family"] == "video":
        x = torch.randn(c["batch"], 3, 16, c["size"], c["size"], dtype=dtype)
        y = torch.randint(0, 400, (c["batch"],))
        return model, lambda: F.cross_entropy(model(x), y)
    model = model.to(memory_format=torch.channels_last)
    x = pixels(c, dtype).to(memory_format=torch.channels_last)
    if info["family"] == "segmentation":
        y = torch.randint(0, 21, (c["batch"], c["size"], c["size"]))
        return model, lambda: F.cross_entropy(model(x)["out"], y)
    y = torch.randint(0, 1000, (c["batch"],))
    return model, lambda: F.cross_entropy(model(x), y)


def of_unet(c: Case, info: Case, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    model, x = Unet().cuda(), pixels(c, dtype)
    noise = torch.randn_like(x)
    return model, lambda: F.mse_loss(model(x), noise)


def of_volume(c: Case, info: Case, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    model, side = VolumeUnet().cuda(), c["size"]
    x = torch.randn(c["batch"], 4, side, side, side, dtype=dtype)
    y = torch.randint(0, 4, (c["batch"], side, side, side))
    return model, lambda: F.cross_entropy(model(x), y)


def of_dlrm(c: Case, info: Case, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    model, batch = Dlrm().cuda(), c["batch"]
    dense, ids = torch.randn(batch, 13, dtype=dtype), torch.randint(0, 200_000, (26, batch, 1))
    y = torch.rand(batch, dtype=dtype)
    return model, lambda: F.binary_cross_entropy_with_logits(model(dense, ids).float(), y.float())


def of_graph(c: Case, info: Case, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    model, nodes = GraphNet().cuda(), c["size"]
    x, edges = torch.randn(nodes, 128, dtype=dtype), torch.randint(0, nodes, (2, 10 * nodes))
    norm, y = torch.rand(10 * nodes, dtype=dtype), torch.randint(0, 40, (nodes,))
    return model, lambda: F.cross_entropy(model(x, edges, norm), y)


def of_gru(c: Case, info: Case, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    model = GruTagger().cuda()
    ids, y = (torch.randint(0, n, (c["batch"], c["size"])) for n in (30_000, 64))
    return model, lambda: F.cross_entropy(model(ids).flatten(0, 1), y.flatten())


def of_dit(c: Case, info: Case, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    model = Dit().cuda()
    x = torch.randn(c["batch"], 4, c["size"], c["size"], dtype=dtype)
    t = torch.randn(c["batch"], 256, dtype=dtype)
    return model, lambda: model(x, t).float().square().mean()


MAKERS = {
    "hf": of_transformers,
    "video": of_torchvision,
    "segmentation": of_torchvision,
    "cnn": of_torchvision,
    "unet": of_unet,
    "volume": of_volume,
    "dlrm": of_dlrm,
    "graph": of_graph,
    "gru": of_gru,
    "dit": of_dit,
}


def optimizer_of(c: Case, model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    match c["optimizer"]:
        case "sgd":
            return torch.optim.SGD(trained, lr=1e-3, momentum=0.9)
        case "adafactor":
            return torch.optim.Adafactor(trained, lr=1e-4)
        case "muon":
            return torch.optim.Muon([p for p in trained if p.ndim == 2], lr=1e-4)
        case "adamw-loop":
            return torch.optim.AdamW(trained, lr=1e-5, foreach=False)
        case "adamw":
            return torch.optim.AdamW(trained, lr=1e-5)
    return torch.optim.AdamW(trained, lr=1e-5, fused=True)


def stepper(c: Case) -> tuple[nn.Module, Callable[[], None]]:
    """The module, and a function that takes one training step."""
    from torch.profiler import record_function

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = c["precision"] != "fp32"
    # a workspace that cudnn tries while it chooses would be counted in the peak
    torch.backends.cudnn.benchmark = c["precision"].startswith("amp")
    model, loss = built(c)
    optimizer = optimizer_of(c, model)

    def step() -> None:
        with (
            record_function("##fwd"),
            torch.autocast("cuda", torch.bfloat16, enabled=c["precision"] == "amp_bf16"),
        ):
            out = loss()
        with record_function("##bwd"):
            out.backward()
        with record_function("##opt"):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return model, step


def clear() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def walls_of(step: Callable[[], None], times: int = 4) -> list[float]:
    walls = []
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(times):
            step()
        torch.cuda.synchronize()
        walls.append((time.perf_counter() - started) / times)
    return walls


def power_of(step: Callable[[], None], wall: float, seconds: float = 1.2) -> dict[str, float]:
    """Mean board power and clock over steps back to back, the first samples left out."""
    command = [
        "nvidia-smi",
        "--query-gpu=power.draw.instant,clocks.sm",
        "--format=csv,noheader,nounits",
        "-lms",
        "50",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as meter:
        until = time.perf_counter() + seconds
        started, count = time.perf_counter(), 0
        while time.perf_counter() < until:
            for _ in range(max(1, int(0.1 / wall))):
                step()
                count += 1
            torch.cuda.synchronize()
        took = time.perf_counter() - started
        meter.terminate()
        lines = (meter.stdout.read() if meter.stdout else "").strip().splitlines()
    samples = [
        tuple(float(v) for v in line.split(",")) for line in lines[len(lines) // 3 :] if line.count(",") == 1
    ]
    if not samples:
        return {}
    watts, clocks = zip(*samples, strict=True)
    return {
        "power_w": statistics.mean(watts),
        "clock_mhz": statistics.mean(clocks),
        "power_step_s": took / count,
        "power_samples": len(samples),
    }


def measured(c: Case) -> Case:
    from torch.profiler import ProfilerActivity, profile

    clear()
    started = time.perf_counter()
    model, step = stepper(c)
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    warm = {
        "peak_alloc": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
    }
    torch.cuda.reset_peak_memory_stats()
    walls = walls_of(step)
    wall = statistics.median(walls)
    steady = torch.cuda.max_memory_allocated()
    power = power_of(step, wall)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as profiled:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "trace.json")
        profiled.export_chrome_trace(path)
        row = digest(path)
    info = {k: v for k, v in MODELS.get(c["model"], {"family": family_of(c["model"])}).items() if k != "head"}
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {
        **c,
        **info,
        "method": METHOD_VERSION,
        "params": sum(p.numel() for p in model.parameters()),
        "trained": trained,
        "step_s": wall,
        "step_spread": (max(walls) - min(walls)) / wall,
        **warm,
        "peak_alloc_steady": steady,
        **power,
        "took_s": time.perf_counter() - started,
        **row,
    }


#: model, size and precision whose largest batch is sought, and the cap on memory in GiB
BOUNDARIES = (
    ("llama-3.2-3B-slice", 1024, "bf16", 0, 40),
    ("qwen3-0.6B", 1024, "amp_bf16", 0, 40),
    ("bart-base", 512, "amp_bf16", 0, 24),
    ("llama-8B-slice", 2048, "bf16", 16, 40),
    ("t5-large", 512, "bf16", 0, 40),
    ("unet-diffusion", 64, "amp_bf16", 0, 24),
    ("deberta-v2", 256, "amp_bf16", 0, 24),
    ("resnet152", 224, "amp_bf16", 0, 24),
)


def fits(c: Case) -> tuple[bool, float, float]:
    """Whether three steps pass below the cap, and the peaks of allocated and reserved memory."""
    clear()
    try:
        _, step = stepper(c)
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        passed = True
    except torch.OutOfMemoryError:
        passed = False
    return passed, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def boundary(model: str, size: int, precision: str, rank: int, cap_gib: float) -> Iterator[Case]:
    """Tries of a batch doubled, then halved between, until neighbours differ by an eighth or by one."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(cap_gib * 2**30 / total)
    low, high = 0, 0
    batch = 1
    while not high or (high - low > 1 and (high - low) * 8 > low):
        passed, allocated, reserved = fits(c := case(model, batch, size, precision, rank=rank))
        yield {**c, "cap_gib": cap_gib, "fits": passed, "peak_alloc": allocated, "peak_reserved": reserved}
        low, high = (batch, high) if passed else (low, batch)
        batch = (low + high) // 2 if high else 2 * batch
        if high == 1:
            break
    torch.cuda.set_per_process_memory_fraction(1.0)


#: models under FSDP2 with one rank: name, batch, size
SHARDED = (("llama-3.2-3B-slice", 2, 2048), ("qwen3-0.6B", 4, 1024), ("dit", 16, 64))


def sharded(model: str, batch: int, size: int, low: bool) -> Case:
    """Time and memory of steps under FSDP2, each block wrapped, parameters gathered in bf16 or in fp32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    clear()
    c = case(model, batch, size, "tf32")
    module, loss = built(c)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if low else MixedPrecisionPolicy()
    for block in module.model.layers if hasattr(module, "model") else module.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(module, mp_policy=policy)
    optimizer = optimizer_of(c, module)
    torch.cuda.reset_peak_memory_stats()

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    peaks = {
        "peak_alloc": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
    }
    return {**c, "gathered": "bf16" if low else "fp32", "step_s": statistics.median(walls_of(step)), **peaks}


def shard_all(path: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("nccl")
    with Path(path).open("w") as out:
        for what, low in itertools.product(SHARDED, (True, False)):
            out.write(json.dumps(row := sharded(*what, low)) + "\n")
            print(row, flush=True)


def profile_all(path: str, resume: str | None, deadline: float) -> None:
    done = set()
    if resume:
        with gzip.open(resume, "rt") as earlier:
            done = {identity(json.loads(line)) for line in earlier}
    with gzip.open(path, "wt") as out:
        for c in cases():
            if identity(c) in done:
                continue
            if time.time() > deadline:
                print("out of time before", c["model"], flush=True)
                break
            try:
                row = measured(c)
            except torch.AcceleratorError:
                raise
            except (
                Exception
            ) as error:  # one model that fails must not cost the rest of the time on the machine
                print("FAILED", c, type(error).__name__, str(error)[:300], flush=True)
                continue
            out.write(json.dumps(row) + "\n")
            out.flush()
            print(
                f"{c['model']} b{c['batch']} {c['precision']} {c['optimizer']} r{c['rank']}",
                f"step {row['step_s'] * 1e3:.2f} ms, device {row['device_s'] * 1e3:.2f},",
                f"kernels {row['kernels']},",
                f"{row.get('power_w', 0):.0f} W, took {row['took_s']:.1f} s",
                flush=True,
            )


def bound_all(path: str, deadline: float) -> None:
    with Path(path).open("w") as out:
        for what in BOUNDARIES:
            if time.time() > deadline:
                print("out of time before", what, flush=True)
                break
            for row in boundary(*what):
                out.write(json.dumps(row) + "\n")
                print(
                    row["model"],
                    row["batch"],
                    row["fits"],
                    f"{row['peak_alloc'] / 2**30:.2f} GiB",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out")
    parser.add_argument("--boundaries")
    parser.add_argument("--sharded")
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--resume", help="an earlier output: its cases are not taken again")
    args = parser.parse_args()
    deadline = time.time() + args.minutes * 60
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    if args.boundaries:
        bound_all(args.boundaries, deadline)
    if args.sharded:
        shard_all(args.sharded)
    if args.out:
        profile_all(args.out, args.resume, deadline)


if __name__ == "__main__":
    sys.exit(main())
