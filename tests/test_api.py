"""`pl.predict` on clusters: every way to name the model, the plan and the cluster gives the same answer."""

import pytest

pytest.importorskip("torch", reason="capture needs torch")

import torch

import paceline as pl
from paceline.catalog import transformers
from paceline.errors import PlanError, SpecError

NET = """
import torch


def build(batch=2):
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    return net, (torch.zeros(batch, 64),)
"""


def test_a_transformer_takes_every_plan():
    words, where = "dp=fsdp tp=8 mbs=1 gbs=64 seq=4096", "4xdgx-h100"
    answers = [
        pl.predict("llama3-8b", plan=words, cluster=where),
        pl.predict("llama3-8b", words, where),
        pl.predict("llama3-8b", pl.Plan.parse(words), pl.clusters.get(where)),
        pl.predict(transformers.get("llama3-8b"), cluster=pl.Cluster.parse(where), plan=words),
    ]
    assert all(isinstance(answer, pl.DistributedPrediction) and answer == answers[0] for answer in answers)
    assert answers[0].devices == 32 and answers[0].timeline is None
    assert pl.predict("llama3-8b", words, where, trace=True).timeline is not None


def test_anything_else_is_captured_for_its_plan(tmp_path):
    workload = pl.capture("resnet18", batch=4, image=64)
    workload.save(tmp_path / "net.json")
    plan = "ddp mbs=4 gbs=64"
    answers = [
        pl.predict(model, plan, "2xdgx-h100", **options)
        for model, options in (
            (workload, {}),
            (str(tmp_path / "net.json"), {}),
            ("resnet18", {"image": 64}),
            ("resnet18", {"image": 64, "batch": 4}),
        )
    ]
    assert all(answer == answers[0] for answer in answers) and answers[0].micro_batches == 1
    (tmp_path / "my_net.py").write_text(NET)
    for model in (f"{tmp_path}/my_net.py:build", (torch.nn.Linear(8, 8), (torch.zeros(2, 8),))):
        assert pl.predict(model, cluster="4xdgx-h100", plan="fsdp").devices == 32
    piped = pl.predict(workload, "pp=4 gbs=64", "2xdgx-h100", trace=True)
    assert len(piped.stages) == 4 and piped.timeline.ranks == 4


@pytest.mark.parametrize(
    ("arguments", "options", "error", "says"),
    [
        (("resnet18",), {}, SpecError, "give a device"),
        (("resnet18", "h200"), {"plan": "fsdp"}, SpecError, "give a device"),
        (("resnet18", pl.Plan()), {}, SpecError, "give a device"),
        (("resnet18", "fsdp", "dgx-h100"), {"plan": "ddp"}, SpecError, "not both"),
        (("resnet18", pl.devices.get("h200"), "dgx-h100"), {}, SpecError, "not both"),
        (("gpt2", "ddp", "dgx-h100"), {"batch": 4}, SpecError, "batch does not go with a cluster"),
        (("gpt2", "tp=3", "dgx-h100"), {}, PlanError, "nearest feasible plan"),
        (("hf:absent", "ddp", "dgx-h100"), {}, SpecError, "cannot read"),
    ],
)
def test_contradictions(arguments, options, error, says):
    with pytest.raises(error, match=says):
        pl.predict(*arguments, **options)
