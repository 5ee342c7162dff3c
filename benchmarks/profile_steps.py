"""Profile whole training steps on a CUDA device, operator by operator.

    python benchmarks/profile_steps.py --out steps.jsonl.gz --minutes 9 [--resume EARLIER.jsonl.gz]

Writes one JSON line per configuration: wall time of a step without the profiler, then one profiled
step broken down by (operator, shapes, dtypes, layout) with the kernels each launched and their
device time. Needs torch, torchvision and transformers; nothing of Paceline.

Convolutional networks run in channels_last with cudnn.benchmark, SGD with momentum; transformers
with fused AdamW. `amp_bf16` and `amp_fp16` are autocast, `bf16` pure, `tf32` and `fp32` switch the matrix
units; `nchw` cases keep torch's default layout.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from typing import Any

import torch
from torch.nn import functional as F

METHOD_VERSION = 1


class LstmLm(torch.nn.Module):
    """Two-layer LSTM language model, 1,500 wide, 10,000 words (Zaremba et al. 2014, large)."""

    def __init__(self, width: int = 1500, vocab: int = 10_000) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(vocab, width)
        self.lstm = torch.nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = torch.nn.Linear(width, vocab)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(ids))[0])


def hf(model_type: str, head: str = "AutoModelForCausalLM", **cfg: Any) -> dict[str, Any]:
    return {"family": "hf", "type": model_type, "head": head, "cfg": cfg}


def llama(hidden: int, layers: int, heads: int, kv: int, ffn: int, vocab: int = 32000) -> dict[str, Any]:
    return hf(
        "llama",
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        intermediate_size=ffn,
        vocab_size=vocab,
        max_position_embeddings=16384,
    )


MODELS: dict[str, dict[str, Any]] = {
    "gpt2-124M": hf("gpt2", n_embd=768, n_layer=12, n_head=12),
    "gpt2-774M": hf("gpt2", n_embd=1280, n_layer=36, n_head=20),
    "gpt2-50304": hf("gpt2", n_embd=1024, n_layer=8, n_head=16, vocab_size=50304),
    "bert-base": hf("bert", "AutoModelForMaskedLM"),
    "bert-large": hf(
        "bert",
        "AutoModelForMaskedLM",
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
    ),
    "roberta-base": hf("roberta", "AutoModelForMaskedLM", max_position_embeddings=514),
    "distilbert": hf("distilbert", "AutoModelForMaskedLM"),
    "llama-300M": llama(1024, 16, 16, 16, 2816),
    "llama-1B": llama(2048, 16, 32, 8, 8192, 128256),
    "llama-7B-slice": llama(4096, 6, 32, 32, 11008),
    "llama-13B-slice": llama(5120, 4, 40, 40, 13824),
    "qwen2-0.5B": hf(
        "qwen2",
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        vocab_size=151936,
        tie_word_embeddings=True,
    ),
    "opt-350M": hf(
        "opt",
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        ffn_dim=4096,
        word_embed_proj_dim=1024,
    ),
    "gpt-neox-410M": hf(
        "gpt_neox", hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    ),
    "t5-base": hf(
        "t5", "AutoModelForSeq2SeqLM", d_model=768, num_layers=12, num_heads=12, d_ff=3072, d_kv=64
    ),
    "phi": hf(
        "phi",
        hidden_size=2048,
        num_hidden_layers=12,
        num_attention_heads=32,
        intermediate_size=8192,
        vocab_size=51200,
    ),
    "gemma-slice": hf(
        "gemma",
        hidden_size=2048,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=256,
        intermediate_size=16384,
        vocab_size=256000,
    ),
    "vit-large-hf": hf(
        "vit",
        "AutoModelForImageClassification",
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
    ),
    "lstm-1500": {"family": "lstm"},
}


def cases() -> list[dict[str, Any]]:
    """Configurations, most informative first; a run takes as many as its minutes allow."""
    out: list[dict[str, Any]] = []

    def add(model: str, batch: int, size: int, precision: str, **more: Any) -> None:
        out.append(
            {
                "model": model,
                "batch": batch,
                "size": size,
                "precision": precision,
                "checkpointing": False,
                "compile": False,
                **more,
            }
        )

    cnn = [
        "resnet50",
        "mobilenet_v2",
        "densenet121",
        "convnext_tiny",
        "efficientnet_b0",
        "swin_t",
        "regnet_y_1_6gf",
        "vgg16",
        "googlenet",
        "shufflenet_v2_x1_0",
        "resnext50_32x4d",
        "vit_b_16",
        "resnet18",
        "squeezenet1_1",
        "mnasnet1_0",
        "wide_resnet50_2",
        "mobilenet_v3_large",
        "alexnet",
        "efficientnet_v2_s",
        "regnet_x_3_2gf",
        "swin_v2_t",
        "maxvit_t",
    ]
    lm = [
        ("gpt2-124M", 4, 1024),
        ("bert-large", 16, 384),
        ("llama-1B", 2, 2048),
        ("opt-350M", 4, 1024),
        ("t5-base", 8, 512),
        ("qwen2-0.5B", 2, 2048),
        ("llama-300M", 8, 1024),
        ("gpt-neox-410M", 4, 2048),
        ("llama-7B-slice", 2, 2048),
        ("distilbert", 32, 256),
        ("phi", 2, 2048),
        ("gemma-slice", 2, 2048),
        ("gpt2-774M", 2, 1024),
        ("roberta-base", 16, 512),
        ("bert-base", 64, 128),
        ("gpt2-50304", 8, 1024),
        ("llama-13B-slice", 1, 4096),
    ]
    for i in range(max(len(cnn), len(lm))):
        if i < len(cnn):
            add(cnn[i], 64, 256 if "swin_v2" in cnn[i] else 224, "amp_bf16")
        if i < len(lm):
            model, batch, seq = lm[i]
            add(model, batch, seq, "amp_bf16" if i % 2 == 0 else "bf16")
        if i < len(cnn):
            add(cnn[i], 64, 256 if "swin_v2" in cnn[i] else 224, "tf32")
    add("alexnet", 32, 224, "tf32")
    add("bert-large", 8, 512, "amp_bf16")
    add("vit-large-hf", 32, 224, "amp_bf16")
    add("lstm-1500", 64, 35, "tf32")
    add("lstm-1500", 64, 35, "amp_bf16")
    for model, batch, seq in lm[:4]:
        add(model, batch, seq, "tf32")
    add("inception_v3", 64, 299, "amp_bf16")
    add("inception_v3", 64, 299, "tf32")
    add("resnet50", 256, 224, "amp_bf16")
    add("resnet50", 16, 224, "amp_bf16")
    add("convnext_tiny", 16, 224, "amp_bf16")
    add("llama-1B", 1, 8192, "bf16", checkpointing=True)
    add("bert-base", 16, 384, "fp32")
    add("gpt2-124M", 2, 1024, "fp32")
    for model in ("resnet50", "mobilenet_v2", "vit_b_16"):
        add(model, 32, 224, "fp32")
    for model in (
        "resnet50",
        "mobilenet_v2",
        "efficientnet_b0",
        "densenet121",
        "regnet_y_1_6gf",
        "convnext_tiny",
        "vgg16",
        "swin_t",
        "resnext50_32x4d",
        "inception_v3",
    ):
        add(model, 64, 224, "amp_fp16", layout="nchw")
    for model in ("resnet50", "mobilenet_v2", "efficientnet_b0", "regnet_y_1_6gf"):
        add(model, 64, 224, "amp_fp16")
    for model in ("resnet50", "mobilenet_v2", "densenet121"):
        add(model, 32, 224, "fp32", layout="nchw")
    for model in ("resnet50", "convnext_tiny", "mobilenet_v2"):
        add(model, 64, 224, "amp_bf16", compile=True)
    for model, batch, seq in (("gpt2-124M", 8, 1024), ("bert-base", 32, 384), ("llama-300M", 8, 1024)):
        add(model, batch, seq, "amp_bf16", compile=True)
    return out


def identity(case: dict[str, Any]) -> tuple[Any, ...]:
    return (
        *(case[k] for k in ("model", "batch", "size", "precision", "checkpointing", "compile")),
        case.get("layout", "nhwc"),
    )


def build(case: dict[str, Any]) -> tuple[torch.nn.Module, Any, Any]:
    """(module, closure computing the loss, optimizer) on the current CUDA device."""
    info = MODELS.get(case["model"], {"family": "cnn"})
    dtype = torch.bfloat16 if case["precision"] == "bf16" else torch.float32
    batch, size = case["batch"], case["size"]
    torch.set_default_dtype(dtype)
    with torch.device("cuda"):
        if info["family"] == "cnn":
            import torchvision

            more = (
                {"aux_logits": False, "init_weights": False}
                if case["model"] in ("googlenet", "inception_v3")
                else {}
            )
            model = torchvision.models.get_model(case["model"], weights=None, **more)
        elif info["family"] == "lstm":
            model = LstmLm()
        else:
            import transformers

            config = transformers.AutoConfig.for_model(info["type"], **info["cfg"])
            config.use_cache = False
            if info["type"] == "t5":
                config.decoder_start_token_id = 0
            model = getattr(transformers, info["head"]).from_config(config)
    torch.set_default_dtype(torch.float32)
    model = model.cuda().train()
    if case["checkpointing"]:
        model.gradient_checkpointing_enable()
    vision = info["family"] == "cnn" or info.get("type") == "vit"
    if vision:
        layout = torch.contiguous_format if case.get("layout") == "nchw" else torch.channels_last
        model = model.to(memory_format=layout)
        x = torch.randn(batch, 3, size, size, device="cuda", dtype=dtype).to(memory_format=layout)
        y = torch.randint(0, 2 if info.get("type") == "vit" else 1000, (batch,), device="cuda")
    else:
        vocab = 10_000 if info["family"] == "lstm" else model.config.vocab_size
        x = torch.randint(0, vocab, (batch, size), device="cuda")
        y = x
    if info["family"] in ("cnn", "lstm"):
        opt: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    else:
        opt = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    run = torch.compile(model) if case["compile"] else model

    def loss() -> torch.Tensor:
        low = torch.float16 if case["precision"] == "amp_fp16" else torch.bfloat16
        with torch.autocast("cuda", low, enabled=case["precision"].startswith("amp")):
            if info["family"] == "cnn":
                return F.cross_entropy(run(x), y)
            if info["family"] == "lstm":
                return F.cross_entropy(run(x).flatten(0, 1), y.flatten())
            return run(pixel_values=x, labels=y).loss if vision else run(input_ids=x, labels=y).loss

    return model, loss, opt


def layout(dims: list[int], strides: list[int]) -> str:
    """c contiguous, l channels-last, b broadcast (a zero stride), x anything else."""
    if not dims or len(dims) != len(strides):
        return "-"
    real = [(d, s) for d, s in zip(dims, strides, strict=True) if d != 1]
    if any(s == 0 for _, s in real):
        return "b"

    def dense(order: list[tuple[int, int]]) -> bool:
        expect = 1
        for d, s in reversed(order):
            if s != expect:
                return False
            expect *= d
        return True

    if dense(real):
        return "c"
    if len(dims) in (4, 5):
        pairs = list(zip(dims, strides, strict=True))
        last = [pairs[0], *pairs[2:], pairs[1]]
        if dense([(d, s) for d, s in last if d != 1]):
            return "l"
    return "x"


def digest(path: str) -> dict[str, Any]:
    """Fold a chrome trace into rows of (phase, op, shapes, dtypes, layouts) -> kernels and times."""
    with open(path) as f:
        events = json.load(f)["traceEvents"]
    ops: dict[int, dict[str, Any]] = {}
    spans: dict[str, tuple[float, float]] = {}
    kernels = []
    for e in events:
        cat = e.get("cat")
        if cat == "cpu_op":
            ops[e["args"].get("External id")] = e
        elif cat == "user_annotation" and e["name"].startswith("##"):
            spans[e["name"][2:]] = (e["ts"], e["ts"] + e["dur"])
        elif cat in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels.append(e)
    rows: dict[tuple[Any, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0, 0.0]))
    total = 0.0
    for k in kernels:
        op = ops.get(k["args"].get("External id"))
        total += k["dur"]
        if op is None:
            key: tuple[Any, ...] = ("?", "?", "", "", "")
        else:
            a = op["args"]
            dims, types, strides = (
                a.get("Input Dims", []),
                a.get("Input type", []),
                a.get("Input Strides", []),
            )
            lay = "".join(
                layout(d, s) if d and not isinstance(d[0], list) else "-"
                for d, s in zip(dims, strides, strict=False)
            )
            phase = next((p for p, (lo, hi) in spans.items() if lo <= op["ts"] <= hi), "?")
            key = (
                phase,
                op["name"],
                json.dumps(dims, separators=(",", ":"))[:800],
                ",".join(t[:24] for t in types)[:300],
                lay,
            )
            if op["name"] in (
                "aten::convolution_backward",
                "aten::cudnn_convolution",
                "aten::_cudnn_rnn",
                "aten::_convolution",
            ):
                key += (json.dumps(a.get("Concrete Inputs", []))[:400],)
        slot = rows[key][k["name"][:72]]
        slot[0] += 1
        slot[1] += k["dur"]
    host: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for e in ops.values():
        host[e["name"]][0] += 1
        host[e["name"]][1] += e["dur"]
    return {
        "kernels": len(kernels),
        "device_s": total / 1e6,
        "spans_us": {k: hi - lo for k, (lo, hi) in spans.items()},
        "ops": [[*k, {n: [c, round(t, 2)] for n, (c, t) in v.items()}] for k, v in rows.items()],
        "host": {k: [c, round(t, 1)] for k, (c, t) in host.items()},
    }


def measure(case: dict[str, Any]) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity, profile, record_function

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = case["precision"] != "fp32"
    torch.backends.cudnn.benchmark = True
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    model, loss, opt = build(case)

    def step() -> None:
        with record_function("##fwd"):
            out = loss()
        with record_function("##bwd"):
            out.backward()
        with record_function("##opt"):
            opt.step()
            opt.zero_grad(set_to_none=True)

    for _ in range(4):
        step()
    torch.cuda.synchronize()
    peak_warm = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    walls = []
    for _ in range(3):
        t0 = time.perf_counter()
        for _ in range(4):
            step()
        torch.cuda.synchronize()
        walls.append((time.perf_counter() - t0) / 4)
    peak = torch.cuda.max_memory_allocated()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as prof:
        step()
        torch.cuda.synchronize()
    averages = sum(e.self_device_time_total for e in prof.key_averages() if "CUDA" in str(e.device_type))
    with tempfile.TemporaryDirectory() as tmp:
        path = os.path.join(tmp, "trace.json")
        prof.export_chrome_trace(path)
        row = digest(path)
    params = sum(p.numel() for p in model.parameters())
    return {
        **case,
        **{k: v for k, v in MODELS.get(case["model"], {"family": "cnn"}).items() if k != "head"},
        "method": METHOD_VERSION,
        "params": params,
        "step_s": statistics.median(walls),
        "step_spread": (max(walls) - min(walls)) / statistics.median(walls),
        "kernel_s": averages / 1e6,
        "peak_alloc": peak_warm,
        "peak_alloc_steady": peak,
        "took_s": time.perf_counter() - started,
        **row,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True)
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--resume", help="an earlier output: its cases are not taken again")
    parser.add_argument("--deadline", type=float, help="(internal) when to stop, on time.time()'s clock")
    parser.add_argument("--start", type=int, default=0, help="first case to take")
    args = parser.parse_args()
    deadline = args.deadline or time.time() + args.minutes * 60
    done = set()
    if args.resume:
        with gzip.open(args.resume, "rt") as f:
            done = {identity(json.loads(line)) for line in f}
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    with gzip.open(args.out, "at" if args.start else "wt") as out:
        for i, case in enumerate(cases()):
            if i < args.start or identity(case) in done:
                continue
            if time.time() > deadline:
                print("out of time before case", i, case["model"], flush=True)
                break
            try:
                row = measure(case)
            except Exception as error:  # one model that fails must not cost the rest of the lease
                print("FAILED", case, type(error).__name__, str(error)[:200], flush=True)
                if not isinstance(error, torch.AcceleratorError):
                    continue
                out.close()  # a device-side assert poisons the process: go on in a new one
                again = [a for a in sys.argv if not a.startswith(("--start", "--deadline"))]
                os.execv(
                    sys.executable, [sys.executable, *again, f"--start={i + 1}", f"--deadline={deadline}"]
                )
            out.write(json.dumps(row) + "\n")
            out.flush()
            print(
                f"{i} {case['model']} b{case['batch']} {case['precision']} step {row['step_s'] * 1e3:.2f} ms"
                f" device {row['device_s'] * 1e3:.2f} averages {row['kernel_s'] * 1e3:.2f} kernels"
                f" {row['kernels']} rows {len(row['ops'])} took {row['took_s']:.1f}s",
                flush=True,
            )


if __name__ == "__main__":
    main()
