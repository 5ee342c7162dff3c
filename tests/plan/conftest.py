import pytest

from paceline.catalog import clusters
from paceline.spec.transformer import Transformer


@pytest.fixture(scope="session")
def tiny():
    """A dense model that is planned in a second."""
    return Transformer(name="tiny", layers=4, hidden=1024, heads=8, ffn=4096, vocab=32_000, seq=1024)


@pytest.fixture(scope="session")
def mixed():
    """One with experts."""
    return Transformer(
        name="mixed",
        layers=4,
        hidden=1024,
        heads=8,
        kv_heads=4,
        ffn=2048,
        vocab=32_000,
        seq=2048,
        experts=8,
        top_k=2,
        gated=True,
        norm="rms",
        positions="rotary",
        bias=False,
        tied=False,
    )


@pytest.fixture(scope="session")
def node():
    return clusters.get("1xdgx-a100")


@pytest.fixture(scope="session")
def nodes():
    return clusters.get("2xdgx-a100")
