"""A layer written from its sizes runs what the captured module runs."""

from dataclasses import replace

import pytest

from paceline.catalog import frameworks, models, transformers
from paceline.cost.transformer import Shape, blocks, saved_bytes
from paceline.errors import SpecError
from paceline.spec.plan import Degrees
from paceline.spec.transformer import Transformer, from_columns, from_hf

TORCH = replace(frameworks.get("torch"), dropout=False)


@pytest.mark.parametrize("name", transformers.captured())
def test_parameters_are_the_catalogs(name):
    assert transformers.get(name).parameters == models.get(name).parameters


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("qwen3-30b-a3b", 30.5e9),
        ("qwen3-235b-a22b", 235e9),
        ("gpt-oss-120b", 117e9),
        ("grok-1", 314e9),
        ("deepseek-v3", 671e9),
        ("deepseek-v2", 236e9),
        ("llama4-maverick", 400.7e9),
        ("llama4-scout", 107.8e9),
        ("gpt-oss-20b", 20.9e9),
        ("mixtral-8x22b", 140.6e9),
        ("dbrx", 131.6e9),
        ("qwen2-57b-a14b", 57.4e9),
        ("olmoe-1b-7b", 6.92e9),
        ("kimi-k2", 1.027e12),
    ],
)
def test_models_known_by_sizes_have_the_published_count(name, published):
    """DeepSeek's first layers, which are dense, count as experts here."""
    assert transformers.get(name).parameters == pytest.approx(
        published, rel=0.06 if name.startswith(("deepseek", "kimi")) else 0.01
    )


@pytest.mark.parametrize("name", ["gpt2-124m", "llama3.2-1b", "bert-base"])
def test_flops_are_those_of_the_captured_module(name):
    capture = pytest.importorskip("paceline.capture")
    pytest.importorskip("torch")
    model = transformers.get(name)
    workload = capture.capture(name, batch=2, seq=512, precision="bf16")
    found = blocks(Shape(model=model, framework=TORCH, mbs=2, seq=512))
    flops = {piece: sum(op.flops for op in part.ops) for piece, part in found.pieces.items()}
    counts = {"layer.forward": model.layers, "layer.backward": model.layers}
    total = sum(counts.get(piece, 1) * count for piece, count in flops.items())
    if not model.causal:  # an encoder's head transforms before it projects
        total += 6 * 2 * 512 * model.hidden**2
    assert total == pytest.approx(workload.flops, rel=0.002)


def shape(**sizes):
    degrees = {name: sizes.pop(name) for name in ("tp", "cp", "ep") if name in sizes}
    given = {
        "degrees": Degrees(**degrees),
        "model": transformers.get("gpt3-13b"),
        "framework": frameworks.get("megatron-2021"),
        "mbs": 2,
        "seq": 2048,
        **sizes,
    }
    return Shape(**given)


def total(s):
    found = blocks(s)
    return sum(op.flops for name in ("layer.forward", "layer.backward") for op in found.pieces[name].ops)


def test_tensor_parallelism_divides_the_work():
    for tp in (2, 4, 8):
        assert total(shape(tp=tp)) == pytest.approx(total(shape()) / tp, rel=1e-6)


def test_collectives_of_a_layer():
    forward, backward = (
        blocks(shape(tp=8)).pieces[f"layer.{way}"].collectives for way in ("forward", "backward")
    )
    assert [c.op for c in forward] == ["all_reduce"] * 2 and [c.op for c in backward] == ["all_reduce"] * 2
    assert forward[0].size == 2 * 2048 * 5120 * 2
    forward = blocks(shape(tp=8, sp=True)).pieces["layer.forward"].collectives
    assert sorted(c.op for c in forward) == ["all_gather"] * 2 + ["reduce_scatter"] * 2
    assert not blocks(shape()).pieces["layer.forward"].collectives


def test_experts_are_exchanged_and_divided():
    mixtral = transformers.get("mixtral-8x7b")
    s = shape(model=mixtral, framework=frameworks.get("megatron-core"), ep=8)
    moves = [c for c in blocks(s).pieces["layer.forward"].collectives if c.axis == "ep"]
    assert [c.op for c in moves] == ["all_to_all"] * 2 and moves[0].size == s.tokens * 2 * 4096 * 2
    assert total(s) == pytest.approx(
        total(replace(s, degrees=Degrees())), rel=1e-6
    )  # as many tokens come as go


def mixed(model="qwen3-30b-a3b", name="megatron-bridge", **sizes):
    return shape(
        model=transformers.get(model),
        framework=frameworks.get(name),
        mbs=1,
        seq=4096,
        ep=8,
        matrix="fp8",
        **sizes,
    )


