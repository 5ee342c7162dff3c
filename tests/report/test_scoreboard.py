"""The scoreboard at any width: errors, plans told apart, others beside us, rows left out."""

from dataclasses import dataclass, field

import pytest

from paceline.bench.validate.peers import PEERS, Peer
from paceline.bench.validate.sweeps import Sweeps
from paceline.report.scoreboard import validation_table


@dataclass
class Score:
    set: str = "neusight_fp32_training"
    metric: str = "peak_bytes"
    rows: int = 12345
    skipped: dict = field(default_factory=dict)
    mean_abs_pct: float | None = 12.34
    median_abs_pct: float | None = 8.0
    p90_abs_pct: float | None = 30.0
    bias_pct: float | None = 2.0
    coverage_pct: float | None = 91.2
    naive_mean_abs_pct: float | None = 45.6
    naive_median_abs_pct: float | None = float("nan")
    sweeps: Sweeps | None = None
    peers: tuple[Peer, ...] = ()


@pytest.mark.parametrize(("width", "spared"), [(80, ["median", "skipped", "bias"]), (120, []), (160, [])])
def test_scoreboard(width, spared, drawn):
    why = {"timm is not installed": 3, "no [such] model": 1}
    table, _, reasons = validation_table([Score(skipped=why), Score(metric="step_s", skipped=why)])
    lines = drawn(table, width)
    assert "12.3 %" in lines[-1] and "91 %" in lines[-1] and ("+2.0 %" in lines[-1]) == (not spared)
    assert "…" not in "".join(lines)
    below = drawn(reasons, width)
    assert [line.split()[1] for line in below[1:]] == ["3", "1"]  # most frequent first, each once
    assert "no [such] model" in below[-1]


def test_a_set_without_rows_has_dashes(drawn):
    (table,) = validation_table([Score(rows=0, mean_abs_pct=None, coverage_pct=float("nan"))])
    assert " - " in drawn(table, 160)[-1]
    assert "nan" not in drawn(table, 160)[-1]
    (nothing,) = validation_table([])
    assert drawn(nothing, 80) == ["no set was scored"]


@pytest.mark.parametrize("width", [80, 120, 160])
def test_sweeps_and_peers(width, drawn):
    found = Sweeps(count=4, rows=75, rank_correlation=0.834, regret_pct=1.27, worst_regret_pct=4.46)
    _, first, sweeps, second, peers = validation_table(
        [Score(sweeps=found, peers=PEERS["vtrain_a100_multi"]), Score(metric="peak_bytes")]
    )
    assert (str(first), str(second)) == ("\nplans told apart", "\nbeside others")
    (line,) = [line for line in drawn(sweeps, width) if line.startswith("neusight")]
    assert line.split()[1:] == ["4", "75", "0.83", "1.3", "%", "4.5", "%"]
    lines = drawn(peers, width)
    assert [
        name
        for name in ("paceline", "Calculon", "vTrain", "naive")
        if any(name in line and "%" in line for line in lines)
    ] == ["paceline", "Calculon", "vTrain", "naive"]
    assert any("12.3 %" in line and "paceline" in line for line in lines) and any(
        "14.73 %" in line for line in lines
    )


def test_peers_are_attributed():
    assert set(PEERS) == {"vtrain_a100_multi", "vtrain_a100_single", "megatron_gpt"}
    assert all(peer.how and peer.rows and peer.mean_abs_pct > 0 for peers in PEERS.values() for peer in peers)
