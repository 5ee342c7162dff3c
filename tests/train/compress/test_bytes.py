"""Encoders produce the bytes that the cost model counts, for every shape and every model of the catalog."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.catalog import models
from paceline.cost import compression as cost
from paceline.spec.compression import SCHEMES, parse
from paceline.train.compress import for_model, make

VARIANTS = [
    *SCHEMES,
    "terngrad:share=false",
    "qsgd:bits=2,bucket=64",
    "qsgd:bits=8",
    "topk:ratio=0.2,values=fp16",
    "powersgd:rank=1",
    "dgc:warmup_steps=8,ratio=0.01",
    "randomk:feedback=false",
    "topk:feedback=false",
]


def rounds(compressor, key, grad):
    """(op, bytes) of each round of an exchange with nobody else; the last one is not decoded."""
    running = compressor.exchange(key, grad, torch.empty_like(grad))
    asked = next(running)
    expected = cost.exchanges(compressor.scheme, tuple(grad.shape), step=compressor.step)
    found = [(asked.op, asked.bytes)]
    for _ in expected[1:]:
        asked = running.send([asked.payload])
        found.append((asked.op, asked.bytes))
    return found, [(exchange.op, exchange.bytes) for exchange in expected]


@pytest.mark.parametrize("text", VARIANTS)
@pytest.mark.parametrize("fused", [True, False])
@given(shape=st.lists(st.integers(1, 40), min_size=1, max_size=3), step=st.integers(0, 10))
def test_bytes_of_any_shape(text, fused, shape, step):
    compressor = make(text, fused=fused)
    compressor.step = step
    found, expected = rounds(compressor, "w", torch.randn(shape))
    assert found == expected
    assert sum(size for op, size in found if op != "max") == compressor.wire_bytes(shape)
    assert sum(size for op, size in found if op == "max") == compressor.shared_bytes(shape)


@pytest.mark.parametrize("text", VARIANTS)
def test_bytes_of_a_larger_tensor(text):
    found, expected = rounds(make(text), "w", torch.randn(700, 301))
    assert found == expected


@pytest.fixture(scope="module")
def catalog():
    """Named shapes of each model's parameters."""
    return {
        name: [
            (key, tuple(p.shape)) for key, p in models.build(models.get(name), batch=1)[0].named_parameters()
        ]
        for name in models.names()
    }


@pytest.mark.parametrize("text", ["terngrad", "dgc", "powersgd"])
def test_bytes_of_every_catalog_model(catalog, text):
    """The encoders' own code on tensors without memory, so that each tensor of each model is tried at its
    real size.
    """
    scheme = parse(text)
    compressor = make(scheme, fused=False)
    produced = {}
    for shape in sorted({shape for parameters in catalog.values() for _, shape in parameters}):
        # only PowerSGD looks at more than the number of elements
        same = shape if text == "powersgd" else torch.Size(shape).numel()
        if same not in produced:
            found, expected = rounds(compressor, str(shape), torch.empty(shape, device="meta"))
            assert found == expected, shape
            produced[same] = sum(size for _, size in found)
        produced[shape] = produced[same]
    for name, parameters in catalog.items():
        chosen = cost.assign(scheme, parameters)
        total = sum(
            produced[shape] if chosen[key] is scheme else 4 * torch.Size(shape).numel()
            for key, shape in parameters
        )
        assert total == cost.model_bytes(scheme, parameters), name


def test_the_document_has_the_bytes_of_models(catalog):
    lines = (Path(__file__).parents[3] / "docs" / "compression.md").read_text(encoding="utf-8").splitlines()
    rows = [
        line.strip("| ").split(" | ")
        for line in lines
        if re.fullmatch(r"\| [a-z0-9, ]+( \| [\d,.]+){3} \|", line)
    ]
    assert len(rows) == 9
    for names, *shown in rows:
        for name in names.split(", "):
            assert shown == [
                f"{cost.model_bytes(parse(name), catalog[model]) / 1e6:,.2f}"
                for model in ("resnet50", "vgg16", "llama3-8b")
            ], name


def test_compressors_of_a_model():
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32))
    chosen = for_model("terngrad", model.named_parameters(), world=2)
    assert {name: c.name for name, c in chosen.items()} == {
        "0.weight": "terngrad",
        "0.bias": "fp32",
        "2.weight": "fp32",
        "2.bias": "fp32",
    }
    assert chosen["0.bias"] is chosen["2.weight"]
    total = sum(
        c.wire_bytes(p.shape) + c.shared_bytes(p.shape)
        for (name, p), c in zip(model.named_parameters(), chosen.values(), strict=True)
    )
    assert total == cost.model_bytes(
        parse("terngrad"), [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    )