def kinds(s, way="forward"):
    return [op.kind for op in blocks(s).pieces[f"layer.{way}"].ops]


def test_fused_experts_leave_out_passes_not_products():
    apart, fused = mixed(), mixed(name="megatron-bridge-2026")
    assert total(fused) == pytest.approx(total(apart))
    for way in ("forward", "backward"):
        assert kinds(fused, way).count("gemm") == kinds(apart, way).count("gemm")
        assert kinds(fused, way).count("cast") == kinds(apart, way).count("cast") - 2
    assert blocks(apart).pieces["layer.forward"].sync > 0 > blocks(fused).pieces["layer.forward"].sync


def test_every_expert_is_launched():
    found = blocks(mixed()).pieces
    assert (
        set(found["layer.forward"].launches.values())
        == {16}
        == set(found["layer.backward"].launches.values())
    )
    assert [found["layer.forward"].ops[i].kind for i in found["layer.forward"].launches] == [
        "cast",
        "gemm",
    ] * 2
    assert not blocks(mixed(name="megatron-bridge-2026")).pieces["layer.forward"].launches


def test_an_all_to_all_is_sorted_twice():
    assert kinds(mixed(name="megatron-core")).count("gather") == kinds(mixed()).count("gather") + 2
    # one expert per rank: nothing to sort
    assert kinds(mixed(name="megatron-core", model="mixtral-8x7b")).count("gather") == 2


def test_exchanges_beside_another_micro_batch():
    def behind(s):
        return [len(c.behind) for c in blocks(s).pieces["layer.forward"].collectives if c.axis == "ep"]

    s = mixed(name="megatron-bridge-2026")
    assert behind(s) == [len(kinds(s))] * 2
    assert behind(replace(s, accumulate=False)) == behind(mixed()) == [0, 0]
    split = replace(s, degrees=replace(s.degrees, tp=2), sp=True)
    pieces = blocks(split).pieces["layer.forward"].collectives
    others = {place for c in pieces if c.axis == "tp" for place in c.behind}
    assert others and all(not others & set(c.behind) for c in pieces if c.axis == "ep")


def test_experts_in_every_other_layer_do_the_same_work():
    model = transformers.get("llama4-maverick")
    s = shape(model=model, framework=frameworks.get("megatron-core"), mbs=1, seq=8192)
    every = replace(s, model=replace(model, moe_every=1, experts=64))
    assert total(s) == pytest.approx(total(every), rel=0.01)
    assert model.expert_parameters == replace(model, moe_every=1, experts=64).expert_parameters


def test_adapters_add_little_work():
    s = shape(model=transformers.get("llama2-70b"), framework=frameworks.get("nemo"), mbs=1, seq=8192)
    frozen = replace(s, trained=False)
    products = [i for i, op in enumerate(blocks(frozen).pieces["layer.backward"].ops) if op.kind == "gemm"]
    assert len(products) == 4 + 2 * 4  # gradients of four inputs; of both factors of two adapters
    assert total(frozen) < 0.75 * total(s)


def test_activations_as_published():
    """Korthikanti et al. 2022, table 2: bytes per layer over s b h."""
    s = shape(tp=8)
    m, unit = s.model, s.seq * s.mbs * s.model.hidden
    scores = 5 * m.heads * s.seq / m.hidden
    assert saved_bytes(s, "none") / unit == pytest.approx(10 + 24 / 8 + scores / 8, rel=0.05)
    assert saved_bytes(replace(s, sp=True), "none") / unit == pytest.approx((34 + scores) / 8, rel=0.05)
    assert saved_bytes(replace(s, sp=True), "selective") / unit == pytest.approx(34 / 8, rel=0.05)
    assert saved_bytes(s, "full") / unit == 2


def test_from_hugging_face():
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
    assert from_hf(config).parameters == models.get("llama3-8b").parameters
    with pytest.raises(SpecError, match="latent attention"):
        from_hf({**config, "kv_lora_rank": 512})
    with pytest.raises(SpecError, match="no num_hidden_layers"):
        from_hf({"model_type": "llama"})


def test_from_columns():
    row = {
        "model": "x",
        "n_layers": "48",
        "hidden": "7168",
        "heads": "56",
        "ffn_hidden": "28672",
        "vocab": "50368",
        "seq_len": "2048",
        "params": "29975214080",
    }
    assert from_columns(row).parameters == pytest.approx(29975214080, rel=2e-3)
    with pytest.raises(SpecError, match="gives no heads"):
        from_columns({**row, "heads": ""})
    with pytest.raises(SpecError, match="not a multiple"):
        Transformer(name="x", layers=1, hidden=64, heads=6, kv_heads=4, ffn=64, vocab=10)
