"""Recomputation policies as data: files, and what contradicts itself."""

import json

import pytest

from paceline.errors import SpecError, UnknownName
from paceline.spec.recomputation import KEEPABLE, RecomputePolicy, RecomputeSpan, kind_of


def span(*modules, keep=()):
    return RecomputeSpan(modules=modules, keep=keep)


def test_a_policy_is_read_as_it_was_written(tmp_path):
    written = RecomputePolicy(
        spans=(span("a", "b", "c"), span("a", "b"), span("d", keep=("products",))), offload=("e",)
    )
    written.save(tmp_path / "policy.json")
    assert RecomputePolicy.load(tmp_path / "policy.json") == written
    assert [str(one) for one in written.outer] == ["a to c", "d (keep products)"]
    assert written and not RecomputePolicy()


def test_operators_have_one_kind():
    names = [name for names in KEEPABLE.values() for name in names]
    assert len(names) == len(set(names))
    assert kind_of("aten.addmm") == "products" and kind_of("aten.rnn") == "recurrent"
    assert kind_of("aten.add") is None


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ((span("a", "b"), span("b", "c")), "overlap"),
        ((span("a", "b"), span("b", "a")), "are the same"),
        ((span("a", "b"), span("a", keep=("products",))), "lies within another"),
        ((span("a"), span("a.inner", keep=("norms",))), "lies within another"),
    ],
)
def test_spans_that_contradict_each_other(spans, message):
    with pytest.raises(SpecError, match=message):
        RecomputePolicy(spans=spans)


def test_names_of_operators_are_checked():
    with pytest.raises(UnknownName, match="did you mean 'products'"):
        span("a", keep=("product",))
    with pytest.raises(SpecError, match="names no module"):
        span()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "not valid JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "not a recomputation policy of format 1"),
        (json.dumps({"paceline_recompute": 1, "spans": [{"modules": "a"}]}), "expected a list of names"),
        (json.dumps({"paceline_recompute": 1, "spans": [{}]}), "KeyError 'modules'"),
        (json.dumps({"paceline_recompute": 1, "offload": [3]}), "expected names"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path, text, message):
    path = tmp_path / "policy.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match=message) as caught:
        RecomputePolicy.load(path)
    assert "\n" not in str(caught.value) and "policy.json" in str(caught.value)


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(SpecError, match="cannot read policy"):
        RecomputePolicy.load(tmp_path / "none.json")
    with pytest.raises(SpecError, match="cannot write"):
        RecomputePolicy().save(tmp_path / "none" / "policy.json")
